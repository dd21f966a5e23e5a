"""Apparatus: the map of a cluster, a script run by torchrun, what a fresh Python imports."""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from mgpu_tutorial.lab.colours import colour
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.teach.build import is_blank
from mgpu_tutorial.lab.teach.mine import needs
from mgpu_tutorial.processes_and_ranks.meeting import hello

COLUMN, GAP, TOP = 104, 24, 62  # pixels: a GPU's width, between nodes, above the nodes
NODE = 178  # pixels: the height of a node
QUIET = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def cluster_map(nodes: int, gpus: int) -> Drawing:
    """Draw `nodes` machines with `gpus` GPUs each, one process per GPU.

    Ranks are counted through all nodes, local ranks begin at 0 on each. The local rank
    is also the number of the GPU. As text, one line per node.
    """
    inside = COLUMN * gpus + 12
    width = GAP + (inside + GAP) * nodes
    title = f"{nodes} nodes with {gpus} GPUs each: world size {nodes * gpus}"
    drawing = Drawing(width, TOP + NODE + 20, title, f"{title}, one rank per GPU")
    drawing.label(GAP, 24, title, 15, anchor="start", weight="bold")
    drawing.line(GAP, TOP + NODE / 2, width - GAP, TOP + NODE / 2, INK, 3)
    for node in range(nodes):
        x = GAP + (inside + GAP) * node
        drawing.box(x, TOP, inside, NODE, FAINT, "#f4f4f4")
        drawing.label(x + 8, TOP - 8, f"node {node}", 14, anchor="start", weight="bold")
        ranks = range(node * gpus, (node + 1) * gpus)
        for local_rank, rank in enumerate(ranks):
            _process_and_gpu(drawing, x + 6 + COLUMN * local_rank, rank, local_rank)
        owned = (f"{rank} on cuda:{local_rank}" for local_rank, rank in enumerate(ranks))
        drawing.text += f"\nnode {node}: rank {', '.join(owned)}"
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


def torchrun(function: Callable, ranks: int) -> None:
    """Write `function` into a script, print it, and start it with torchrun.

    In place of a function that is still the stub, ours runs. Nothing stays on the disk.
    """
    blank = is_blank(function)
    text = script_of(hello if blank else function)
    print(f"# {function.__name__} is not filled in yet, so ours runs" if blank else text)
    print(f"$ torchrun --nproc-per-node {ranks} hello.py")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "hello.py").write_text(text, encoding="utf-8")
        words = ["--standalone", "--nproc-per-node", str(ranks), "--log-dir", folder]
        words += ["--local-addr", "127.0.0.1"]  # the machine's name may lead nowhere
        words += ["--redirects", "3"]  # a file for each rank, or their lines would mix
        job = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words, "hello.py"],
            env=os.environ | QUIET,
            cwd=folder,
            stderr=subprocess.DEVNULL,
        )
        try:
            job.wait(timeout=60)
        except subprocess.TimeoutExpired:
            job.terminate()  # torchrun hands it on to its ranks
            print("stopped after 60 s")
            job.wait()
        said, errors = (
            [path.read_text("utf-8") for path in sorted(Path(folder).rglob(name))]
            for name in ("stdout.log", "stderr.log")
        )
    print(*said, sep="", end="")
    for line in "".join(errors).splitlines():
        if "Error: " in line:
            print(line)


def script_of(function: Callable) -> str:
    """A program of one function: its imports, its source, and the call."""
    imports, sources = needs([function], set())
    call = f'if __name__ == "__main__":\n    {function.__name__}()'
    return "\n\n\n".join(["\n".join(sorted(set(imports))), *sources, call]) + "\n"


def spawn_alone(function: Callable) -> str:
    """Hand `function` to a fresh Python as "spawn" does; returns the end of its complaint."""
    call = "import pickle, sys; pickle.load(sys.stdin.buffer)()"
    by_name = pickle.dumps(function)
    child = subprocess.run([sys.executable, "-c", call], input=by_name, capture_output=True)
    lines = child.stderr.decode().splitlines() or ["no complaint"]
    return f"exit code {child.returncode}, {lines[-1].split(' on <')[0]}"
