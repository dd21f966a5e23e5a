"""Apparatus: the map of a cluster, a script run by torchrun, what a fresh Python imports."""

import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from mgpu_tutorial.lab.colours import colour
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.teach.build import is_blank
from mgpu_tutorial.lab.teach.needs import needs
from mgpu_tutorial.processes_and_ranks.meeting import hello

# The last line of a rank's traceback, which is not torchrun's own
ERROR = re.compile(r"^(?!torch\.distributed\.elastic)[\w.]+Error(?:: .*)?$", re.M)
PLAIN = {"PYTHON_COLORS": "0"}  # no colours in what a child complains of
COLUMN, GAP = 104, 24  # pixels: a GPU's width, and what is between nodes


def cluster_map(nodes: int, gpus: int) -> Drawing:
    """Draw `nodes` machines with `gpus` GPUs each, and above each GPU its process."""
    inside = COLUMN * gpus + 12
    width = GAP + (inside + GAP) * nodes
    title = f"{nodes} nodes with {gpus} GPUs each: world size {nodes * gpus}"
    drawing = Drawing(width, 260, title, f"{title}, one rank per GPU")
    drawing.label(GAP, 24, title, 15, anchor="start", weight="bold")
    drawing.line(GAP, 151, width - GAP, 151, INK, 3)
    for node in range(nodes):
        left = GAP + (inside + GAP) * node
        drawing.box(left, 62, inside, 178, FAINT, "#f4f4f4")
        drawing.label(left + 8, 54, f"node {node}", 14, anchor="start", weight="bold")
        drawing.text += f"\nnode {node}:"
        for gpu in range(gpus):
            rank, x = gpus * node + gpu, left + 58 + COLUMN * gpu
            drawing.box(x - 46, 76, 92, 78, colour(rank), width=4)
            drawing.label(x, 100, "process", 14)
            drawing.label(x, 120, f"rank {rank}", 16, weight="bold")
            drawing.label(x, 140, f"local rank {gpu}", 14)
            drawing.line(x, 156, x, 186)
            drawing.box(x - 38, 186, 76, 38, INK, "#dddddd", radius=0)
            drawing.label(x, 210, f"cuda:{gpu}", 15)
            drawing.text += f" rank {rank} on cuda:{gpu}{',' * (gpu < gpus - 1)}"
    return drawing


def torchrun(function: Callable, ranks: int) -> None:
    """Write `function` into a script, and start it by the line that is printed.

    What the ranks print is sorted, and of an error only its last line is shown. In place of a
    function that is still the stub, ours runs. Nothing stays on the disk.
    """
    blank = is_blank(function)
    things, _ = needs("hello", [hello if blank else function], {}, {})
    imports = sorted({thing.text for thing in things if thing.kind == "import"})
    sources = [thing.text for thing in things if thing.kind != "import"]
    call = f'if __name__ == "__main__":\n    {function.__name__}()\n'
    script = "\n\n\n".join(["\n".join(imports), *sources, call])
    print(f"# {function.__name__} is not filled in yet, so ours runs" if blank else script)
    options = f"--local-addr 127.0.0.1 --nproc-per-node {ranks} hello.py"
    print(f"$ OMP_NUM_THREADS=1 torchrun {options}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "hello.py").write_text(script, encoding="utf-8")
        job = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options.split()],
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "TMPDIR": folder,
                # torchrun's ranks write a line and its end apart: each into a file of its own
                "PET_REDIRECTS": "1",
                "PET_LOG_DIR": folder,
                **PLAIN,
            },
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="backslashreplace",
        )
        try:
            complaints = job.communicate(timeout=100)[1]
        except subprocess.TimeoutExpired:
            job.terminate()  # torchrun hands it on to its ranks
            complaints = job.communicate()[1]
            print("stopped after 100 s")
        files = Path(folder).rglob("stdout.log")
        said = [file.read_text("utf-8", "backslashreplace").splitlines() for file in files]
    for line in sorted(sum(said, [])):
        print(line)
    for line in sorted(set(ERROR.findall(complaints))):
        print(line)


def spawn_alone(function: Callable) -> str:
    """Hand `function` to a fresh Python as "spawn" does; returns its kind of complaint."""
    call = "import pickle, sys; pickle.load(sys.stdin.buffer)()"
    by_name = pickle.dumps(function)
    child = subprocess.run(
        [sys.executable, "-c", call],
        input=by_name,
        capture_output=True,
        env=os.environ | PLAIN,
    )
    said = (child.stderr.decode().splitlines() or ["no complaint"])[-1].split(" on <")[0]
    kind, _, words = said.partition(": ")  # which differ between versions of Python
    return ": ".join([f"exit code {child.returncode}, {kind}", *re.findall("'\\w+'$", words)])
