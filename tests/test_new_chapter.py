"""make new-chapter: what the template makes passes every check at once, in a copy."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.new_chapter import stem_of

ROOT = Path(__file__).parent.parent
KEPT = ["mgpu_tutorial", "notebooks", "tests", "tools", "handouts", "benchmarks"]
FILES = ["README.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml", "constraints.txt"]
STEM = "one_more_topic"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository with one more chapter."""
    folder = tmp_path_factory.mktemp("repository")
    for name in KEPT:
        ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    made = run(folder, "tools/new_chapter.py", "One more-topic")
    assert made.returncode == 0, made.stderr
    return folder


def run(folder, *words):
    """A Python program in a copy, which imports the package of the copy."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "MGPU_DEVICE": "cpu"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


def passes(folder, *words):
    done = run(folder, "-m", *words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def notebook(folder):
    [found] = (folder / "notebooks").glob(f"[0-9][0-9]_{STEM}.ipynb")
    return found


def test_its_own_test_passes_and_the_anatomy_of_all(copy):
    tests = [f"tests/test_{STEM}.py", "tests/test_notebooks.py"]
    assert " passed" in passes(copy, "pytest", "-q", *tests)


def test_every_output_comes_out_again(copy):
    words = ["-q", "--nbval", "--nbval-cell-timeout", "120", str(notebook(copy))]
    assert " passed" in passes(copy, "pytest", *words)


def test_its_style_is_clean(copy):
    for words in (["check"], ["format", "--check"]):
        passes(copy, "ruff", *words, ".")


def test_its_handouts_build(copy):
    passes(copy, "handouts", notebook(copy).stem)
    for edition in ("student", "instructor", "slides"):
        assert (copy / "build" / edition / f"{notebook(copy).stem}.pdf").stat().st_size > 9999


def test_a_second_chapter_of_that_name_is_refused(copy):
    before = sorted(copy.rglob("*"))
    done = run(copy, "tools/new_chapter.py", STEM)
    assert done.returncode == 2 and "is there already, choose another name" in done.stderr
    assert sorted(copy.rglob("*")) == before


@pytest.mark.parametrize("name", ["", "  ", "3d", "a/b", "naïve", "x"])
def test_a_name_that_cannot_be_a_module_is_refused(name):
    with pytest.raises(ValueError, match="expected a topic such as"):
        stem_of(name)
