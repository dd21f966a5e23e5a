"""What GPipe on ranks and the order of 1F1B must do."""

from collections.abc import Callable
from itertools import accumulate, product

import torch.distributed as dist
from torch import nn

from mgpu_tutorial.lab.run.errors import RankFailed
from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.model_parallel.figures import duration, tasks_of
from mgpu_tutorial.pipelines import figures, stages
from mgpu_tutorial.pipelines.work import Pauses

# run_gpipe

NO_GRADIENT = "grad can be implicitly created"  # what autograd says of a backward of None


class Narrowing(Pauses):
    """A stage narrows what it is given, so a gradient has the shape of its output alone."""

    loss = staticmethod(lambda output, target: output.square().mean())

    def module(self, index: int) -> nn.Module:
        module = super().module(index)
        module[0] = nn.Linear(64 - 8 * index, 56 - 8 * index)
        return module

    def shape(self, index: int, micro: int) -> list[int]:
        return [16, 64 - 8 * index]


def returns_what_one_computes(run: Callable) -> None:
    """return the last rank's losses, and the gradients of one process, on 1 to 4 ranks"""
    for ranks, micro in (1, 2), (2, 4), (3, 2), (4, 3):
        what = f"{ranks} rank(s), {micro} micro-batches:"
        try:
            results = launch(run, ranks, Narrowing(0.0), micro).results
        except RankFailed as error:
            if NO_GRADIENT not in str(error):
                raise
            side = "an output's gradient comes from the rank that got the output, rank + 1"
            raise AssertionError(f"{what} a backward got no gradient: {side}") from None
        assert None not in results, f"{what} nothing was returned"
        losses, gradients = zip(*results, strict=True)
        alone, wanted = figures.one_process(Narrowing(0.0), ranks, micro)
        lengths = [0] * (ranks - 1) + [micro]
        expect([len(own) for own in losses], lengths, f"{what} the numbers of losses")
        expect([*map(float, losses[-1])], alone, f"{what} the losses in order", within=1e-6)
        expect(gradients, wanted, f"{what} the gradients", within=1e-6)


def _in_groups(rank: int, world_size: int, run: Callable) -> tuple:
    """Ranks 0 and 2, and ranks 1 and 3, each as a pipeline of two stages."""
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    return run(dist.get_rank(group), 2, Narrowing(0.0), 2 + rank % 2, group)


def runs_in_a_group(run: Callable) -> None:
    """do the same on ranks 0 and 2, and on 1 and 3, where each pair is a group"""
    results = launch(_in_groups, 4, run).results
    for first in 0, 1:
        losses, gradients = zip(*results[first::2], strict=True)
        alone, wanted = figures.one_process(Narrowing(0.0), 2, 2 + first)
        what = f"ranks {first} and {first + 2} as a group:"
        expect([*map(float, losses[-1])], alone, f"{what} the losses in order", within=1e-6)
        expect(gradients, wanted, f"{what} the gradients", within=1e-6)


def sends_at_once(run: Callable) -> None:
    """do all forwards first, and send each output and gradient before the next micro-batch"""
    report = launch(run, 3, Pauses(0.0), 2, trace=True)
    first, last = "F0 send F1 send B0 B1", "F0 F1 B0 send B1 send"
    for rank, wanted in enumerate([first, "F0 send F1 send B0 send B1 send", last]):
        mine = [e for e in report.events if e.rank == rank]
        tasks = [e for e in mine if e.sends or e.kind == "span"]
        names = ["send" if e.sends else e.note[0] + e.note[-1] for e in tasks]
        expect(" ".join(names), wanted, f"what rank {rank} of 3 does")


# order_of_1f1b


def does_each_once_and_holds_few(order_of: Callable) -> None:
    """do each forward and backward once, and hold at most p − r micro-batches on rank r"""
    sizes = product(range(1, 5), (1, 2, 3, 4, 5, 8))
    for ranks, micro, rank in ((p, m, r) for p, m in sizes for r in range(p)):
        order = order_of(rank, ranks, micro)
        what = f"rank {rank} of {ranks}, {micro} micro-batch(es):"
        assert isinstance(order, list), f"{what} {order!r} is no list"
        for kind in "FB":
            found = " ".join(name for name in order if str(name)[0] == kind)
            wanted = " ".join(f"{kind}{i}" for i in range(micro))
            expect(found, wanted, f"{what} every {kind}")
        expect(len(order), 2 * micro, f"{what} the names in the list")
        early = [i for i in range(micro) if order.index(f"B{i}") < order.index(f"F{i}")]
        assert not early, f"{what} B{early[0]} comes before F{early[0]}"
        held = max(accumulate(1 if name[0] == "F" else -1 for name in order))
        assert held <= ranks - rank, f"{what} held at most {held}"


def takes_the_time_of_gpipe(order_of: Callable) -> None:
    """let no rank wait longer than it must, if a backward takes two slots"""
    for ranks, micro in (2, 3), (4, 2), (4, 6):
        given = Pauses(0.0), micro, order_of, stages.isend
        tasks = tasks_of(launch(stages.run_in_order, ranks, *given, trace=True))
        slots = figures.lay_out(tasks, F=1, B=2)
        what = f"{ranks} ranks, {micro} micro-batches: the slots"
        expect(duration(slots), 3 * (micro + ranks - 1), what)


build = Builder(
    "pipelines",
    {
        stages.run_gpipe: [returns_what_one_computes, sends_at_once, runs_in_a_group],
        stages.order_of_1f1b: [does_each_once_and_holds_few, takes_the_time_of_gpipe],
    },
)
