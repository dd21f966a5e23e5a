"""What GPipe on ranks and the order of 1F1B must do."""

from collections.abc import Callable, Sequence

from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.model_parallel.tasks import in_order, pipeline_steps
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
    for ranks, micro in SIZES:
        for rank, order in _orders(order_of, ranks, micro):
            what = f"rank {rank} of {ranks}, {micro} micro-batch(es)"
            for kind in "FB":
                found = " ".join(name for name in order if str(name)[0] == kind)
                wanted = " ".join(f"{kind}{i}" for i in range(micro))
                expect(found, wanted, f"{what}: every {kind}")
            expect(len(order), 2 * micro, f"{what}: the names in the list")


def alternates_on_the_last(order_of: Callable) -> None:
    """alternate on the last rank: F0 B0 F1 B1"""
    for ranks, micro in SIZES:
        wanted = " ".join(f"F{i} B{i}" for i in range(micro))
        found = " ".join(order_of(ranks - 1, ranks, micro))
        expect(found, wanted, f"rank {ranks - 1} of {ranks}")


def holds_few(order_of: Callable) -> None:
    """hold at most p − r micro-batches on rank r of p"""
    for ranks, micro in SIZES:
        for rank, order in _orders(order_of, ranks, micro):
            held = [0]
            for name in order:
                held.append(held[-1] + (1 if name[0] == "F" else -1))
            what = f"rank {rank} of {ranks}, {micro} micro-batch(es)"
            assert max(held) <= ranks - rank, f"{what}: held at most {max(held)}"


def takes_the_time_of_gpipe(order_of: Callable) -> None:
    """take 3 (m + p − 1) slots where a backward takes two"""
    for ranks, micro in SIZES:
        orders = [order for _, order in _orders(order_of, ranks, micro)]
        what = f"{ranks} rank(s), {micro} micro-batch(es): the slots"
        expect(_slots(orders, what), 3 * (micro + ranks - 1), what)


def _orders(order_of: Callable, ranks: int, micro: int) -> list[tuple[int, list[str]]]:
    orders = [(rank, order_of(rank, ranks, micro)) for rank in range(ranks)]
    for rank, order in orders:
        assert isinstance(order, list), f"rank {rank} of {ranks}: {order!r} is no list"
    return orders


def _slots(orders: Sequence[Sequence[str]], what: str) -> int:
    """When all ranks are done, if each takes its tasks in order, as soon as it can."""
    last, places, free = len(orders) - 1, [0] * len(orders), [0] * len(orders)
    done: dict[tuple[str, int], int] = {}
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = list(places)
        for rank, order in enumerate(orders):
            name = order[places[rank]] if places[rank] < len(order) else ""
            ends = {"F": 0, "B": last}.get(name[:1])  # there nothing is waited for
            neighbour = rank + (-1 if name[:1] == "F" else 1)
            waits_for = (name, neighbour) if rank != ends else (f"F{name[1:]}", rank)
            if name and (name[0] == "F" and rank == 0 or waits_for in done):
                begin = max(free[rank], done.get(waits_for, 0))
                free[rank] = done[name, rank] = begin + (1 if name[0] == "F" else 2)
                places[rank] += 1
        assert places != before, f"{what}: all ranks wait for one another"
    return max(free)


SIZES = [(p, m) for p in range(1, 5) for m in (1, 2, 3, 4, 5, 8)]

build = Builder(
    "pipelines",
    {
        stages.run_gpipe: [
            has_the_gradients_of_one,
            returns_losses,
            goes_forward_first,
            sends_at_once,
        ],
        stages.order_of_1f1b: [
            does_each_once,
            alternates_on_the_last,
            holds_few,
            takes_the_time_of_gpipe,
        ],
    },
)
