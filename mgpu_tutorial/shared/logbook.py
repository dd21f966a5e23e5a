"""The logbook: one row for each way to train, proved small and priced large.

It lies beside `mine.py` once that is there, and grows with the reader's chapters.
"""

import json
import os
from pathlib import Path

from mgpu_tutorial.instruments.price import Priced
from mgpu_tutorial.instruments.prove.proof import Proof, bound_of
from mgpu_tutorial.lab.table import Table, formatted
from mgpu_tutorial.lab.teach import mine
from mgpu_tutorial.shared import guards

COLUMNS = {"way": "", "whose": "", "as one process": "", "ms": ".0f", "exposed (ms)": ".0f"}
COLUMNS |= {"GB at most": ".1f", "GB sent": ".1f", "tokens/s per GPU": ",.0f"}
PRINTED = Path(__file__).with_name("logbook.json")  # by `python -m tools.logbook`
NOTED: dict[str, list] = {}  # rows of this process, which are kept without a file too


def note(way: str, wrapper: object, proof: Proof, priced: Priced, tokens: int) -> Table:
    """Add the row of one way, and return the rows so far, in the order of their names.

    `wrapper` tells whose the way is, and all GPUs together take `tokens` in the priced step.
    A second row of the same name replaces the first. Raises ValueError for no tokens, and
    where the file is no logbook.
    """
    guards.whole("tokens", tokens)
    whose = "yours" if mine.holds(wrapper) else "ours"
    numbers = map(max, zip(*map(priced.row, priced.tapes), strict=True))
    rate = tokens / priced.seconds / priced.ranks
    rows = {row[0]: row for row in read()}  # which refuses before anything is noted
    NOTED[way] = [way, whose, said(proof), *numbers, rate]
    rows |= NOTED
    in_order = [rows[name] for name in sorted(rows)]
    if mine.FILE.exists():
        write(in_order)
    return formatted(COLUMNS, in_order)


def said(proof: Proof) -> str:
    """How many tensors are as in one process, and how far; or what the first is not."""
    if not proof.right:
        return proof.first.kind
    words = [w for w in ("gradients", "parameters") if proof.of(w)]
    off = max(map(proof.furthest, words))
    return f"{proof.tensors} tensors, {bound_of(off)}"


def whole() -> list[list]:
    """A row for each way of the course, in the order of their names.

    The reader's own where there is one, else that which the way's chapter prints. Raises
    ValueError where the reader's file is no logbook.
    """
    rows = {row[0]: row for row in json.loads(PRINTED.read_text("utf-8"))}
    rows |= {row[0]: row for row in read()} | NOTED
    return [rows[name] for name in sorted(rows)]


def file() -> Path:
    """Where the logbook is, or would be."""
    return mine.FILE.resolve().with_name("logbook.json")


def read() -> list[list]:
    """The rows that are written so far; none where there is no file."""
    try:
        rows = json.loads(file().read_text("utf-8"))
        formatted(COLUMNS, rows)
    except FileNotFoundError:
        return []
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file().name} is no logbook ({error}): move it away") from None
    return rows


def write(rows: list[list]) -> None:
    """Replace the file, whole or not at all."""
    draft = file().with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    os.replace(draft, file())
