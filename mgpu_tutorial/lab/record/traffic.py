"""What the ranks sent, counted, and set against what a formula says."""

from collections import Counter

from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.table import Table


def traffic(report: Report, expected: float | None = None, formula: str = "formula") -> Table:
    """Count each rank's operations and the bytes it sent to single peers.

    A row a rank: its calls by name, its messages, their bytes; with `expected`
    (bytes a rank, after `formula`) also the ratio of the two. What a collective moves
    inside the library is not seen here: only what passes through send and isend.
    """
    if not report.events:
        raise ValueError("nothing was recorded: launch with trace=True")
    rows = []
    for rank in range(report.world_size):
        mine = [e for e in report.events if e.rank == rank]
        calls = [e.op for e in mine if e.kind in ("p2p", "collective")]
        named = ", ".join(f"{calls.count(op)} {op}" for op in dict.fromkeys(calls))
        sent = [e.nbytes for e in mine if e.sends]
        row: list[object] = [f"rank {rank}", named, len(sent), sum(sent)]
        if expected is not None:
            row += [int(expected), f"{sum(sent) / expected:.3f}"]
        rows.append(row)
    header = ["", "calls", "messages sent", "bytes sent"]
    return Table(header + ([formula, "sent / formula"] if expected is not None else []), rows)


# An all_reduce is a reduce_scatter and then an all_gather, so its tensor passes twice.
PASSES = {"all_reduce": 2, "reduce": 1, "broadcast": 1}
PASSES |= {"reduce_scatter_single": 1, "all_gather_single": 1}


def ring_passes(report: Report, during: str) -> Counter[str]:
    """The bytes that pass a ring in rank 0's span `during`, by collective.

    Of each of the N ranks' tensors; a rank sends (N - 1) / N of it, and nothing if N is 1.
    """
    passed: Counter[str] = Counter()
    for event in events_of(report, during):
        if event.rank == 0 and event.op in PASSES and len(event.group) > 1:
            # the recorder notes the smaller side of a reduce_scatter, the output
            sides = len(event.group) if event.op == "reduce_scatter_single" else 1
            passed[event.op] += PASSES[event.op] * sides * event.nbytes
    return passed
