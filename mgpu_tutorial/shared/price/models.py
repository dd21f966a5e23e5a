"""Models of full size in one line, and a worker that trains one for two steps."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from mgpu_tutorial.lab import span


class Attention(nn.Module):
    """Causal, (batch, tokens, width) both ways; keys and values may have fewer heads."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.per_head, self.group = width // heads, heads // kv_heads
        kv_width = kv_heads * self.per_head
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_width, bias=False)
        self.value = nn.Linear(width, kv_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, heads, tokens, per head)
        q, k, v = (
            part(x).unflatten(-1, (-1, self.per_head)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        k, v = (part.repeat_interleave(self.group, dim=1) for part in (k, v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


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
    """Attention and a perceptron, each behind a norm and added to its input."""

    def __init__(
        self, width: int, heads: int, kv_heads: int, inside: int, gated: bool = True
    ) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.attention_norm, self.mlp_norm = norm(width), norm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.mlp = (GatedMLP if gated else MLP)(width, inside)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def decoder(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    inside: int,
    vocabulary: int,
    gated: bool = True,
) -> nn.Sequential:
    """Embedding, layers, norm and head, one behind the other: tokens in, logits out.

    Rotary embeddings are left out: they have no parameters, and little to compute.
    """
    return nn.Sequential(
        nn.Embedding(vocabulary, width),
        *(Layer(width, heads, kv_heads, inside, gated) for _ in range(layers)),
        (nn.RMSNorm if gated else nn.LayerNorm)(width),
        nn.Linear(width, vocabulary, bias=False),
    )


def llama_3_8b(layers: int = 32) -> nn.Sequential:
    """Llama 3 8B, or so many of its 32 layers: https://arxiv.org/abs/2407.21783, table 3.

    Its parameters are of the default dtype. With all layers they are 8.03 billion.
    """
    return decoder(layers, 4096, 32, 8, 14_336, 128_256)


def train_llama(
    rank: int,
    world_size: int,
    wrapper: Callable[[nn.Sequential], nn.Module] | None = None,
    layers: int = 8,
    tokens: int = 8192,
) -> None:
    """Two steps of AdamW in bfloat16, each rank on `tokens` in sequences of 8,192.

    `wrapper` makes the model of all ranks out of one of a rank; None is one process alone.
    """
    if tokens % 8192 or tokens < 1:
        raise ValueError(f"tokens come in sequences of 8,192, got {tokens}")
    torch.set_default_dtype(torch.bfloat16)
    model = llama_3_8b(layers)
    if wrapper:
        model = wrapper(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch = torch.zeros(tokens // 8192, 8192, dtype=torch.long)
    for step in range(2):
        with span(f"step {step}"):
            with span("forward"):
                loss = cross_entropy(model(batch).flatten(0, 1), batch.flatten())
            with span("backward"):
                loss.backward()
                getattr(model, "finish_gradient_synchronization", lambda: None)()
            with span("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
