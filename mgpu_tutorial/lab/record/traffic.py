"""What the ranks sent, counted, and set against what a formula says."""

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
