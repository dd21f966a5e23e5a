"""Small jobs whose outcome is known: what they train, how they share it, what is wrong."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, linear
from torch.nn.parallel import DistributedDataParallel as DDP

WORDS, WIDTH, LENGTH, SEQUENCES = 32, 16, 13, 12
NOTHING = -100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net():
    torch.manual_seed(0)
    return Net()


def tied():
    model = net()
    model.head.weight = model.emb.weight
    return model


def net_of_this_rank():
    torch.manual_seed(dist.get_rank())
    return Net()


def batch_of(step, ragged=False):
    """Tokens and their targets; of ragged ones later sequences count longer."""
    generator = torch.Generator().manual_seed(step + 3)
    tokens = torch.randint(WORDS, (SEQUENCES, LENGTH), generator=generator)
    targets = torch.roll(tokens, -1, 1).clone()
    for i in range(SEQUENCES if ragged else 0):
        targets[i, 4 + i :] = NOTHING
    return tokens, targets


def mean(out, targets, tokens, share):
    return cross_entropy(out, targets)


def summed(out, targets, tokens, share):
    return cross_entropy(out, targets, reduction="sum")


def by_tokens(out, targets, tokens, share):
    return cross_entropy(out, targets, reduction="sum") / tokens * share


def weighted(out, targets, tokens, share):
    return cross_entropy(out, targets, weight=torch.arange(1.0, WORDS + 1))


def train(
    rank: int,
    ranks: int,
    wrap: Callable | None = None,
    model_of: Callable = net,
    loss_of: Callable = mean,
    ragged: bool = False,
    shares: int | None = None,  # into how many parts the batch goes; all ranks by default
    before_step: Callable | None = None,
    optimizer_of: Callable = torch.optim.AdamW,
    clip: float | None = None,
    steps: int = 2,
):
    """The job of all rows: one process is plain, several are wrapped."""
    model = model_of()
    if ranks > 1:
        model = wrap(model)
    optimizer = optimizer_of(model.parameters(), lr=0.01)
    parts = 1 if ranks == 1 else shares or ranks
    part, losses = rank // (ranks // parts), []
    for step in range(steps):
        tokens, targets = batch_of(step, ragged)
        counting = (targets != NOTHING).sum()
        out = model(tokens[part::parts]).flatten(0, 1)
        loss = loss_of(out, targets[part::parts].flatten(), counting, parts)
        loss.backward()
        if hasattr(model, "finish_gradient_synchronization"):
            model.finish_gradient_synchronization()
        if before_step and ranks > 1:
            before_step(model, step)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def alone(model):
    """Each rank for itself."""
    return model


def sharded(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def tensor_parallel(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def two_dimensions(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        fully_shard(parallelize_module(layer, mesh["tp"], plan), mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def frozen_norms(model):
    for layer in model.layers:
        layer.norm.requires_grad_(False)
    return DDP(model)


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, adds_up):
        ctx.adds_up = adds_up
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if ctx.adds_up:
            dist.all_reduce(gradient)
        return gradient, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def part_of(parameter, dim):
    mine = parameter.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()
    part = nn.Parameter(mine)
    part.cut, part.group = dim, None
    return part


class CutBlock(nn.Module):
    """Tensor parallel by hand; the faults leave out f, or add the bias on each rank."""

    def __init__(self, block, f=True, bias_on_each=False):
        super().__init__()
        self.norm, self.up, self.down = block.norm, block.up, block.down
        self.up.weight, self.up.bias = part_of(self.up.weight, 0), part_of(self.up.bias, 0)
        self.down.weight = part_of(self.down.weight, 1)
        self.f, self.bias_on_each = f, bias_on_each

    def forward(self, x):
        inside = torch.tanh(self.up(Copy.apply(self.norm(x), self.f)))
        if self.bias_on_each:
            return x + Sum.apply(linear(inside, self.down.weight, self.down.bias))
        return x + Sum.apply(linear(inside, self.down.weight)) + self.down.bias


def by_hand(model, **faults):
    for i, layer in enumerate(model.layers):
        model.layers[i] = CutBlock(layer, **faults)
    return model


def without_f(model):
    return by_hand(model, f=False)


def bias_on_each(model):
    return by_hand(model, bias_on_each=True)


def halve(model, step):
    for p in model.parameters():
        p.grad /= 2


def halve_at_second(model, step):
    if step:
        halve(model, step)


def double_half_of_the_rows(model, step):
    model.module.layers[1].up.weight.grad[2 * WIDTH :] *= 2


def average_all(model, step):
    for p in model.parameters():
        dist.all_reduce(p.grad, dist.ReduceOp.AVG)


def average_all_but_the_head(model, step):
    for name, p in model.named_parameters():
        if "head" not in name:
            dist.all_reduce(p.grad, dist.ReduceOp.AVG)


class Flat(nn.Module):
    def forward(self, x):
        return x.flatten(0, 1)


def with_batch_norm():
    torch.manual_seed(0)
    layers = (
        nn.Embedding(WORDS, WIDTH),
        Flat(),
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, WORDS),
    )
    return nn.Sequential(*layers, nn.Unflatten(0, (-1, LENGTH)))


def with_dropout():
    model = net()
    model.layers[1].down = nn.Sequential(model.layers[1].down, nn.Dropout(0.2))
    return model
