"""Apparatus: runs PyTorch's commands, and knows where each job goes wrong, for the checks."""

import html
import inspect
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.colours import COLOURS
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.run.files import LOOPBACK
from mgpu_tutorial.when_it_breaks import jobs, server

COMMANDS = {"torchrun": "torch.distributed.run"}


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


def free_ports(count: int = 2) -> list[int]:
    """Ports of this machine that nobody listens to."""
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def pages_of(folder: str, page: str) -> list[str]:
    """What the debug server has of each rank on a page that was saved."""
    text = Path(folder, page).read_text("utf-8")
    return list(map(html.unescape, re.findall(r"(?s)<pre>(.*?)</pre>", text)))


def calls_picture(folder: str) -> Plot:
    """A row per rank: its calls in their order, those that wait hatched, and where it is."""
    from matplotlib.figure import Figure

    stacks, records = (pages_of(folder, page) for page in server.PAGES)
    figure = Figure(figsize=(9, 0.55 * len(stacks) + 0.4), layout="constrained")
    axes = figure.subplots()
    words, most = [], 1
    for rank, (stack, record) in enumerate(zip(stacks, records, strict=True)):
        line = re.search(r'jobs\.py", line (\d+)', stack)
        where = f"at jobs.py:{line[1]}" if line else "has returned"
        said = []
        for place, entry in enumerate(json.loads(record).get("entries", [])):
            name = entry["profiling_name"].removeprefix("gloo:")
            group = entry["process_group"][0]
            name += f", group {group}" if group != "0" else ""
            how = {} if entry["retired"] else {"hatch": "///", "fill": False}
            colour = COLOURS[rank % len(COLOURS)]
            axes.barh(rank, 0.92, left=place, height=0.7, color=colour, ec=colour, **how)
            ink = "white" if entry["retired"] else INK
            axes.text(place + 0.46, rank, name, ha="center", va="center", color=ink)
            said.append(name + " waits" * (not entry["retired"]))
            most = max(most, place + 1)
        axes.text(-0.08, rank, f"rank {rank}, {where}", ha="right", va="center")
        words.append(f"rank {rank}, {where}: {' · '.join(said) or 'no call'}")
    axes.set(xlim=(-1.6, most + 0.1), ylim=(len(stacks) - 0.5, -0.5), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return Plot(figure, "\n".join(words))


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
CAUSES = ["gpu", "rate", "numerics", "batch"]  # why the loss of A, B, C and D jumps


def fault_of(job: Callable) -> list[int]:
    """The rank and the number of the line, in the file, where a job goes wrong."""
    rank, text = FAULTS[job]
    lines, first = inspect.getsourcelines(job)
    return [rank, first + next(i for i, line in enumerate(lines) if text in line)]
