"""Let the model write, one character after the other, on the ranks of one tp group."""

from types import SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention

from mgpu_tutorial.language_model import PARTS, checkpoint
from mgpu_tutorial.language_model.model import CONTEXT, decode, encode, new_model
from mgpu_tutorial.language_model.plan import share_products
from mgpu_tutorial.tensor_parallel.block import Attention


def attend_one(attention: Attention, x: torch.Tensor, cache: dict) -> torch.Tensor:
    """Attention of one new character, (1, 1, width), to itself and to those in the cache.

    The cache holds keys and values of this rank's heads.
    """
    heads = attention.qkv(x).unflatten(-1, (-1, 3, attention.per_head))
    q, k, v = (part.transpose(1, 2) for part in heads.unbind(-2))
    cache["k"] = torch.cat([cache["k"], k], 2) if cache else k
    cache["v"] = torch.cat([cache["v"], v], 2) if "v" in cache else v
    mixed = scaled_dot_product_attention(q, cache["k"], cache["v"])
    return attention.out(mixed.transpose(1, 2).flatten(-2))


@torch.no_grad()
def write(
    rank: int,
    world_size: int,
    prompt: str = "torch.",
    count: int = 40,
    file: str = "",
    parts: SimpleNamespace = PARTS,
) -> tuple[str, float]:
    """All ranks share every product, and go on from `prompt` with the likeliest characters.

    Returns the text, of at most 64 characters, and the smallest gap between the best two.
    """
    if len(prompt) + count > CONTEXT:
        raise ValueError(f"{len(prompt)} + {count} characters: the model sees {CONTEXT}")
    model = new_model()
    checkpoint.load(file or checkpoint.SHIPPED, model)
    embedding, *blocks, head = model
    for block in blocks:
        share_products(block, None, parts)
    caches, written, margin = [{} for _ in blocks], encode(prompt), float("inf")
    for place in range(len(prompt) + count - 1):
        x = embedding(written[None, place : place + 1], torch.tensor([place]))
        for block, cache in zip(blocks, caches, strict=True):
            x = x + attend_one(block.attention, block.attention_norm(x), cache)
            x = x + block.mlp(block.mlp_norm(x))
        if place == len(written) - 1:
            best = head(x)[0, 0].topk(2)
            margin = min(margin, (best.values[0] - best.values[1]).item())
            written = torch.cat([written, best.indices[:1]])
    return decode(written), margin
