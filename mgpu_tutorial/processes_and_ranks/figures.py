"""Apparatus: the map of a cluster, a script run by torchrun, what a fresh Python imports."""

import os
import pickle
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

from mgpu_tutorial.lab.colours import colour, tone
from mgpu_tutorial.lab.draw.drawing import ALARM, FAINT, INK, PAPER, Drawing
from mgpu_tutorial.lab.draw.film import Film
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


MEETING = (
    "Rank 0's node opens the store at node0:29500. The four ranks don't know each other.",
    "Each rank goes to that one address, and writes there where it can be reached.",
    "Each rank reads where the others are. Now they are a process group.",
    "Or rank 3 never comes. The store is short of one entry, and all others wait.",
)


def rendezvous() -> Film:
    """Four ranks on two nodes meet at one address, and one of them doesn't come."""
    return Film([_meeting(step) for step in range(len(MEETING))])


def _meeting(step: int) -> Drawing:
    is_short = step == 3
    drawing = Drawing(496, 316, MEETING[step], MEETING[step])
    for row, words in enumerate(textwrap.wrap(MEETING[step], 56)):
        drawing.label(8, 19 + 19 * row, words, 15, anchor="start")
    drawing.box(128, 48, 240, 132, INK, "#f4f4f4")
    drawing.label(248, 70, "store at node0:29500", 15, weight="bold")
    for rank in range(4):
        node, x = rank // 2, 64 + 118 * rank + 14 * (rank > 1)
        address, comes = f"node{node}:{41_000 + 207 * rank}", rank < 3 or not is_short
        edge = colour(rank) if comes else FAINT
        words = f"rank {rank} is at {address}" if step and comes else f"rank {rank}: ?"
        shade = tone(rank).text if step and comes else (ALARM if is_short else INK)
        drawing.label(248, 96 + 24 * rank, words, 14, shade)
        if step and comes:  # writing, or in the third step reading
            ends = [(x, 232), (154 + 62 * rank, 184)]
            (x1, y1), (x2, y2) = reversed(ends) if step == 2 else ends
            drawing.line(x1, y1, x2, y2, edge, 2, "5 3" if step == 2 else "", arrow=True)
        drawing.box(x - 52, 234, 104, 46, edge, PAPER, 3, "" if comes else "4 3")
        drawing.label(x, 253, f"rank {rank}", 15, weight="bold")
        says = ("alone", address, "knows all four", "waits")[step]
        drawing.label(x, 271, says if comes else "never came", 13)
        drawing.text += f"\n  rank {rank}: {says if comes else 'never came'}"
    for node in (0, 1):
        left = 4 + 250 * node
        drawing.box(left, 222, 238, 86, FAINT, "none", 1)
        drawing.label(left + 119, 300, f"node {node}", 14)
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
