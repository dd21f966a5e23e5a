"""Apparatus, not the lesson: what the stages hold and send, and when."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from mgpu_tutorial.lab import Table, film, frame, launch, span
from mgpu_tutorial.lab.draw.drawing import FAINT, INK
from mgpu_tutorial.lab.draw.film import Film
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import milliseconds, ring_passes, shortest_step
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.sharding.blocks import ShardedBlock, linked
from mgpu_tutorial.sharding.stages import (
    Prepared,
    full_parameters,
    loss_of,
    new_tower,
    prepare,
)
from mgpu_tutorial.shared.cost_model.links import Link, ring_seconds
from mgpu_tutorial.shared.slow_link import slow_link


def train(
    rank: int, world_size: int, stages: Sequence[int], dtype: torch.dtype = torch.float32
) -> list[tuple]:
    """Ten steps at each stage: the bytes that are held, filmed too, and all parameters."""
    found, parts = [], ("parameters", "gradients", "optimizer state")
    for stage in stages:
        prepared, held = prepare(stage, new_tower(dtype)), {}
        for step in range(10):
            prepared.model.zero_grad()
            prepared.optimizer.zero_grad()
            with span(f"ZeRO {stage}, step {step}"):
                loss_of(prepared.model, step, rank, world_size).backward()
                held = {"as backward ends": held_by(prepared)}
                prepared.step()
        if (after := held_by(prepared)) not in held.values():
            held["after the step"] = after
        for moment, nbytes in held.items():
            says = f"ZeRO {stage}, {moment}: {sum(nbytes):,} bytes on a rank."
            whole = [n >= dtype.itemsize * 132_352 for n in nbytes]
            bricks = [range(world_size) if is_whole else [rank] for is_whole in whole]
            frame(says, dict(zip(parts, bricks, strict=True)))
        found.append((list(held.values()), full_parameters(prepared.model)))
    return found


def held_by(prepared: Prepared) -> list[int]:
    """The bytes of parameters, gradients and Adam's moments on this rank."""
    parameters, states = set(prepared.model.parameters()), prepared.optimizer.state.values()
    stepped = {p for group in prepared.optimizer.param_groups for p in group["params"]}
    gradients = [p.grad for p in parameters | stepped if p.grad is not None]
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    return [sum(t.nbytes for t in tensors) for tensors in (parameters, gradients, moments)]


def stage_film(*stages: int) -> Film:
    """Launches four ranks that train at each of these stages; what they hold shrinks."""
    report = launch(train, 4, stages, trace=True)
    in_all = [sum(nbytes) for held, _ in report.results[0] for nbytes in held]
    return film_with_curve(report, in_all)


def traffic_table() -> Table:
    """Launches two ranks; how often the model travels in a step of each stage."""
    report, rows = launch(train, 2, range(4), trace=True), []
    for stage in range(4):
        passed = sorted(ring_passes(report, f"ZeRO {stage}, step 1").items())
        models = {op: nbytes / (4 * 132_352) for op, nbytes in passed}
        calls = ", ".join(f"{times:.2f} {op}" for op, times in models.items())
        rows.append([f"ZeRO {stage}", calls, f"{sum(models.values()):.2f}"])
    return Table(["", "times the model", "in all"], rows)


def distances_table() -> Table:
    """Launches three ranks; how far any parameter of each stage is from one process."""
    ((_, alone),) = launch(train, 1, [0], torch.float64).results[0]
    results = launch(train, 3, range(4), torch.float64).results
    stages = {f"ZeRO {i}": [found[i][1] for found in results] for i in range(4)}
    return distances(
        ["3 ranks, float64", "from 1 process after 10 steps of Adam"], stages, alone
    )


def distances(head: list[str], found: dict[str, list], alone: dict) -> Table:
    """A row for each name: how far the tensors of any rank are from those of one process."""
    rows = []
    for name, of_ranks in found.items():
        far = largest_difference(of_ranks, [alone] * len(of_ranks))
        rows.append([name, "below 1e-12" if far < 1e-12 else f"{far:.0e}"])
    return Table(head, rows)


def film_with_curve(report: Report, most: Sequence[int]) -> Film:
    """A film with a curve of these bytes under it, one number a frame."""
    shown = film(report)
    for number, page in enumerate(shown.frames):
        page.height += 64
        left, right, bottom = 64, page.width - 90, page.height - 12
        across = (right - left) / (len(most) - 1)
        at = [(left + across * i, bottom - 38 * n / max(most)) for i, n in enumerate(most)]
        page.line(left, bottom, right, bottom, FAINT, 1)
        for before, after in pairwise(at):
            page.line(*before, *after, INK, 2)
        x, y = at[number]
        page.box(x - 5, y - 5, 10, 10, INK, INK, 1)
        page.label(8, bottom - 14, "bytes", 14, anchor="start")
        text = bytes_text(most[number])
        page.label(right + 10, bottom - 14, text, 14, INK, "start", "bold")
    return shown


