"""One list of dependencies: pyproject.toml; the other two files only follow it."""

import re
import tomllib
from pathlib import Path

import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
CONDA_NAMES = {"torch": "pytorch"}


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lists = [project["dependencies"], *extras.values()]
    return {Requirement(text).name for names in lists for text in names}


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("#")[0].strip() for line in lines]
    return dict(pin.split("==") for pin in pins if pin)


def conda() -> dict[str, str]:
    """Its own packages by their beginning, and those of pip, which have no conda package."""
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    return dict(re.findall(r"^ +- ([a-z][\w-]*)==?([\d.]+)$", text, re.MULTILINE))


def test_every_dependency_is_pinned():
    assert declared() <= set(pinned())


def test_conda_has_the_same_packages_in_the_same_versions():
    pins = {CONDA_NAMES.get(name, name): pinned()[name] for name in declared()}
    found = conda()
    assert found.pop("python") == "3.12" and found.pop("pip")
    assert set(found) == set(pins)
    for name, version in found.items():
        assert (pins[name] + ".").startswith(version + "."), name


def test_conda_installs_the_package_itself():
    assert '- pip:\n      - "-e ."\n' in (ROOT / "environment.yml").read_text(
        encoding="utf-8"
    )


def test_torch_and_torchvision_belong_together():
    torch, vision = (pinned()[name].split(".") for name in ("torch", "torchvision"))
    assert torch[0] == "2" and vision[0] == "0" and int(vision[1]) == int(torch[1]) + 15


def test_the_installed_torch_is_one_that_we_know():
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
