"""Apparatus, not the lesson: what the stages hold and send, when, and how long it takes."""

from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mgpu_tutorial.lab import Ledger, Table, launch, slow_link, span
from mgpu_tutorial.lab.measure import in_turns, largest_difference
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.sharding import arithmetic
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
from mgpu_tutorial.shared.models import SmallTransformer
from mgpu_tutorial.shared.pause import Pause


def memory_table(billions: float, ranks: int) -> Table:
    """What a rank holds in GB (10^9 bytes), in mixed precision: a row per stage of ZeRO."""
    rows = []
    for stage, name in arithmetic.STAGE_NAMES.items():
        parts = [nbytes / 1e9 for nbytes in arithmetic.held(billions * 1e9, ranks, stage)]
        rows.append([f"ZeRO {stage}: {name}", *(f"{x:.1f}" for x in [*parts, sum(parts)])])
    return Table(["GB on a rank", "parameters", "gradients", "optimizer", "total"], rows)


def totals_table(parameters: float, ranks: list[int]) -> Table:
    """All that a rank holds in GB, in mixed precision: a column per number of ranks."""
    rows = []
    for stage, name in arithmetic.STAGE_NAMES.items():
        gb = [sum(arithmetic.held(parameters, n, stage)) / 1e9 for n in ranks]
        rows.append([f"ZeRO {stage}: {name}", *(f"{x:.1f}" for x in gb)])
    return Table(["GB on a rank", *(f"of {n}" for n in ranks)], rows)


def by_ranks(parameters: float, ranks: list[int]) -> dict[str, tuple[list, list]]:
    """For `curves`: the GB on a rank of each number of ranks, a line per stage of ZeRO."""
    lines = {}
    for stage in arithmetic.STAGE_NAMES:
        gb = [sum(arithmetic.held(parameters, n, stage)) / 1e9 for n in ranks]
        lines[f"ZeRO {stage}"] = ranks, gb
    return lines


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
        formula = sum(arithmetic.held(29_312, 4, stage, arithmetic.FLOAT32))
        rows.append([prepare.__name__, *first, sum(first), int(formula)])
    head = ["bytes", "parameters", "gradients", "optimizer", "counted", "by formula"]
    return Table(head, rows)


# What they send

# How often the bytes of a collective travel: an all_reduce is a reduce_scatter and then an
# all_gather. Of those, each rank sends (N-1)/N of the whole tensor.
TRIPS = Counter(all_reduce=2, reduce=1, broadcast=1)
TRIPS |= Counter(reduce_scatter_single=1, all_gather_single=1)


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


def models_sent(report: Report) -> dict[str, float]:
    """How many times the model travels in a traced step, by collective and in all."""
    sent: Counter[str] = Counter()
    for event in events_of(report, "second step"):
        if event.rank == 0 and event.op in TRIPS:
            # the recorder notes the smaller side of a reduce_scatter, the output
            sides = report.world_size if event.op == "reduce_scatter_single" else 1
            sent[event.op] += TRIPS[event.op] * sides * event.nbytes
    models = {op: nbytes / report.results[0] for op, nbytes in sorted(sent.items())}
    return models | {"in all": sum(models.values())}


def traffic_table(stages: list[Prepare]) -> Table:
    """Launches two ranks with each stage; how often the model travels in a step."""
    rows = []
    for prepare in stages:
        sent = models_sent(launch(trace_step, 2, prepare, trace=True))
        total = sent.pop("in all")
        calls = ", ".join(f"{times:.2f} {op}" for op, times in sent.items())
        rows.append([prepare.__name__, calls, f"{total:.2f}"])
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


def trace_prefetch(rank: int, world_size: int, prefetch: bool, depth: int = 6) -> None:
    """Five steps over a slow link, with the next unit on the way or not."""
    layers = nn.Sequential(*(SlowLayer(256, 10e-3) for _ in range(depth)))
    model = ShardedModel(layers, prefetch=prefetch)
    inputs = torch.randn(8, 256)
    with slow_link(lambda nbytes: ring_seconds(nbytes, world_size, LINK)):
        for step in range(5):
            model.zero_grad()
            dist.barrier()
            with span(f"step {step}"):
                with span("forward"):
                    loss = model(inputs).square().mean()
                with span("backward"):
                    loss.backward()
                with span("finish"):
                    model.finish_gradient_synchronization()


def milliseconds(report: Report, name: str = "shortest") -> float:
    """How long rank 0's span of this name took."""
    (found,) = [e for e in report.events if (e.rank, e.kind, e.note) == (0, "span", name)]
    return (found.end - found.begin) * 1e3


def time_stages(
    rank: int,
    world_size: int,
    stages: dict[str, Prepare],
    model: dict[str, int],
    batch: tuple[int, int],
    steps: int,
) -> dict[str, tuple[list[float], int]]:
    """The seconds of each step with each stage, and the bytes that a rank then holds.

    `model` are the arguments of a SmallTransformer, `batch` sequences and tokens of a rank.
    """
    prepared = {name: prepare(SmallTransformer(**model)) for name, prepare in stages.items()}
    tokens = torch.randint(model["vocabulary"], batch)

    def step(one: Prepared) -> None:
        one.optimizer.zero_grad()
        one.model(tokens).square().mean().backward()
        one.after_backward()
        one.optimizer.step()
        one.after_step()

    actions = {name: partial(step, one) for name, one in prepared.items()}
    seconds = in_turns(actions, steps, warm_up=2)
    return {name: (seconds[name], sum(held_by(one))) for name, one in prepared.items()}


def norm_of_all_gradients() -> float:
    """As PyTorch's `clip_grad_norm_` finds it on two ranks, before it clips."""
    return launch(clip, 2).results[0][0]
