"""make new-chapter: one at the end and one in the middle pass every check, in a copy."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.new_chapter import stem_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KEPT = ["mgpu_tutorial", "notebooks", "tests", "tools", "handouts", "benchmarks"]
KEPT += ["docs", ".binder", ".devcontainer"]  # the README shows and names them
FILES = [path.name for path in ROOT.iterdir() if path.is_file() and path.name[0] != "."]
STEM, AFTER = "one_more_topic", "point_to_point"
AT_THE_END = "a_last_topic"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository with a chapter more at its end, and one in the middle."""
    folder = tmp_path_factory.mktemp("repository")
    for name in KEPT:
        ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    for words in ([AT_THE_END], [STEM, "--after", AFTER]):
        made = run(folder, "tools/new_chapter.py", *words)
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


def notebook(folder, stem=STEM):
    [found] = (folder / "notebooks").glob(f"[0-9][0-9]_{stem}.ipynb")
    return found


def test_the_later_ones_get_the_next_number_and_so_do_their_links(copy):
    old = [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    place = [stem[3:] for stem in old].index(AFTER) + 1
    stems = [stem[3:] for stem in old]
    stems = [*stems[:place], STEM, *stems[place:], AT_THE_END]
    new = [path.stem for path in sorted((copy / "notebooks").glob("*.ipynb"))]
    assert new == [f"{number:02d}_{stem}" for number, stem in enumerate(stems)]
    links = 0
    for path in [copy / "README.md", *(copy / "notebooks").glob("*.ipynb")]:
        for text, target in re.findall(
            r"\[([^\[\]]*)\]\(([^()\s]*\.ipynb)", path.read_text(encoding="utf-8")
        ):
            assert (path.parent / target).exists(), (path, target)
            if number := re.search(r"\b\d\d\b", text):
                assert Path(target).name.startswith(number[0]), (path, text, target)
                links += 1
    assert links > 3 * len(new)


def test_its_own_test_passes_and_the_anatomy_of_all(copy):
    tests = [f"tests/test_{STEM}.py", "tests/test_notebooks.py"]
    assert " passed" in passes(copy, "pytest", "-q", *tests)
    mutants = ["tests/tools/test_mutants.py", "-k", f"{STEM} or every_chapter"]
    assert "4 passed" in passes(copy, "pytest", "-q", *mutants)


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


def test_a_chapter_after_nowhere_is_refused(copy):
    before = sorted(copy.rglob("*"))
    done = run(copy, "tools/new_chapter.py", "another", "--after", "nowhere")
    assert done.returncode == 2 and "AFTER='nowhere': no such chapter" in done.stderr
    assert sorted(copy.rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["", "  ", "3d", "a/b", "naïve", "x", "Bad-Name", "two words"]
)
def test_a_name_that_cannot_be_a_module_is_refused(name):
    with pytest.raises(ValueError, match="expected a topic such as"):
        stem_of(name)
