"""The page on how a launch runs names what there is."""

import importlib
import re
from pathlib import Path

from mgpu_tutorial import lab

LAB = Path(lab.__file__).parent
MODULES = {
    path.stem: importlib.import_module(
        ".".join(["mgpu_tutorial", *path.relative_to(LAB.parent).with_suffix("").parts])
    )
    for path in LAB.rglob("*.py")
    if path.stem != "__init__"
}


def test_whatever_the_page_names_of_the_lab_is_there():
    page = (LAB / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(\w+)\.py`", page)) <= set(MODULES)
    for module, path in re.findall(r"`(\w+)\.(\w[\w.]*)", page):
        if module in MODULES and path not in ("py", "log"):
            thing = MODULES[module]
            for part in path.split("."):
                thing = getattr(thing, part)
