"""Models of full size in one line."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from mgpu_tutorial.shared.guards import whole


def turns_of(tokens: int, per_head: int) -> Tensor:
    """Rotary angles as complex numbers of size 1, in 32 bits: (tokens, 1, per_head / 2)."""
    speeds = 500_000 ** -(torch.arange(0, per_head, 2, dtype=torch.float32) / per_head)
    angles = torch.outer(torch.arange(tokens, dtype=torch.float32), speeds)
    return torch.polar(torch.ones_like(angles), angles)[:, None]


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Each pair of numbers of a head turned by its angle, computed in 32 bits.

    Without a compiler these are four kernels that pass over the memory, as in torchtitan.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[: x.shape[1]]).flatten(-2).type_as(x)


class Attention(nn.Module):
    """Causal, (batch, tokens, width) both ways; keys and values may have fewer heads.

    `turns` are the rotary angles of all tokens, or None for a model that has none.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int, turns: Tensor | None = None
    ) -> None:
        super().__init__()
        if width % heads or heads % kv_heads:
            raise ValueError(
                f"width {width}, {heads} heads and {kv_heads} of keys and values: each "
                "number must divide the one before it"
            )
        self.per_head, self.group, self.turns = width // heads, heads // kv_heads, turns
        kv_width = kv_heads * self.per_head
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_width, bias=False)
        self.value = nn.Linear(width, kv_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, tokens, heads, per head)
        q, k, v = (
            part(x).unflatten(-1, (-1, self.per_head))
            for part in (self.query, self.key, self.value)
        )
        if self.turns is not None:
            q, k = rotated(q, self.turns), rotated(k, self.turns)
        return self.out(self.attend(q, k, v).flatten(-2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, tokens, heads, per head) both ways; all tokens are here, in order."""
        if self.group > 1:
            k, v = (part.repeat_interleave(self.group, dim=2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class GatedMLP(nn.Module):
    """Two matrices in, of which one is the gate, and one out."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inside, bias=False)
        self.up = nn.Linear(width, inside, bias=False)
        self.down = nn.Linear(inside, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class MLP(nn.Module):
    """One matrix in, a GELU, one matrix out, as in GPT."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inside, bias=False)
        self.down = nn.Linear(inside, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm and added to its input."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, norm: Callable) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def llama(
    layers: int,
    width: int,
    heads: int,
    inside: int,
    kv_heads: int = 8,
    vocabulary: int = 128_256,
    sequence: int = 8192,
) -> nn.Sequential:
    """Embedding, layers, norm and head, one behind the other: tokens in, logits out.

    Sequences have at most `sequence` tokens.
    """
    whole("layers", layers)
    turns = turns_of(sequence, width // heads)
    norm = partial(nn.RMSNorm, width, eps=1e-5)
    layer = [
        Layer(Attention(width, heads, kv_heads, turns), GatedMLP(width, inside), norm)
        for _ in range(layers)
    ]
    head = nn.Linear(width, vocabulary, bias=False)
    return nn.Sequential(nn.Embedding(vocabulary, width), *layer, norm(), head)


def llama_3_8b(layers: int = 32) -> nn.Sequential:
    """Llama 3 8B, or so many of its 32 layers: https://arxiv.org/abs/2407.21783, table 3.

    Its parameters are of the default dtype. With all layers they are 8.03 billion.
    """
    return llama(layers, 4096, 32, 14_336)


def mpt_7b(layers: int = 32, width: int = 4096, heads: int = 32) -> nn.Sequential:
    """MPT 7B, or so many of its 32 layers; 13B has 40 layers, of width 5120, and 40 heads.

    https://github.com/mosaicml/llm-foundry. ALiBi, which adds to the scores, is left out.
    """
    whole("layers", layers)
    norm = partial(nn.LayerNorm, width)
    layer = [
        Layer(Attention(width, heads, heads), MLP(width, 4 * width), norm)
        for _ in range(layers)
    ]
    head = nn.Linear(width, 50_368, bias=False)
    return nn.Sequential(nn.Embedding(50_368, width), *layer, norm(), head)
