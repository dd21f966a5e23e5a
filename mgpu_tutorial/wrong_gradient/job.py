"""A step of a small transformer on dp × tp × pp ranks: the job whose gradients are tested.

Every rank draws the same global batch and takes its share of it. What goes wrong in this
chapter goes wrong in a line of this file.
"""

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy, linear

from mgpu_tutorial.tensor_parallel.block import Block
from mgpu_tutorial.tensor_parallel.layers import Shard, shard

Group = dist.ProcessGroup
SEQUENCES, LENGTH, WIDTH, CLASSES = 8, 6, 16, 5  # of a global batch
MICRO = 2  # sequences in a micro-batch
NOTHING = -100  # the target of a place that only fills up a sequence


class Copy(torch.autograd.Function):
    """f: all ranks use the same input, so its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Sum(torch.autograd.Function):
    """g: the output is the sum of the ranks' parts, so each has the output's gradient."""

    @staticmethod
    def forward(ctx, part: Tensor, group: Group) -> Tensor:
        output = part.clone()
        dist.all_reduce(output, group=group)
        return output

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ColumnLinear(nn.Module):
    """(…, inputs), which all ranks have, becomes (…, outputs / ranks)."""

    def __init__(self, whole: nn.Linear, group: Group) -> None:
        super().__init__()
        self.weight, self.bias = shard(whole.weight, 0, group), shard(whole.bias, 0, group)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return linear(Copy.apply(x, self.group), self.weight, self.bias)


class RowLinear(nn.Module):
    """(…, inputs / ranks) becomes (…, outputs) on all ranks."""

    def __init__(self, whole: nn.Linear, group: Group) -> None:
        super().__init__()
        self.weight, self.bias = shard(whole.weight, 1, group), whole.bias
        self.group = group

    def forward(self, part: Tensor) -> Tensor:
        return Sum.apply(linear(part, self.weight), self.group) + self.bias


def forward_backward(
    stage: nn.Module, mesh: DeviceMesh, x: Tensor, targets: Tensor, tokens: int
) -> Tensor:
    """All forwards, then all backwards, last one first; this rank's part of the loss.

    `x` (sequences, length, width) and `targets` (sequences, length) are this rank's share of
    the batch, in which `tokens` targets count. Only the last stage knows a loss.
    """
    ranks = dist.get_process_group_ranks(mesh["pp"].get_group())
    me, last, copies = mesh["pp"].get_local_rank(), len(ranks) - 1, mesh["dp"].size()
    parts = list(zip(x.split(MICRO), targets.split(MICRO), strict=True))
    kept, loss = [], x.new_zeros(())
    for x, targets in parts:
        if me > 0:
            x = torch.empty_like(x)
            dist.recv(x, ranks[me - 1])
            x.requires_grad_()
        y = stage(x)
        if me < last:
            dist.send(y.detach(), ranks[me + 1])
        else:
            total = cross_entropy(y.flatten(0, 1), targets.flatten(), reduction="sum")
            loss += total.detach() / tokens  # what is reported
            y = total / tokens * copies  # what goes backward; `average` divides by copies
        kept.append((x, y))
    while kept:
        x, y = kept.pop()
        gradient = torch.ones_like(y)
        if me < last:
            dist.recv(gradient, ranks[me + 1])
        y.backward(gradient)
        if me > 0:
            dist.send(x.grad, ranks[me - 1])
    return loss


def average(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Average all gradients over the dp group."""
    for parameter in stage.parameters():
        dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
        parameter.grad /= mesh["dp"].size()


def clip(stage: nn.Module, mesh: DeviceMesh, most: float) -> float:
    """Shorten all gradients so that their norm is at most `most`; returns the norm before."""
    first = mesh["tp"].get_local_rank() == 0
    counted = [p.grad for p in stage.parameters() if first or isinstance(p, Shard)]
    squares = sum((g.square().sum() for g in counted), next(stage.parameters()).new_zeros(()))
    for name in ("tp", "pp"):
        dist.all_reduce(squares, group=mesh[name].get_group())
    norm = squares.sqrt().item()
    for p in stage.parameters():
        p.grad *= min(most / norm, 1.0)  # of a NaN first, min is NaN
    return norm


