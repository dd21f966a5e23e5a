"""The page on how a launch runs names what there is."""

import importlib
import re
from pathlib import Path

import mgpu_tutorial
from mgpu_tutorial import lab

LAB = Path(lab.__file__).parent
MODULES = {
    path.stem: ".".join(path.relative_to(Path(mgpu_tutorial.__file__).parents[1]).parts)[:-3]
    for path in LAB.rglob("*.py")
    if path.stem != "__init__"
}


def things_called(name):
    """Whatever of the lab this is: `module.name`, or a class or function of some module."""
    first, *rest = name.split(".")
    starts = [getattr(importlib.import_module(m), first, None) for m in MODULES.values()]
    if first in MODULES:
        starts.append(importlib.import_module(MODULES[first]))
    for part in rest:
        starts = [getattr(start, part, None) for start in starts]
    return [start for start in starts if start is not None]


def test_whatever_the_page_names_of_the_lab_is_there():
    page = (LAB / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \|", page.split("## Who replaces")[1], re.MULTILINE)
    assert len(rows) >= 5
    dotted = re.findall(r"`(\w+\.\w[\w.]*)", page)
    own = [name for name in dotted if things_called(name.split(".")[0])]
    others = (".py", ".log", ".recorder")  # files, and what is there only while it records
    own = [name for name in own if not name.endswith(others)]
    assert not [name for name in {*rows, *own} if not things_called(name)]
    files = re.findall(r"`(\w+\.py)`", page)
    assert {Path(name).stem for name in files} <= set(MODULES)
