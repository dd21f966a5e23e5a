"""make new-chapter: one in the middle and one at the end pass all checks, in a copy."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.new_chapter import stem_of

ROOT = Path(__file__).parents[2]
IGNORED = shutil.ignore_patterns(".git", ".venv", "build", "student", "__pycache__")
MIDDLE = "point_to_point"
AFTER = {"one_more_topic": MIDDLE, "one_last_topic": ""}  # the last one is at the end
CHECKS = f"{' or '.join(AFTER)} or neighbours or links or readme or public or every_chapter"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_chapters_in_the_middle_and_at_the_end_pass_every_check(tmp_path):
    copy = tmp_path / "repository"
    shutil.copytree(ROOT, copy, ignore=IGNORED)
    environment = {**os.environ, "PYTHONPATH": str(copy), "MGPU_DEVICE": "cpu"}

    def run(*words):
        how = {"cwd": copy, "env": environment, "capture_output": True, "text": True}
        return subprocess.run([sys.executable, *words], **how)

    stems = [path.stem[3:] for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    for stem, after in AFTER.items():
        made = run("-m", "tools.new_chapter", stem, after)
        assert made.returncode == 0, made.stderr
        stems.insert(stems.index(after) + 1 if after else len(stems), stem)
    books = sorted((copy / "notebooks").glob("*.ipynb"))
    assert [path.stem for path in books] == [
        f"{i:02d}_{stem}" for i, stem in enumerate(stems)
    ]
    for stem in AFTER:
        place = stems.index(stem)
        title = stem.replace("_", " ").capitalize()
        link = f"[{place:02d} {title} →]({books[place].name})"
        assert link in books[place - 1].read_text("utf-8")
    names = (*(f"test_{stem}" for stem in AFTER), "test_notebooks", "test_reached")
    files = [f"tests/{name}.py" for name in (*names, "tools/test_mutants")]
    tried = ["-q", "-k", CHECKS, *files]
    for words in (["pytest", *tried], ["ruff", "check"], ["ruff", "format", "--check"]):
        done = run("-m", *words)
        assert done.returncode == 0, (words, done.stdout[-3000:] + done.stderr[-3000:])


@pytest.mark.parametrize("name", ["", "3d", "a/b", "naïve", "x", "Bad-Name", "class", MIDDLE])
def test_a_name_that_cannot_be_a_module_or_is_there_is_refused(name):
    says = "is there already" if name == MIDDLE else "expected a topic such as"
    with pytest.raises(ValueError, match=says):
        stem_of(name)