def watch_gathered(rank: int, world_size: int, shard: Callable) -> tuple[str, int]:
    """The bytes of gathered tensors that are alive after forward; all gathers of a step."""
    tower, gathered, gather = new_tower(), [], dist.all_gather_single
    tower = shard(tower) or tower

    def watch(whole: torch.Tensor, mine: torch.Tensor, **options: Any) -> None:
        gathered.append((StorageWeakRef(whole.untyped_storage()), whole.nbytes))
        gather(whole, mine, **options)

    dist.all_gather_single = watch
    loss = loss_of(tower, 0, rank, world_size)
    time.sleep(0.2)  # a thread of the process group may let go a little later
    alive = sum(nbytes for memory, nbytes in gathered if not memory.expired())
    loss.backward()
    return f"{alive:,}", len(gathered)


def gathered_table(*ways: Callable) -> Table:
    """Launches two ranks for each way to shard; what stays whole for backward, the calls."""
    rows = [[way.__name__, *launch(watch_gathered, 2, way).results[0]] for way in ways]
    return Table(["", "whole bytes between forward and backward", "all-gathers"], rows)


def film_blocks(rank: int, world_size: int, kind: type[ShardedBlock]) -> list[int]:
    """A forward and backward of two blocks: a frame after each change, and its bytes."""
    tower, gradients, in_all = new_tower()[:2], [None] * 2, []

    def look(says: str) -> None:
        bricks, held = {}, []
        for i, (block, gradient) in enumerate(zip(tower, gradients, strict=True)):
            bricks[f"block {i}"] = [rank] if block.whole is None else range(world_size)
            own = "whole" if gradient is not None else []
            bricks[f"gradient {i}"] = own if block.shard.grad is None else "sum ½"
            held += block.shard, block.whole, gradient, block.shard.grad
        in_all.append(sum(t.nbytes for t in held if t is not None))
        frame(says, bricks)

    class FilmedBlock(kind):
        def unshard(self) -> torch.Tensor:
            whole = super().unshard()
            self.whole = whole.detach()
            caller = "forward" if torch.is_grad_enabled() else "unpack"
            look(f"Block {self.i}, {caller}: unshard, by an all-gather. Then it computes.")
            return whole

        def reshard(self, gradient: torch.Tensor | None = None) -> None:
            super().reshard()
            gradients[self.i] = gradient
            now = "forward: reshard."
            if gradient is not None:
                now = "the gradient's hook: reshard. Its gradient stays."
            look(f"Block {self.i}, {now}")

        def scattered(self, shard: nn.Parameter) -> None:
            gradients[self.i] = None
            says = "the gradients' sum, and its own shard only, by a reduce-scatter."
            look(f"Block {self.i}, Gather.backward: {says}")

    for i in range(2):
        tower[i] = FilmedBlock(tower[i])
        tower[i].i = i
        tower[i].shard.register_post_accumulate_grad_hook(tower[i].scattered)
    look("Between steps each rank has its shard of every block.")
    loss_of(tower, 0, rank, world_size).backward()
    return in_all


def block_film(kind: type[ShardedBlock] = ShardedBlock) -> Film:
    """Launches two ranks, and shows which blocks of this kind are whole at each moment."""
    report = launch(film_blocks, 2, kind, trace=True)
    return film_with_curve(report, report.results[0])


def wait(name: str, seconds: float) -> None:
    """As if a device computed."""
    with span(name):
        time.sleep(seconds)


def busy(layer: nn.Module, inputs: tuple, output: torch.Tensor, name: str) -> None:
    """A layer that takes 20 ms in forward and 40 in backward."""
    wait(f"{name} block forward", 20e-3)
    output.register_hook(lambda _: wait(f"{name} block backward", 40e-3))


def busy_steps(rank: int, world_size: int, kind: type[ShardedBlock]) -> None:
    """Six steps of four busy blocks over a link of 5 ms a message and 5 MB/s."""
    tower, link = new_tower(), Link(latency=5e-3, bandwidth=5e6)
    for i, block in enumerate(tower):
        block.up.register_forward_hook(partial(busy, name=f"{i}"))
    model = linked([kind(block) for block in tower])
    with slow_link(lambda nbytes: ring_seconds(nbytes, world_size, link)):
        for step in range(6):
            dist.barrier()
            with span(f"step {step}"):
                model(torch.randn(8, 64)).square().mean().backward()


def prefetching(kind: type[ShardedBlock]) -> tuple[Report, float]:
    """Launches two ranks; what they compute and send in their shortest step, and its ms."""
    run = shortest_step(launch(busy_steps, 2, kind, trace=True))
    return run, milliseconds(run, "shortest")
