"""make new-chapter: one in the middle passes the checks of chapters, in a copy."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.new_chapter import stem_of

ROOT = Path(__file__).parents[2]
IGNORED = shutil.ignore_patterns(".git", ".venv", "build", "student", "__pycache__")
STEM, MIDDLE = "one_more_topic", "point_to_point"
CHECKS = f"{STEM} or neighbours or links or readme or public or every_chapter"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("after", [MIDDLE, ""])
def test_a_chapter_in_the_middle_or_at_the_end_passes_every_check(tmp_path, after):
    copy = tmp_path / "repository"
    shutil.copytree(ROOT, copy, ignore=IGNORED)
    environment = {**os.environ, "PYTHONPATH": str(copy), "MGPU_DEVICE": "cpu"}

    def run(*words):
        how = {"cwd": copy, "env": environment, "capture_output": True, "text": True}
        return subprocess.run([sys.executable, *words], **how)

    made = run("-m", "tools.new_chapter", STEM, after)
    assert made.returncode == 0, made.stderr
    stems = [path.stem[3:] for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    stems.insert(stems.index(after) + 1 if after else len(stems), STEM)
    books = sorted((copy / "notebooks").glob("*.ipynb"))
    assert [path.stem for path in books] == [
        f"{i:02d}_{stem}" for i, stem in enumerate(stems)
    ]
    place = stems.index(STEM)
    link = f"[{place:02d} One more topic →]({books[place].name})"
    assert link in books[place - 1].read_text("utf-8")
    names = (f"test_{STEM}", "test_notebooks", "test_reached", "tools/test_mutants")
    tried = ["-q", "-k", CHECKS, *(f"tests/{name}.py" for name in names)]
    for words in (["pytest", *tried], ["ruff", "check"], ["ruff", "format", "--check"]):
        done = run("-m", *words)
        assert done.returncode == 0, (words, done.stdout[-3000:] + done.stderr[-3000:])


@pytest.mark.parametrize("name", ["", "3d", "a/b", "naïve", "x", "Bad-Name", "class", MIDDLE])
def test_a_name_that_cannot_be_a_module_or_is_there_is_refused(name):
    says = "is there already" if name == MIDDLE else "expected a topic such as"
    with pytest.raises(ValueError, match=says):
        stem_of(name)
