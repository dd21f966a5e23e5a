"""Let the model write, one character after the other, on the ranks of one tp group."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mgpu_tutorial.language_model.model import experts_of
from mgpu_tutorial.language_model.plan import plan_of, share_products
from mgpu_tutorial.tensor_parallel.block import Attention


def attend_one(attention: Attention, x: Tensor, cache: list[Tensor]) -> Tensor:
    """Attention of one new character, (1, 1, width), to itself and to those in the cache.

    The cache holds keys and values of this rank's heads.
    """
    heads = attention.qkv(x).unflatten(-1, (-1, 3, attention.per_head))
    q, k, v = (part.transpose(1, 2) for part in heads.unbind(-2))
    cache.append(torch.stack([k, v]))
    mixed = scaled_dot_product_attention(q, *torch.cat(cache, dim=-2))
    return attention.out(mixed.transpose(1, 2).flatten(-2))


def require_writing(whole: nn.Sequential, prompt: Tensor, count: int) -> None:
    """TypeError for what are no numbers of characters, ValueError for what has no place."""
    if not isinstance(prompt, Tensor) or prompt.dim() != 1 or prompt.dtype != torch.int64:
        raise TypeError(
            f"the prompt is {prompt!r:.40}: expected a row of whole numbers, one for each "
            "character, such as encode(text) gives"
        )
    if experts := experts_of(whole):
        raise ValueError(
            f"a model with {experts} experts in each block: these ranks share products, so "
            "let it write with own_text.talk, in one process"
        )
    if len(prompt) + count > (most := whole[0].position.num_embeddings):
        raise ValueError(f"{len(prompt)} + {count} characters: the model sees {most}")
    if not len(prompt) or count < 0:
        raise ValueError(f"{len(prompt)} characters to go on from, and {count} to write")


@torch.no_grad()
def write(
    rank: int, world_size: int, whole: nn.Sequential, prompt: Tensor, count: int, parts: Any
) -> tuple[Tensor, float]:
    """All ranks share the blocks, and go on from `prompt` with the likeliest characters.

    Returns all characters, and the smallest gap between the best two. Raises ValueError for
    more characters than the model sees at once, and for no prompt.
    """
    require_writing(whole, prompt, count)
    plan_of(f"tp={world_size}")  # refuses ranks that cannot share the heads
    embedding, *blocks, head = whole
    for block in blocks:
        share_products(block, None, parts)
    caches, written, margin = [[] for _ in blocks], prompt, float("inf")
    for place in range(len(prompt) + count - 1):
        x = embedding(written[None, place : place + 1], torch.tensor([place]))
        for block, cache in zip(blocks, caches, strict=True):
            x = x + attend_one(block.attention, block.attention_norm(x), cache)
            x = x + block.mlp(block.mlp_norm(x))
        if place == len(written) - 1:
            best = head(x)[0, 0].topk(2)
            margin = min(margin, (best.values[0] - best.values[1]).item())
            written = torch.cat([written, best.indices[:1]])
    return written, margin
