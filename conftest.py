"""What nbval needs besides, to run these notebooks anywhere and with each PyTorch.

A kernel that has lost one of its ports is started once more: Jupyter chooses free ports, and
the kernel opens them a second later. In between the ranks of a notebook beside it can take
one of them for themselves.

Another PyTorch than the pinned one may allocate other memory: then what a cell tagged
`pinned-torch` shows is not compared. It runs all the same.
"""

import re
from importlib.metadata import version
from pathlib import Path

import nbval.kernel
import pytest

start_once = nbval.kernel.start_new_kernel


def start_new_kernel(**options: object) -> tuple:
    """Start a kernel as nbval does, and once more where it ended before it answered."""
    try:
        return start_once(**options)
    except RuntimeError:
        return start_once(**options)


nbval.kernel.start_new_kernel = start_new_kernel


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Compare a cell tagged `pinned-torch` only where PyTorch is the pinned one."""
    pins = (Path(__file__).parent / "constraints.txt").read_text("utf-8")
    (pinned,) = re.findall(r"^torch==(\S+)$", pins, re.M)
    if version("torch").split("+")[0] != pinned:
        for item in items:
            cell = getattr(item, "cell", None)
            if cell is not None and "pinned-torch" in cell.metadata.get("tags", []):
                item.options["check"] = False
