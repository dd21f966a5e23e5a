"""Apparatus: runs torchrun, reads what it and the flight recorder say, and knows where the
fault of each job is, for the checks.
"""

import argparse
import inspect
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.run.files import LOOPBACK
from mgpu_tutorial.when_it_breaks import jobs

CHAPTER = Path(__file__).parent

# What ranks print, and the flight recorder


def print_first_lines(report: Report) -> None:
    """Print what each rank printed first: without C++'s place in its build, ports, advice."""
    for rank, text in enumerate(report.stdout):
        line = text.splitlines()[0] if text else "(silent)"
        line = re.sub(r"^\[\S*/\w+\.cc:\d+\] ", "", line)
        line = re.sub(r".*(closed|reset) by peer.*", "Connection closed by peer", line)
        print(f"rank {rank}:", re.split(r"(?<=\dms) for |, but ", line)[0])


def analyse(folder: str) -> str:
    """What PyTorch's analyser says of the records in a folder, its stacks cut to our lines.

    The same as `torchfrtrace folder`, which needs the package tabulate for its tables.
    """
    from torch.distributed.flight_recorder.components import builder, loader

    settings = argparse.Namespace(
        allow_incomplete_ranks=False, just_print_entries=False, mismatch_cap=10, verbose=False
    )
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("Flight Recorder")
    logger.handlers, logger.propagate = [handler], False  # instead of its own
    files = sorted(Path(folder).glob("rank_*"))  # the first one is taken for right
    dumps = {file.name: loader.read_dump("rank_", str(file)) for file in files}
    builder.build_db(dumps, settings, str(next(iter(dumps.values()))["version"]))
    return "\n".join(_shortened("\n".join(lines)))


def _shortened(text: str) -> Iterator[str]:
    """The lines of the analyser that differ from job to job, and of a stack the job's."""
    stack = re.compile(r"^\s*\S+ at (\S+):(\d+)$")
    for line in text.splitlines():
        frame = stack.match(line)
        if frame is None:
            if line.strip() and not line.startswith(("internal record id", "output sizes")):
                yield line.rstrip()
        elif Path(frame[1]).parent == CHAPTER and "record.py" not in frame[1]:
            yield f"  {Path(frame[1]).name}:{frame[2]}"


def own_places(text: str) -> list[str]:
    """The lines of this chapter's files that a traceback names, outermost first."""
    frames = re.findall(r'File "([^"]+)", line (\d+),? in', text)
    places = [(Path(name), number) for name, number in frames]
    return [f"{path.name}:{number}" for path, number in places if path.parent == CHAPTER]


# torchrun


