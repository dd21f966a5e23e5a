"""Run the notebooks in clean kernels and store what they show: `make notebooks`.

With names as arguments only those. First each folded solution becomes the package's text.
Nothing of the machine is stored: no times of execution, no marks of an editor, no state of a
widget but its still form.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tools import one_text

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
KEPT = ("handout", "jupyter", "tags")  # of a cell's metadata
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def store(path: Path) -> None:
    """Execute one notebook in place; on an error no output is written."""
    one_text.write(path)
    notebook = nbformat.read(path, as_version=4)
    quiet = ["--log-level=ERROR"]  # it warns of TCP on loopback each time
    options = {"timeout": 120, "kernel_name": "python3", "extra_arguments": quiet}
    options |= {"store_widget_state": False, "record_timing": False, "coalesce_streams": True}
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, resources=where, **options).execute()
    for cell in notebook.cells:
        cell.metadata = {key: cell.metadata[key] for key in KEPT if key in cell.metadata}
        if cell.cell_type == "code":
            cell.outputs = [kept for kept in map(still, cell.outputs) if kept]
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    nbformat.write(notebook, path)


def still(output: dict) -> dict | None:
    """The output without its live widget; nothing for a progress bar that was emptied."""
    if "data" in output and WIDGET_VIEW in output["data"] and len(output["data"]) > 1:
        del output["data"][WIDGET_VIEW]
    return output if output.get("data", True) else None


def paths() -> list[Path]:
    """All notebooks, in their order."""
    return sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


if __name__ == "__main__":
    for book in [NOTEBOOKS / Path(name).name for name in sys.argv[1:]] or paths():
        try:
            store(book)
        except CellExecutionError as error:
            sys.exit(f"{book.name}: a cell failed, nothing is stored\n{error}")
        print(book.name, flush=True)
