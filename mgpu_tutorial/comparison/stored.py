"""The measurement that `benchmarks/comparison.py` stored, and its table.

comparison.json has for each kind first with what it was measured, and then the rows. A row of
"parts" has the processor seconds of forward, backward and update: what all threads of one
process have computed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgpu_tutorial.lab import Table

STORED = Path(__file__).with_name("comparison.json")


def load_stored(kind: str) -> list[dict[str, Any]]:
    """What is stored for "cpu", "cuda" or "parts": about it first, then the rows."""
    return json.loads(STORED.read_text(encoding="utf-8"))[kind]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """A row per setup, and for each network seconds, speed against one device, and memory."""
    header, cells = ["20 steps", "processes"], {}
    for row in rows:
        cells.setdefault(row["setup"], [row["setup"], row["processes"]])
    for network in dict.fromkeys(row["network"] for row in rows):
        header += [f"{network}, s", "speed", "GiB per device"]
        mine = [row for row in rows if row["network"] == network]
        for row in mine:
            speed = mine[0]["seconds"] / row["seconds"]
            memory = ", ".join(f"{size / 2**30:.2f}" for size in row["memory"])
            cells[row["setup"]] += [f"{row['seconds']:.1f}", f"{speed:.2f}", memory]
    return Table(header, list(cells.values()))
