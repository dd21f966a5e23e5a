"""Apparatus: runs PyTorch's commands, and knows where each job goes wrong, for the checks."""

import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable

from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.run.files import LOOPBACK
from mgpu_tutorial.when_it_breaks import jobs

COMMANDS = {
    "torchrun": "torch.distributed.run",
    "torchfrtrace": "torch.distributed.flight_recorder.fr_trace",
}


def shell(command: str, **environment: str) -> subprocess.CompletedProcess:
    """Run one of the COMMANDS, as one types it, on the CPU and loopback."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "PYTHON_COLORS": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    name, *words = shlex.split(command)
    run = [sys.executable, "-m", COMMANDS[name], *words]
    settings = os.environ | environment | settings
    return subprocess.run(run, env=settings, capture_output=True, text=True, timeout=170)


def print_first_lines(report: Report) -> None:
    """Print what each rank printed first: without C++'s place in its build, ports, advice."""
    for rank, text in enumerate(report.stdout):
        line = text.splitlines()[0] if text else "(silent)"
        line = re.sub(r"^\[\S*/\w+\.cc:\d+\] ", "", line)
        line = re.sub(r".*(closed|reset) by peer.*", "Connection closed by peer", line)
        print(f"rank {rank}:", re.split(r"(?<=\dms) for |, but ", line)[0])


def table_of_jumps(runs: dict[str, list[list[list]]]) -> Table:
    """The mean loss in steps 4, 5 and 6; of step 5 the norms and what `replay` returned."""
    rows = []
    for name, ranks in runs.items():
        losses = [sum(rank[step][0] for rank in ranks) / len(ranks) for step in (4, 5, 6)]
        _, norms, exact, disagree = zip(*(rank[5] for rank in ranks), strict=True)
        words = " → ".join(f"{loss:.1f}" for loss in losses)
        lengths = " ".join(f"{norm:.1f}" for norm in norms)
        longest = exact[norms.index(max(norms))]
        rows.append([name, words, lengths, disagree[0] or "none", f"{longest:.1f}"])
    lengths = "gradient norms of the ranks"
    return Table(["job", "loss", lengths, "disagree", "the longest, in float64"], rows)


# The answers of the checks. Do not look here before you have named a fault.

FAULTS = {  # the rank that does otherwise, and the line that makes it do so
    jobs.average_labelled: (1, "continue"),
    jobs.count_classes: (1, "torch.bincount("),
    jobs.agree_on_settings: (0, "dist.all_reduce("),
    jobs.average_in_pairs: (2, "rank // 3"),
    jobs.average_file: (0, "torch.ones(2**17)"),
    jobs.train_on_sequences: (3, "sorted("),
}
HINT = (
    "[0] is the rank that does otherwise, [1] the number of the statement by which it does: "
    "not a condition above it, and not the line at which the others wait"
)
REMEDY = "b"  # of the three proposals for `agree_on_settings`
GAP = 0  # between two points whose gradient is NaN in `spread_points`
ALIKE = "order"  # what all ranks must draw alike in `draw_epoch`
CAUSES = ["card", "rate", "numerics", "batch"]  # why the loss of A, B, C and D jumps


def fault_of(job: Callable) -> list[int]:
    """The rank and the number of the line, in the file, where a job goes wrong."""
    rank, text = FAULTS[job]
    lines, first = inspect.getsourcelines(job)
    return [rank, first + next(i for i, line in enumerate(lines) if text in line)]
