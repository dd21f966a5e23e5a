"""Run the notebooks in clean kernels and store what they show: `make notebooks`.

With names as arguments only those. First each folded solution becomes the package's text.
Nothing of the machine is stored: no times of execution, no marks of an editor, no state of a
widget but its still form.

A time is stored from a quiet machine only. Before and after a notebook, one process per core
counts for half a second: where other programs want the cores too, a process gets less than
nine tenths of one. The notebook then waits for up to ten minutes, and is run once more if the
machine was busy at its end. With --busy nothing waits, and the outputs that change with the
machine, those of cells tagged nbval-ignore-output, stay as they were stored.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tools import one_text

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
KEPT = ("handout", "jupyter", "tags")  # of a cell's metadata
QUIET = 0.9  # of a core, for a process that could use it whole
PATIENCE = 600  # seconds
COUNT = """if True:
    import time
    begin, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - begin < 0.5:
        pass
    print((time.process_time() - cpu) / (time.perf_counter() - begin))
"""
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def store(path: Path, busy: bool = False) -> None:
    """Execute one notebook in place; on an error no output is written.

    busy: keep what is stored of the cells whose outputs change with the machine
    """
    one_text.write(path)
    stored = nbformat.read(path, as_version=4)
    for _ in range(3):
        if not busy:
            wait_for_quiet()
        notebook = execute(path)
        if busy or share() > QUIET:
            break
    else:
        sys.exit(
            f"{path.name}: the machine was busy at its end, three times; nothing is stored"
        )
    for cell, before in zip(notebook.cells, stored.cells, strict=True):
        cell.metadata = {key: cell.metadata[key] for key in KEPT if key in cell.metadata}
        if cell.cell_type == "code":
            cell.outputs = [kept for kept in map(still, cell.outputs) if kept]
            if (
                busy
                and before.outputs
                and "nbval-ignore-output" in cell.metadata.get("tags", [])
            ):
                cell.outputs = before.outputs
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    nbformat.write(notebook, path)


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook as a clean kernel runs it, where it lies."""
    notebook = nbformat.read(path, as_version=4)
    quiet = ["--log-level=ERROR"]  # it warns of TCP on loopback each time
    options = {"timeout": 120, "kernel_name": "python3", "extra_arguments": quiet}
    options |= {"store_widget_state": False, "record_timing": False, "coalesce_streams": True}
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, resources=where, **options).execute()
    return notebook


def share() -> float:
    """Of a core, what the worst off of as many counting processes as there are cores gets."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    )
    command = [sys.executable, "-S", "-c", COUNT]
    counts = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(cores)
    ]
    return min(float(count.communicate()[0]) for count in counts)


def wait_for_quiet() -> None:
    """Return as soon as no other program wants the cores; exit after ten minutes."""
    begin = time.monotonic()
    while (got := share()) <= QUIET:
        if time.monotonic() - begin > PATIENCE:
            sys.exit(
                f"this machine is busy: a process got {got:.0%} of a core, and a time is "
                f"stored from {QUIET:.0%} on. Close what runs beside, or keep the times: "
                "--busy"
            )
        print(f"waits for a quiet machine: a process gets {got:.0%} of a core", flush=True)
        time.sleep(10)


def still(output: dict) -> dict | None:
    """The output without its live widget; nothing for a progress bar that was emptied."""
    if "data" in output and WIDGET_VIEW in output["data"] and len(output["data"]) > 1:
        del output["data"][WIDGET_VIEW]
    return output if output.get("data", True) else None


def paths() -> list[Path]:
    """All notebooks, in their order."""
    return sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


def main() -> None:
    """Store the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tools.store", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", help="NN_stem.ipynb; all if none is named")
    parser.add_argument(
        "--busy", action="store_true", help="don't wait, and keep stored times"
    )
    given = parser.parse_args()
    for book in [NOTEBOOKS / Path(name).name for name in given.names] or paths():
        try:
            store(book, given.busy)
        except CellExecutionError as error:
            sys.exit(f"{book.name}: a cell failed, nothing is stored\n{error}")
        print(book.name, flush=True)


if __name__ == "__main__":
    main()
