"""Apparatus, not the lesson: what the stages hold and send, when, and how long it takes."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mgpu_tutorial.ddp_buckets.experiments import trace_steps
from mgpu_tutorial.lab import Ledger, Table, launch, slow_link, span
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.traffic import ring_passes
from mgpu_tutorial.sharding.arithmetic import FLOAT32, STAGE_NAMES, held
from mgpu_tutorial.sharding.fsdp import Shard, clip
from mgpu_tutorial.sharding.model import ShardedModel
from mgpu_tutorial.sharding.training import (
    PREPARE,
    Prepare,
    Prepared,
    loss_of,
    new_model,
    take_step,
    train,
)
from mgpu_tutorial.shared.cost_model.links import Link, ring_seconds
from mgpu_tutorial.shared.pause import Pause


def memory_table(billions: float, ranks: int) -> Table:
    """What a rank holds in GB (10^9 bytes), in mixed precision: a row per stage of ZeRO."""
    rows = []
    for stage, name in STAGE_NAMES.items():
        parts = [nbytes / 1e9 for nbytes in held(billions * 1e9, ranks, stage)]
        rows.append([f"ZeRO {stage}: {name}", *(f"{x:.1f}" for x in [*parts, sum(parts)])])
    return Table(["GB on a rank", "parameters", "gradients", "optimizer", "total"], rows)


def totals_table(parameters: float, ranks: list[int]) -> Table:
    """All that a rank holds in GB, in mixed precision: a column per number of ranks."""
    lines = by_ranks(parameters, ranks)
    rows = [
        [f"{line}: {name}", *(f"{x:.1f}" for x in lines[line][1])]
        for line, name in zip(lines, STAGE_NAMES.values(), strict=True)
    ]
    return Table(["GB on a rank", *(f"of {n}" for n in ranks)], rows)


def by_ranks(parameters: float, ranks: list[int]) -> dict[str, tuple[list, list]]:
    """For `curves`: the GB on a rank of each number of ranks, a line per stage of ZeRO."""
    return {
        f"ZeRO {stage}": (ranks, [sum(held(parameters, n, stage)) / 1e9 for n in ranks])
        for stage in STAGE_NAMES
    }


# What the ranks hold


def count_state(rank: int, world_size: int, prepare: Prepare) -> list[int]:
    """The bytes of parameters, gradients and Adam's moments on this rank after a step."""
    prepared = prepare(new_model())
    take_step(prepared, step=0)
    return held_by(prepared)


def held_by(prepared: Prepared) -> list[int]:
    """The bytes of parameters, gradients and Adam's moments on this rank."""
    stepped = [p for group in prepared.optimizer.param_groups for p in group["params"]]
    states = prepared.optimizer.state.values()
    moments = [moment for s in states for moment in (s["exp_avg"], s["exp_avg_sq"])]
    ledger = Ledger()
    ledger.add("parameters", [here(p) for p in prepared.model.parameters()])
    ledger.add("gradients", [here(p.grad) for p in stepped])
    ledger.add("optimizer state", [here(moment) for moment in moments])
    return list(ledger["cpu"].values())


def here(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def watch_gathered(rank: int, world_size: int, shard: Shard, **settings: object) -> list[int]:
    """The bytes of parameters that are whole on a rank as each block begins its forward."""
    model = new_model()
    shard(model, **settings)
    seen: list[int] = []

    def look(block: nn.Module, _: tuple) -> None:
        whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
        seen.append(sum(p.nbytes for p in whole))

    for block in model.blocks:
        block.register_forward_pre_hook(look)  # runs after fully_shard's own
    loss_of(model, 0, rank, world_size).backward()
    return seen


def state_table(*stages: int) -> Table:
    """Launches four ranks at each of these stages; what each holds, and what it should."""
    rows = []
    for stage in stages:
        prepare = PREPARE[stage]
        first, *others = launch(count_state, 4, prepare).results
        assert all(other == first for other in others)
        formula = sum(held(29_312, 4, stage, FLOAT32))
        rows.append([prepare.__name__, *first, sum(first), int(formula)])
    head = ["bytes", "parameters", "gradients", "optimizer", "counted", "by formula"]
    return Table(head, rows)


# What they send


def trace_step(rank: int, world_size: int, prepare: Prepare) -> int:
    """The second step of a stage in a span; returns the bytes of the whole model."""
    model = new_model()
    nbytes = sum(p.nbytes for p in model.parameters())
    prepared = prepare(model)
    take_step(prepared, 0)
    with span("second step"):
        take_step(prepared, 1)
    return nbytes


def train_alone() -> dict[str, torch.Tensor]:
    """Launches one process that takes the ten steps of `train` in float64."""
    return launch(train, 1, PREPARE[0], dtype=torch.float64).results[0]


def furthest(prepare: Prepare, world_size: int, reference: dict[str, torch.Tensor]) -> float:
    """Launches ten steps in float64; how far any parameter of any rank is from these."""
    results = launch(train, world_size, prepare, dtype=torch.float64).results
    return largest_difference(results, [reference] * world_size)


def traffic_table(stages: list[Prepare]) -> Table:
    """Launches two ranks with each stage; how often the model travels in a step."""
    rows = []
    for prepare in stages:
        report = launch(trace_step, 2, prepare, trace=True)
        passed = sorted(ring_passes(report, "second step").items())
        models = {op: nbytes / report.results[0] for op, nbytes in passed}
        calls = ", ".join(f"{times:.2f} {op}" for op, times in models.items())
        rows.append([prepare.__name__, calls, f"{sum(models.values()):.2f}"])
    return Table(["", "times the model", "in all"], rows)


class SlowLayer(nn.Module):
    """A square layer whose forward and backward take their time, as if on a device."""

    def __init__(self, width: int, pause: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.pause = pause

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(Pause.apply(x, self.pause, 2 * self.pause))


LINK = Link(latency=2.5e-3, bandwidth=20e6)  # seconds per message, bytes per second


def trace_prefetch(rank: int, world_size: int, prefetch: bool) -> None:
    """Five steps over a slow link, with the next unit on the way or not."""
    layers = nn.Sequential(*(SlowLayer(256, 10e-3) for _ in range(6)))
    model = ShardedModel(layers, prefetch=prefetch)
    inputs = torch.randn(8, 256)
    with slow_link(lambda nbytes: ring_seconds(nbytes, world_size, LINK)):
        trace_steps(model, inputs, steps=5)


def norm_of_all_gradients() -> float:
    """As PyTorch's `clip_grad_norm_` finds it on two ranks, before it clips."""
    return launch(clip, 2).results[0]
