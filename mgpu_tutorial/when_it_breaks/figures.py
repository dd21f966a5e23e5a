"""Apparatus: runs torchrun, reads what it and the flight recorder say, and knows where the
fault of each job is, for the checks.
"""

import argparse
import inspect
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

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


def shell(command: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a command that begins with torchrun, as one types it, on the CPU and loopback."""
    path = [str(CHAPTER.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "PYTHON_COLORS": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(path),
    }
    run = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]
    words = [*run, *shlex.split(command)[1:]]
    settings = os.environ | environment | settings
    return subprocess.run(words, env=settings, capture_output=True, text=True, timeout=170)


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


def table_of_jumps(runs: dict[str, list[list[list]]]) -> Table:
    """The mean loss before and after step 5, and what the ranks know of that step.

    "disagree" is what `replay` returns; the last column is of the rank with the longest
    gradient.
    """
    rows = []
    for cause, ranks in runs.items():
        losses = [sum(rank[step][0] for rank in ranks) / len(ranks) for step in (4, 5, 6)]
        _, norms, exact, disagree = zip(*(rank[5] for rank in ranks), strict=True)
        words = " → ".join(f"{loss:.1f}" for loss in losses)
        longest = f"{exact[norms.index(max(norms))]:.1f}"
        lengths = " ".join(f"{norm:.1f}" for norm in norms)
        rows.append([cause, words, lengths, disagree[0] or "none", longest])
    norms = "gradient norms of the ranks"
    return Table(["job", "loss", norms, "disagree", "the longest, in float64"], rows)


# The answers of the checks. Do not look here before you have named a fault.

FAULTS = {  # the rank that does otherwise, and the line that makes it do so
    jobs.average_labelled: (1, "continue"),
    jobs.count_classes: (1, "torch.bincount("),
    jobs.agree_on_settings: (0, "dist.all_reduce("),
    jobs.average_in_pairs: (2, "rank // 3"),
    jobs.average_file: (0, "torch.ones(2**17)"),
    jobs.train_on_sequences: (3, "sorted("),
}
REMEDY = "b"  # of the three proposals for `agree_on_settings`
GAP = 0  # between two points whose gradient is NaN in `spread_points`
ALIKE = "order"  # what all ranks must draw alike in `draw_epoch`
CAUSES = ["card", "rate", "numerics", "batch"]  # why the loss of A, B, C and D jumps


def fault_of(job: Callable) -> list[int]:
    """The rank and the number of the line, in the file, where a job goes wrong."""
    rank, text = FAULTS[job]
    lines, first = inspect.getsourcelines(job)
    return [rank, first + next(i for i, line in enumerate(lines) if text in line)]
