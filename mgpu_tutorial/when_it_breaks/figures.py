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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.run.files import LOOPBACK
from mgpu_tutorial.processes_and_ranks.meeting import free_port
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


def run_two_nodes(folder: str, accident: str = "none", limit: float = 100.0) -> list[End]:
    """Run the elastic script on two "nodes", each a torchrun of its own with one rank.

    Where the accident is "node", node 1 is started again as soon as it has gone; its second
    life is the third in the list.
    """
    port = free_port()

    def start(number: int, accident: str, life: int = 0) -> subprocess.Popen:
        return torchrun(
            *("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
            *("--rdzv-conf", f"is_host={int(number == 0)}", "--rdzv-id", "run"),
            *("--local-addr", "127.0.0.1", "--log-dir", f"{folder}/log{number}{life}"),
            *("-m", "mgpu_tutorial.when_it_breaks.elastic"),
            *("--folder", folder, "--accident", accident),
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )

    nodes = [start(number, accident) for number in (0, 1)]
    with ThreadPoolExecutor() as readers:
        ends = [readers.submit(end_of, node, limit) for node in nodes]
        if accident == "node" and ends[1].result().code:
            ends.append(readers.submit(end_of, start(1, "none", life=1), limit))
        return [end.result() for end in ends]


def restarts(ends: list[End]) -> list[str]:
    """How the workers died that torchrun saw dying of SIGKILL: "exitcode: -9" for each."""
    return re.findall(r"failed \((exitcode: -9)", "\n".join(end.errors for end in ends))


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


def same_bits(folders: list[str]) -> list[bool]:
    """Whether each tensor of model and optimizer has the same bits in the run.pt of both."""
    first, second = (torch.load(f"{folder}/run.pt", weights_only=True) for folder in folders)
    pairs = [(first["model"][name], second["model"][name]) for name in first["model"]]
    momenta = [state["optimizer"]["state"] for state in (first, second)]
    pairs += [(momenta[0][i][k], momenta[1][i][k]) for i in momenta[0] for k in momenta[0][i]]
    return [torch.equal(a, b) for a, b in pairs]


# Tables


def table_of_draws(runs: dict[str, list[jobs.Drawn]]) -> Table:
    """What the ranks drew with each seed, and how many samples were dealt.

    Equal letters are equal draws.
    """
    rows = []
    for seed, ranks in runs.items():
        dealt = {sample for drawn in ranks for sample in drawn.mine}
        orders = _letters([drawn.order for drawn in ranks])
        noises = _letters([drawn.noise for drawn in ranks])
        rows += [[seed, "order", *orders, f"{len(dealt)} of 12 samples"]]
        rows += [["", "noise", *noises, ""]]
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


# The checks


def ask_each(
    rank: int, world_size: int, tool: Callable, lists: list[list[int]]
) -> list[list[int]]:
    """For each list every rank asks `tool` for the odd ones, and tells it its own number."""
    return [tool(rank, world_size, numbers[rank]) for numbers in lists]


# The answers of the checks. Do not look here before you have named a fault.

FAULTS = {  # the rank that does otherwise, and the line that makes it do so
    jobs.average_labelled: (1, "continue"),
    jobs.count_classes: (1, "torch.bincount("),
    jobs.agree_on_settings: (0, "dist.all_reduce("),
    jobs.average_in_pairs: (2, "rank // 3"),
    jobs.average_file: (0, "torch.ones(2**17)"),
    jobs.train_on_sequences: (3, "sorted("),
    jobs.spread_points: (2, ".sqrt()"),
}


def fault_of(job: Callable) -> list[int]:
    """The rank and the number of the line, in the file, where a job goes wrong."""
    rank, text = FAULTS[job]
    lines, first = inspect.getsourcelines(job)
    return [rank, first + next(i for i, line in enumerate(lines) if text in line)]


def drawn_alike() -> str:
    """What all ranks must draw alike in `draw_epoch`."""
    return "order"
