"""What the reader's stages of ZeRO must do, on real ranks."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from mgpu_tutorial.lab import note, span
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.sharding.stages import loss_of, new_tower
from mgpu_tutorial.sharding.zero import Gather, chain, owners, sharded_step


def _calls(report: Report, during: str) -> list[str]:
    """The collectives that rank 0 calls inside a span."""
    return [e.op for e in events_of(report, during) if e.rank == 0 and e.op]


def _train(
    rank: int, world_size: int, step: Callable | None, kind: type[Optimizer]
) -> dict[str, torch.Tensor]:
    """How three steps have moved the tower; without `step` one process takes them."""
    tower, start = new_tower(torch.float64), new_tower(torch.float64).state_dict()
    parameters = list(tower.parameters())
    owner = [i % world_size for i in range(len(parameters))]
    optimizer = kind(parameters[rank::world_size], lr=0.01)
    for number in range(3):
        tower.zero_grad()
        loss_of(tower, number, rank, world_size).backward()
        with span(f"step {number}"):
            step(parameters, owner, optimizer) if step else optimizer.step()
    return {name: value - start[name] for name, value in tower.state_dict().items()}


def steps_like_one(step: Callable) -> None:
    """equal one process on one and on two ranks with SGD, and on three with Adam"""
    for n, kind in ((1, SGD), (2, SGD), (3, Adam)):
        alone = _train(0, 1, None, kind)
        results = launch(_train, n, step, kind).results
        far, rank, name = max(
            (largest_difference(moved, alone[name]), rank, name)
            for rank, found in enumerate(results)
            for name, moved in found.items()
        )
        assert far < 1e-9, (
            f"{kind.__name__}: rank {rank} of {n} has moved `{name}` by a distance of "
            f"{results[rank][name].norm():.2g}, and one process by {alone[name].norm():.2g}"
        )


def sends_the_model_twice(step: Callable) -> None:
    """send each gradient to one rank, and each new value to all"""
    ops = _calls(launch(_train, 2, step, SGD, trace=True), "step 1")
    wanted = {"reduce": 16, "broadcast": 16}
    expect({op: ops.count(op) for op in ops}, wanted, "the calls of a step")


TOWER = [p.numel() for p in new_tower().parameters()]
# sizes, ranks, and what the fullest rank then owns where the largest goes first
CASES = (
    (TOWER, 4, 33_088),
    ([1, 1, 1, 1, 1, 1, 9], 3, 9),
    ([8, 1, 8, 1, 8, 1, 8], 3, 16),
    ([5], 2, 5),
)


def _owners(rank: int, world_size: int, rule: Callable) -> list[list[int]]:
    return [rule([torch.empty(n) for n in sizes], ranks) for sizes, ranks, _ in CASES]


def agrees_on_every_rank(rule: Callable) -> None:
    """make the same list of owners on every rank"""
    first, second = launch(_owners, 2, rule).results
    assert first[0] is not None, "nothing was returned. Is a `return` missing?"
    expect(second[0], first[0], "the tower's owners on rank 1, beside those on rank 0")


def begins_with_the_largest(rule: Callable) -> None:
    """share the tower evenly, and other sizes so that the fullest rank has little more"""
    (lists,) = launch(_owners, 1, rule).results
    for (sizes, ranks, most), found in zip(CASES, lists, strict=True):
        expect(len(found), len(sizes), f"{len(sizes)} parameters: the length of the list")
        owned = [0] * ranks
        for owner, size in zip(found, sizes, strict=True):
            assert owner in range(ranks), f"{owner} is no rank of {ranks}"
            owned[owner] += size
        expect(max(owned), most, f"of {sizes} the {ranks} ranks own {owned}: the fullest has")


def _gather(rank: int, world_size: int, gather: type) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole of shards of two numbers, and a shard's gradient of a loss of its own."""
    shard = torch.tensor([10.0 * rank, 10.0 * rank + 1], requires_grad=True)
    with span("forward"):
        whole = gather.apply(shard)
    assert isinstance(whole, torch.Tensor), "forward returns no tensor"
    weights = (rank + 1) * torch.arange(1.0, 1 + len(whole))
    with span("backward"):
        (whole * weights).sum().backward()
    return whole.detach(), shard.grad


def gathers_and_scatters(gather: type) -> None:
    """return all shards in order, and give back this rank's shard of the mean gradient"""
    for n in (1, 3):
        shards = torch.tensor([10.0 * rank + i for rank in range(n) for i in (0, 1)])
        mean = (n + 1) / 2 * torch.arange(1.0, 1 + 2 * n)
        for rank, (whole, gradient) in enumerate(launch(_gather, n, gather).results):
            expect(whole, shards, f"rank {rank} of {n}: the whole tensor")
            expect(gradient, mean[2 * rank :][:2], f"rank {rank} of {n}: the gradient", 1e-5)


def makes_two_calls(gather: type) -> None:
    """make one all-gather in forward, and one reduce-scatter in backward"""
    report = launch(_gather, 2, gather, trace=True)
    for phase, wanted in (("forward", "all_gather"), ("backward", "reduce_scatter")):
        ops = _calls(report, phase)
        assert len(ops) == 1 and wanted in ops[0], f"the calls of {phase}: {', '.join(ops)}"


def _layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    note("layer")
    return torch.tanh(x @ weight)


def _chain(
    rank: int, world_size: int, layers: Callable
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output of three layers on this rank's rows, and the gradients of its shards."""
    torch.manual_seed(0)
    weights, x = torch.randn(3, 9).double(), torch.randn(6, 3).double()
    padded = nn.functional.pad(weights, (0, -9 % world_size))
    shards = [w.chunk(world_size)[rank].clone().requires_grad_() for w in padded]
    output = layers(shards, torch.Size([3, 3]), x.chunk(world_size)[rank], _layer)
    assert isinstance(output, torch.Tensor), "chain returns no tensor"
    output.square().mean().backward()
    assert all(shard.grad is not None for shard in shards), "a shard gets no gradient"
    return output.detach(), [shard.grad for shard in shards]


def _alone(weights: list[torch.Tensor], shape: torch.Size, x: torch.Tensor, layer: Callable):
    for weight in weights:
        x = layer(x, weight.view(shape))
    return x


def computes_like_one(layers: Callable) -> None:
    """equal one process on 1, 2 and 3 ranks, with its gradients"""
    output, gradients = _chain(0, 1, _alone)
    for n in (1, 2, 3):
        results = launch(_chain, n, layers).results
        found = torch.cat([part for part, _ in results])
        expect(found, output, f"world size {n}: the output", 1e-12)
        for i, gradient in enumerate(gradients):
            whole = torch.cat([shards[i] for _, shards in results])[:9]
            expect(whole, gradient, f"world size {n}: the gradient of weight {i}", 1e-12)


def gathers_one_by_one(layers: Callable) -> None:
    """gather a weight only when x has come to it"""
    events = launch(_chain, 2, layers, trace=True).events
    calls = [e.note if e.kind == "note" else e.op for e in events if e.rank == 0]
    gathers = sum("all_gather" in call for call in calls[: calls.index("layer")])
    assert gathers == 1, f"{gathers} weights are gathered before the first layer computes"


build = Builder(
    "sharding",
    {
        sharded_step: [steps_like_one, sends_the_model_twice],
        owners: [agrees_on_every_rank, begins_with_the_largest],
        Gather: [gathers_and_scatters, makes_two_calls],
        chain: [computes_like_one, gathers_one_by_one],
    },
)
