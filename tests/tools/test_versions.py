"""One list of dependencies: pyproject.toml; the other two files only follow it."""

import re
import tomllib
from pathlib import Path

import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
CONDA_NAMES = {"torch": "pytorch"}


def declared(*left_out: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    lists = [names for extra, names in extras.items() if extra not in left_out]
    return {
        Requirement(text).name
        for names in [project["dependencies"], *lists]
        for text in names
    }


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line.split("#")[0].strip() for line in lines]
    return dict(pin.split("==") for pin in pins if pin)


def test_every_dependency_is_pinned():
    assert declared() <= set(pinned())


def test_conda_has_the_same_packages_in_the_same_versions_and_ours():
    pins = {CONDA_NAMES.get(name, name): pinned()[name] for name in declared("maintain")}
    text = (ROOT / "environment.yml").read_text("utf-8")
    found = dict(re.findall(r"^ +- ([a-z][\w-]*)==?([\d.]+)$", text, re.MULTILINE))
    assert found.pop("python") == "3.12" and found.pop("pip")
    assert set(found) == set(pins)
    for name, version in found.items():
        assert (pins[name] + ".").startswith(version + "."), name
    assert '- pip:\n      - "-e ."\n' in text


def test_torch_and_torchvision_belong_together():
    torch, vision = (pinned()[name].split(".") for name in ("torch", "torchvision"))
    assert torch[0] == "2" and vision[0] == "0" and int(vision[1]) == int(torch[1]) + 15


def test_the_installed_torch_is_one_that_we_know():
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