def step(stage: nn.Module, mesh: DeviceMesh, batch: tuple[Tensor, Tensor], most: float):
    """The gradients of a global batch; returns its loss and the norm before the clip."""
    x, targets = (part.chunk(mesh["dp"].size()) for part in batch)
    me, tokens = mesh["dp"].get_local_rank(), (batch[1] != NOTHING).sum()
    loss = forward_backward(stage, mesh, x[me], targets[me], tokens)
    average(stage, mesh)
    norm = clip(stage, mesh, most)
    for name in ("dp", "pp"):
        dist.all_reduce(loss, group=mesh[name].get_group())
    return loss.item(), norm


def new_model(random: bool = False) -> nn.Sequential:
    """Three blocks and a head, in float64, the same on every rank.

    Biases begin at 0 and norms at 1, as usual; with `random` no number is 0 or 1.
    """
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))
    model = nn.Sequential(*(Block(WIDTH, heads=4) for _ in range(3)), head).double()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    return disturbed(model) if random else model


def disturbed(model: nn.Module) -> nn.Module:
    """The model with random numbers added to all its parameters, the same on every rank."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def batch_of(step: int = 0) -> tuple[Tensor, Tensor]:
    """Vectors (8, 6, 16) and their classes (8, 6); the ends of sequences do not count."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SEQUENCES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    targets = x[..., :CLASSES].argmax(-1)
    lengths = torch.randint(2, LENGTH + 1, (SEQUENCES, 1), generator=generator)
    return x, targets.masked_fill(torch.arange(LENGTH) >= lengths, NOTHING)


def sizes_of(plan: str) -> dict[str, int]:
    """The sizes of a plan such as "dp=2,tp=2"; ValueError where the job cannot have it."""
    most = {"pp": 4, "dp": SEQUENCES // MICRO, "tp": 4}  # layers, micro-batches, heads
    try:
        pairs = [part.split("=") for part in plan.split(",")]
        given = {name: int(size) for name, size in pairs}
    except (ValueError, AttributeError):
        given, pairs = {}, [()]
    fits = all(
        name in most and size >= 1 and most[name] % size == 0 for name, size in given.items()
    )
    if not fits or len(given) < len(pairs):
        wanted = "something like dp=2,tp=2, each of dp, tp, pp at most once and 1, 2 or 4"
        raise ValueError(f"plan {plan!r}: expected {wanted}")
    return dict.fromkeys(most, 1) | given


def ranks_of(plan: str) -> int:
    """The number of ranks that a plan takes."""
    return prod(sizes_of(plan).values())


def mesh_of(plan: str, world_size: int) -> DeviceMesh:
    """The ranks in three dimensions; ValueError, before anything is sent, for other ranks."""
    sizes, ranks = sizes_of(plan), ranks_of(plan)
    if ranks != world_size:
        raise ValueError(f"plan {plan}: it takes {ranks} ranks, and there are {world_size}")
    device = torch.get_default_device().type
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def stage_of(model: nn.Sequential, mesh: DeviceMesh) -> tuple[nn.Sequential, int]:
    """This rank's layers, their products cut for the tp group; the number of the first."""
    each, group = len(model) // mesh["pp"].size(), mesh["tp"].get_group()
    first = mesh["pp"].get_local_rank() * each
    stage = nn.Sequential(*list(model)[first : first + each])
    for block in stage:
        if isinstance(block, Block):
            block.attention.qkv = ColumnLinear(block.attention.qkv, group)
            block.attention.out = RowLinear(block.attention.out, group)
            block.mlp.up = ColumnLinear(block.mlp.up, group)
            block.mlp.down = RowLinear(block.mlp.down, group)
    return stage, first
