"""A block of a transformer, its layers on several ranks, and what must be the same on all."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

from mgpu_tutorial.shared.models import MLP
from mgpu_tutorial.shared.parameters import fingerprint
from mgpu_tutorial.tensor_parallel.layers import (
    ColumnParallelLinear,
    Group,
    RowParallelLinear,
)


class Attention(nn.Module):
    """Each token looks at itself and those before it; (batch, sequence, width) both ways."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.per_head = width // heads
        self.qkv = nn.Linear(width, 3 * width)  # head by head: query, key, value
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.per_head))
        # each (batch, heads, sequence, per head)
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(-2))
        mixed = self.attend(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(-2))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """Attention, then an MLP; each takes the normed input and adds its output to x."""

    def __init__(self, width: int = 48, heads: int = 12) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


PLAN = {
    "attention.qkv": ColumnParallelLinear,
    "attention.out": RowParallelLinear,
    "mlp.up": ColumnParallelLinear,
    "mlp.down": RowParallelLinear,
}


def parallelize(model: nn.Module, plan: dict[str, type], group: Group = None) -> nn.Module:
    """Replace the layers whose names end as the plan says, each by one of that kind.

    From columns to rows each column, or head, stays alone. A parameter that another module
    has too, as a tied head has the embedding's, is refused. `prove` it on your model.
    """
    for ending, kind in plan.items():
        every = [name for name, _ in model.named_modules()]
        names = [name for name in every if f".{name}".endswith(f".{ending}")]
        if not names:
            raise ValueError(f"no layer's name ends with {ending!r}")
        for name in names:
            require_untied(model, name)
            model.set_submodule(name, kind(model.get_submodule(name), group))
    return model


def require_untied(model: nn.Module, name: str) -> None:
    """ValueError where a parameter of this module stands in the model by another name too."""
    named = list(model.named_parameters(remove_duplicate=False))
    for own, parameter in model.get_submodule(name).named_parameters(prefix=name):
        others = [other for other, p in named if p is parameter and other != own]
        if others:
            raise ValueError(
                f"`{own}` is `{others[0]}` too, and the tie would end: untie them, or leave "
                "both out of the plan"
            )


def copies(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that every rank has whole, by name."""
    return {n: p for n, p in model.named_parameters() if not hasattr(p, "cut")}


def copies_that_differ(model: nn.Module, group: Group = None) -> list[str]:
    """The copies whose bits differ between ranks; all ranks of the group call it."""
    own = {name: fingerprint(nn.ParameterList([p])) for name, p in copies(model).items()}
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return [name for name in own if len({other[name] for other in everyone}) > 1]


def whole_of(tensor: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Put together what all ranks have of `parameter`: its values, or its gradient."""
    if not hasattr(parameter, "cut"):
        return tensor.detach()
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size(parameter.group))]
    dist.all_gather(every, tensor.detach().contiguous(), group=parameter.group)
    return torch.cat(every, parameter.cut)


def new_block() -> Block:
    """A block of width 48 with twelve heads, in float64; the same on every rank."""
    torch.manual_seed(0)
    return Block().double()


def gradients_of(block: Block, step: int = 0) -> torch.Tensor:
    """Forward and backward of a batch that all ranks have; returns the loss."""
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, 4, 12, 48, generator=generator, dtype=torch.float64)
    loss = mse_loss(block(x), target)
    loss.backward()
    return loss.detach()
