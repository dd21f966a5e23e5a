"""What GPipe on ranks and the order of 1F1B must do."""

from collections.abc import Callable, Iterator
from itertools import accumulate, product

from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.model_parallel.chart import duration, in_order, pipeline_steps
from mgpu_tutorial.model_parallel.figures import lay_out
from mgpu_tutorial.pipelines import figures, stages
from mgpu_tutorial.pipelines.work import Pauses

# run_gpipe


def has_the_gradients_of_one(run: Callable) -> None:
    """leave the gradients of one process, on 1, 2, 3 and 4 ranks"""
    for ranks, micro in (1, 2), (2, 4), (3, 2), (4, 3):
        work = Pauses(ranks, forward=0.0)
        results = launch(run, ranks, work, micro).results
        for rank, one in enumerate(figures.gradients_alone(work, ranks, micro)):
            what = f"{ranks} rank(s), {micro} micro-batches: rank {rank}"
            assert results[rank] is not None, f"{what}: nothing was returned"
            for found, wanted in zip(results[rank][1], one, strict=True):
                expect(found, wanted, f"{what}: a gradient", within=1e-6)


def returns_losses(run: Callable) -> None:
    """return a loss for each micro-batch on the last rank, and none on the others"""
    lengths = [len(losses) for losses, _ in launch(run, 3, Pauses(3, 0.0), 5).results]
    expect(lengths, [0, 0, 5], "three ranks, five micro-batches: the losses")


def goes_forward_first(run: Callable) -> None:
    """do all forwards of a rank before its first backward, both from micro-batch 0 on"""
    report = launch(run, 3, Pauses(3, 0.0), 4, trace=True)
    (tasks,) = pipeline_steps(report)
    for rank in range(3):
        wanted = " ".join(f"{kind}{i}" for kind in "FB" for i in range(4))
        expect(" ".join(in_order(tasks, rank)), wanted, f"the order of rank {rank}")


def sends_at_once(run: Callable) -> None:
    """send each output and each gradient once, before the next micro-batch begins"""
    report = launch(run, 3, Pauses(3, 0.0), 2, trace=True)
    first, last = "F0 send F1 send B0 B1", "F0 F1 B0 send B1 send"
    for rank, wanted in enumerate([first, "F0 send F1 send B0 send B1 send", last]):
        mine = [e for e in report.events if e.rank == rank]
        tasks = [e for e in mine if e.sends or e.kind == "span"]
        names = ["send" if e.sends else e.note[0] + e.note[-1] for e in tasks]
        expect(" ".join(names), wanted, f"what rank {rank} of 3 does")


# order_of_1f1b


def does_each_once(order_of: Callable) -> None:
    """go forward and then backward through each micro-batch once, in their order"""
    for ranks, micro, rank, order in _orders(order_of):
        what = f"rank {rank} of {ranks}, {micro} micro-batch(es)"
        for kind in "FB":
            found = " ".join(name for name in order if str(name)[0] == kind)
            wanted = " ".join(f"{kind}{i}" for i in range(micro))
            expect(found, wanted, f"{what}: every {kind}")
        expect(len(order), 2 * micro, f"{what}: the names in the list")


def holds_few(order_of: Callable) -> None:
    """hold at most p − r micro-batches on rank r of p"""
    for ranks, micro, rank, order in _orders(order_of):
        held = max(accumulate(1 if name[0] == "F" else -1 for name in order))
        what = f"rank {rank} of {ranks}, {micro} micro-batch(es)"
        assert held <= ranks - rank, f"{what}: held at most {held}"


def takes_the_time_of_gpipe(order_of: Callable) -> None:
    """take 3 (m + p − 1) slots where a backward takes two"""
    for ranks, micro in (2, 3), (4, 2), (4, 6):
        given = Pauses(ranks, 0.0), micro, order_of, stages.isend
        (tasks,) = pipeline_steps(launch(stages.run_in_order, ranks, *given, trace=True))
        tasks = sorted(tasks, key=lambda task: task.begin)
        slots = lay_out(task._replace(begin=0, end=1 + (task.kind == "B")) for task in tasks)
        what = f"{ranks} ranks, {micro} micro-batches: the slots"
        expect(duration(slots), 3 * (micro + ranks - 1), what)


def _orders(order_of: Callable) -> Iterator[tuple[int, int, int, list[str]]]:
    """Ranks, micro-batches, a rank and its order, for all small numbers of both."""
    for ranks, micro in product(range(1, 5), (1, 2, 3, 4, 5, 8)):
        for rank in range(ranks):
            order = order_of(rank, ranks, micro)
            assert isinstance(order, list), f"rank {rank} of {ranks}: {order!r} is no list"
            yield ranks, micro, rank, order


build = Builder(
    "pipelines",
    {
        stages.run_gpipe: [
            has_the_gradients_of_one,
            returns_losses,
            goes_forward_first,
            sends_at_once,
        ],
        stages.order_of_1f1b: [does_each_once, holds_few, takes_the_time_of_gpipe],
    },
)
