"""Apparatus: the map of a cluster, a script run by torchrun, and a process of its own.

`cluster_map` draws a box for each node, in it a process for each GPU with its two numbers.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

from mgpu_tutorial.lab.colours import colour
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.teach.build import is_blank
from mgpu_tutorial.lab.teach.mine import needs
from mgpu_tutorial.processes_and_ranks.hello import hello

COLUMN, GAP, TOP = 104, 24, 62  # pixels: a GPU's width, between nodes, above the nodes
NODE = 178  # pixels: the height of a node


def cluster_map(nodes: int, gpus: int) -> Drawing:
    """Draw `nodes` machines with `gpus` GPUs each, one process per GPU.

    Ranks are counted through all nodes, local ranks begin at 0 on each. The local rank
    is also the number of the GPU. As text, one line per node.
    """
    inside = COLUMN * gpus + 12
    width = GAP + (inside + GAP) * nodes
    machines = f"{_count(nodes, 'node')} with {_count(gpus, 'GPU')} each"
    title = f"{machines}: world size {nodes * gpus}"
    lines = [title, *(_line(node, gpus) for node in range(nodes))]
    drawing = Drawing(width, TOP + NODE + 20, "\n".join(lines), f"{title}, one rank per GPU")
    drawing.label(GAP, 24, title, 15, anchor="start", weight="bold")
    for node in range(nodes):
        x = GAP + (inside + GAP) * node
        if node:
            drawing.line(x - GAP, TOP + NODE / 2, x, TOP + NODE / 2, INK, 3)
        drawing.box(x, TOP, inside, NODE, FAINT, "#f4f4f4")
        drawing.label(x + 8, TOP - 8, f"node {node}", 14, anchor="start", weight="bold")
        for local_rank in range(gpus):
            left = x + 6 + COLUMN * local_rank
            _process_and_gpu(drawing, left, node * gpus + local_rank, local_rank)
    return drawing


def _process_and_gpu(drawing: Drawing, x: float, rank: int, local_rank: int) -> None:
    """A process above, the GPU that it drives below, a line between them."""
    middle = x + COLUMN / 2
    drawing.box(x + 6, TOP + 14, COLUMN - 12, 78, colour(rank), width=4)
    drawing.label(middle, TOP + 38, "process", 14)
    drawing.label(middle, TOP + 58, f"rank {rank}", 16, weight="bold")
    drawing.label(middle, TOP + 78, f"local rank {local_rank}", 14)
    drawing.line(middle, TOP + 94, middle, TOP + 124)
    drawing.box(x + 14, TOP + 124, COLUMN - 28, 38, INK, "#dddddd", radius=0)
    drawing.label(middle, TOP + 148, f"cuda:{local_rank}", 15)


def _line(node: int, gpus: int) -> str:
    ranks = ", ".join(f"{node * gpus + local} on cuda:{local}" for local in range(gpus))
    return f"node {node}: rank {ranks}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# Processes

QUIET = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def torchrun(function: Callable, ranks: int, limit: float = 60.0) -> None:
    """Write `function` into a script, print it, and start it with torchrun.

    In place of a function that is still the stub, ours runs. Nothing stays on the disk.
    """
    blank = is_blank(function)
    text = script_of(hello if blank else function)
    print(f"# {function.__name__} is not filled in yet, so ours runs" if blank else text)
    print(f"$ torchrun --nproc-per-node {ranks} hello.py")
    with tempfile.TemporaryDirectory() as folder:
        script, logs = Path(folder, "hello.py"), Path(folder, "logs")
        script.write_text(text, encoding="utf-8")
        words = ["--standalone", "--nproc-per-node", str(ranks)]
        words += ["--local-addr", "127.0.0.1"]  # the machine's name may lead nowhere
        words += ["--log-dir", str(logs), "--redirects", "3"]  # a file for each rank
        job = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words, str(script)],
            env=os.environ | QUIET,
            cwd=folder,
            stderr=subprocess.DEVNULL,
        )
        try:
            job.wait(limit)
        except subprocess.TimeoutExpired:
            job.terminate()  # torchrun hands it on to its ranks
            print(f"stopped after {limit:g} s")
            job.wait()
        for said in sorted(logs.rglob("stdout.log")):
            print(said.read_text(encoding="utf-8"), end="")
        errors = [said.read_text(encoding="utf-8") for said in logs.rglob("stderr.log")]
    for line in [line for text in errors for line in text.splitlines() if "Error: " in line]:
        print(line)


def script_of(function: Callable) -> str:
    """A program of one function: its imports, its source, and the call."""
    imports, sources = needs([function], set())
    call = f'if __name__ == "__main__":\n    {function.__name__}()'
    return "\n\n\n".join(["\n".join(sorted(set(imports))), *sources, call]) + "\n"


def spawn_alone(function: Callable) -> str:
    """Start `function` in a new process by "spawn"; returns the last line of its stderr.

    The child writes to a file, because a notebook does not always show what a child prints
    to the kernel's stderr. PYTHON_COLORS=0 wins over FORCE_COLOR, which Jupyter sets.
    """
    with tempfile.TemporaryFile() as log:
        kept = os.dup(2)
        os.dup2(log.fileno(), 2)
        colours = os.environ.get("PYTHON_COLORS", "")  # an empty one counts as none
        os.environ["PYTHON_COLORS"] = "0"
        try:
            child = get_context("spawn").Process(target=function)
            child.start()
            child.join()
        finally:
            os.environ["PYTHON_COLORS"] = colours
            os.dup2(kept, 2)
            os.close(kept)
        log.seek(0)
        lines = log.read().decode().splitlines() or ["no complaint"]
    return f"exit code {child.exitcode}, {lines[-1].split(' on <')[0]}"