def torchrun(*words: str, **environment: str) -> subprocess.Popen:
    """Start torchrun with these arguments, on the CPU and on the loopback interface."""
    path = [str(CHAPTER.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "PYTHON_COLORS": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(path),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words],
        env=os.environ | environment | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class End(NamedTuple):
    """How one torchrun has ended, and what it and its ranks had printed."""

    code: int
    lines: list[str]
    errors: str


def end_of(process: subprocess.Popen, limit: float = 100.0) -> End:
    """Wait for a torchrun, and kill it after `limit` seconds."""
    try:
        said, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        said, errors = process.communicate()
    return End(process.returncode, sorted(said.splitlines()), errors)


def shell(command: str, **environment: str) -> End:
    """Run a command that begins with torchrun, as one types it, and wait for its end."""
    words = command.split()[1:]
    return end_of(torchrun("--local-addr", "127.0.0.1", *words, **environment))


def essence(errors: str) -> str:
    """Of all that torchrun and its ranks said of a death: the fatal error and the cause."""
    lines = [line.strip() for line in errors.splitlines()]
    kept = [line for line in lines if line.startswith("Fatal Python error")]
    kept += [f"  at {place}" for place in own_places(errors)[:1]]
    cause = next((i for i, line in enumerate(lines) if line.startswith("Root Cause")), 0)
    for line in lines[cause : cause + 8]:
        if line.startswith(("Root Cause", "rank", "exitcode")):
            kept.append(re.sub(r" \(pid: \d+\)", "", line))
    return "\n".join(kept)


# Tables


def table_of_draws(runs: dict[str, list[tuple]]) -> Table:
    """What the ranks drew with each seed, and how many samples were dealt.

    Equal letters are equal draws.
    """
    rows = []
    for seed, ranks in runs.items():
        orders, shares, noises = zip(*ranks, strict=True)
        dealt = set(sum(shares, []))
        rows += [[seed, "order", *_letters(orders), f"{len(dealt)} of 12 samples"]]
        rows += [["", "noise", *_letters(noises), ""]]
    ranks = [f"rank {r}" for r in range(len(rows[0]) - 3)]
    return Table(["seed", "", *ranks, "dealt"], rows)


def _letters(values: list) -> list[str]:
    """A letter for each value, in the order in which they first come."""
    different = [value for i, value in enumerate(values) if value not in values[:i]]
    return ["ABCDEFGH"[different.index(value)] for value in values]


def table_of_losses(seen: list[list[list[float]]]) -> Table:
    """The losses of all ranks and the weight after each step of spread_points."""
    rows = [
        [step, *(round(rank[step][0], 2) for rank in seen), round(seen[0][step][1], 2)]
        for step in range(len(seen[0]))
    ]
    losses = [f"loss of rank {r}" for r in range(len(seen))]
    return Table(["step", *losses, "weight, on all ranks"], rows)


def seconds_in(run: Report, op: str) -> list[float]:
    """How long each rank of a traced run was inside the calls of that name."""
    return [
        sum(e.end - e.begin for e in run.events if e.op == op and e.rank == rank)
        for rank in range(run.world_size)
    ]


def table_of_jumps(runs: dict[str, list[list[list]]]) -> Table:
    """The mean loss before and after step 5, and what the ranks know of that step.

    "disagree" is what `replay` returns; the last column is of the rank with the longest
    gradient.
    """
    rows = []
    for cause, ranks in runs.items():
        losses = [sum(rank[step][0] for rank in ranks) / len(ranks) for step in (4, 5, 6)]
        _, norms, exact, disagree = zip(*(rank[5] for rank in ranks), strict=True)
        longest = norms.index(max(norms))
        rows.append(
            [
                *(cause, " → ".join(f"{loss:.1f}" for loss in losses)),
                " ".join(f"{norm:.1f}" for norm in norms),
                *(disagree[0] or "none", f"{exact[longest]:.1f}"),
            ]
        )
    norms = "gradient norms of the ranks"
    return Table(["job", "loss", norms, "disagree", "the longest, in float64"], rows)


GB200 = {512: 1806.7, 1024: 3108.8, 2048: 5589.1, 4096: 10_094, 8192: 20_299}  # MiB: us


def bandwidths() -> Table:
    """An all-reduce over 72 GPUs, published at https://github.com/coreweave/nccl-tests/pull/43.

    The prediction is a straight line through the first and the last row.
    """
    (small, quick), *_, (large, slow) = ((m * 2**20, us) for m, us in GB200.items())
    rate = (large - small) / (slow - quick)  # bytes per microsecond
    rows = []
    for mib, us in GB200.items():
        seconds, size = us / 1e6, mib * 2**20
        predicted = quick + (size - small) / rate
        algorithm = size / seconds / 1e9
        row = [f"{mib:,}", f"{us:,.0f}", f"{predicted:,.0f}", f"{algorithm:.0f}"]
        rows.append([*row, f"{algorithm * 2 * 71 / 72:.0f}"])
    head = ["MiB", "measured (µs)", "predicted (µs)", "algorithm GB/s", "bus GB/s"]
    return Table(head, rows)


# The answers of the checks. Do not look here before you have named a fault.

FAULTS = {  # the rank that does otherwise, and the line that makes it do so
    jobs.average_labelled: (1, "continue"),
    jobs.count_classes: (1, "torch.bincount("),
    jobs.agree_on_settings: (0, "dist.all_reduce("),
    jobs.average_in_pairs: (2, "rank // 3"),
    jobs.average_file: (0, "torch.ones(2**17)"),
    jobs.train_on_sequences: (3, "sorted("),
}


def fault_of(job: Callable) -> list[int]:
    """The rank and the number of the line, in the file, where a job goes wrong."""
    rank, text = FAULTS[job]
    lines, first = inspect.getsourcelines(job)
    return [rank, first + next(i for i, line in enumerate(lines) if text in line)]


def drawn_alike() -> str:
    """What all ranks must draw alike in `draw_epoch`."""
    return "order"


def bad_gap() -> int:
    """The distance of two points whose gradient is NaN in `spread_points`."""
    return 0


def order_remedy() -> str:
    """Which of the three proposals mends `agree_on_settings`."""
    return "b"


def causes() -> list[str]:
    """Why the loss of the jobs A, B, C and D jumps."""
    return ["card", "rate", "numerics", "batch"]
