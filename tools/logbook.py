"""The rows of the logbook as the chapters print them, for the table that shows them all.

    python -m tools.logbook

reads the stored outputs of the notebooks, and writes mgpu_tutorial/shared/logbook.json.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import nbformat

from mgpu_tutorial.shared.logbook import COLUMNS, PRINTED

ROOT = Path(__file__).parent.parent
HEAD = [*COLUMNS]
SHOWN = "_language_model"


def printed() -> list[list]:
    """The rows that are stored in the notebooks but for the one that shows them all."""
    rows = {}
    for path in sorted(ROOT.glob("notebooks/[0-9]*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells if SHOWN not in path.name else ():
            rows |= {row[0]: row for row in rows_in(cell)}
    return [rows[name] for name in sorted(rows)]


def rows_in(cell: nbformat.NotebookNode) -> Iterator[list]:
    """The rows of a table of the logbook, where a cell's output is one."""
    for output in cell.get("outputs", ()):
        head, *lines = output.get("data", {}).get("text/plain", "").splitlines() or [""]
        places = [head.find(name) for name in HEAD]
        if places == sorted(places) and -1 not in places:
            for line in lines:
                cells = [
                    line[begin:end].strip()
                    for begin, end in zip(places, [*places[1:], None], strict=True)
                ]
                numbers = [float(number.replace(",", "")) for number in cells[3:]]
                yield [*cells[:3], *numbers]


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(row) for row in printed())
    PRINTED.write_text(f"[\n{lines}\n]\n", "utf-8")
