"""One list of dependencies: pyproject.toml; the other two files only follow it."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def declared(*left_out: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    texts = sum((names for extra, names in extras if extra not in left_out), [])
    return {Requirement(text).name for text in [*project["dependencies"], *texts]}


def pinned() -> dict[str, str]:
    text = (ROOT / "constraints.txt").read_text("utf-8")
    return dict(re.findall(r"^([\w.-]+)==([^\s#]+)", text, re.MULTILINE))


def test_every_dependency_is_pinned_and_conda_has_the_same_versions():
    assert declared() <= set(pinned())
    pins = {name: pinned()[name] for name in declared("maintain")}
    pins["pytorch"] = pins.pop("torch")
    text = (ROOT / "environment.yml").read_text("utf-8")
    found = dict(re.findall(r"^ +- ([a-z][\w-]*)==?([\d.]+)$", text, re.MULTILINE))
    assert found.pop("python") == "3.12" and found.pop("pip")
    assert set(found) == set(pins)
    for name, version in found.items():
        assert (pins[name] + ".").startswith(version + "."), name
    assert '- pip:\n      - "-e ."\n' in text
