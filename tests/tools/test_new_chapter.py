"""make new-chapter: one at the end and one in the middle pass every check, in a copy."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.new_chapter import stem_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
IGNORED = shutil.ignore_patterns(".git", ".venv", "build", "student", "__pycache__")
STEM, AFTER = "one_more_topic", "point_to_point"
AT_THE_END = "a_last_topic"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository with a chapter more at its end, and one in the middle."""
    folder = tmp_path_factory.mktemp("copy") / "repository"
    shutil.copytree(ROOT, folder, ignore=IGNORED)
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


def test_the_later_ones_get_the_next_number_and_so_do_their_links(copy):
    stems = [path.stem[3:] for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    stems.insert(stems.index(AFTER) + 1, STEM)
    new = [path.stem for path in sorted((copy / "notebooks").glob("*.ipynb"))]
    assert new == [f"{i:02d}_{stem}" for i, stem in enumerate([*stems, AT_THE_END])]
    links = 0
    for path in [copy / "README.md", *(copy / "notebooks").glob("*.ipynb")]:
        text = path.read_text("utf-8")
        for words, target in re.findall(r"\[([^\[\]]*)\]\(([^()\s]*\.ipynb)", text):
            assert (path.parent / target).exists(), (path, target)
            if number := re.search(r"\b\d\d\b", words):
                assert Path(target).name.startswith(number[0]), (path, words, target)
                links += 1
    assert links > 3 * len(new)


def test_both_pass_every_check(copy):
    books = [str(p) for s in (STEM, AT_THE_END) for p in copy.glob(f"notebooks/*_{s}.ipynb")]
    names = f"{STEM} or {AT_THE_END}"
    for words in (
        ["pytest", "-q", f"tests/test_{STEM}.py", "tests/test_notebooks.py"],
        ["pytest", "-q", "tests/tools/test_mutants.py", "-k", f"{names} or every_chapter"],
        ["pytest", "-q", "tests/test_reached.py"],
        ["pytest", "-q", "--nbval", "--nbval-cell-timeout", "120", *books],
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["handouts", Path(books[0]).stem],
    ):
        done = run(copy, "-m", *words)
        assert done.returncode == 0, (words, done.stdout[-3000:] + done.stderr[-3000:])


def test_a_name_that_is_taken_and_a_chapter_after_nowhere_are_refused(copy):
    before = sorted(copy.rglob("*"))
    done = run(copy, "tools/new_chapter.py", STEM)
    assert done.returncode == 1 and "is there already, choose another name" in done.stderr
    done = run(copy, "tools/new_chapter.py", "another", "--after", "nowhere")
    assert done.returncode == 1 and "AFTER='nowhere': no such chapter" in done.stderr
    assert sorted(copy.rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["", "  ", "3d", "a/b", "naïve", "x", "Bad-Name", "two words"]
)
def test_a_name_that_cannot_be_a_module_is_refused(name):
    with pytest.raises(ValueError, match="expected a topic such as"):
        stem_of(name)
