"""make new-chapter: one at the end and one in the middle pass every check, in a copy."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.new_chapter import stem_of

ROOT = Path(__file__).parents[2]
IGNORED = shutil.ignore_patterns(".git", ".venv", "build", "student", "__pycache__")
STEM, AFTER, LAST = "one_more_topic", "point_to_point", "a_last_topic"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_chapters_in_the_middle_and_at_the_end_pass_every_check(tmp_path):
    copy = tmp_path / "repository"
    shutil.copytree(ROOT, copy, ignore=IGNORED)
    environment = {**os.environ, "PYTHONPATH": str(copy), "MGPU_DEVICE": "cpu"}

    def run(*words):
        how = {"cwd": copy, "env": environment, "capture_output": True, "text": True}
        return subprocess.run([sys.executable, *words], **how)

    for words in ([LAST], [STEM, "--after", AFTER]):
        made = run("tools/new_chapter.py", *words)
        assert made.returncode == 0, made.stderr
    refused = run("tools/new_chapter.py", STEM)
    assert refused.returncode == 1 and "is there already" in refused.stderr
    stems = [path.stem[3:] for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    stems.insert(stems.index(AFTER) + 1, STEM)
    books = sorted((copy / "notebooks").glob("*.ipynb"))
    assert [path.stem for path in books] == [
        f"{i:02d}_{stem}" for i, stem in enumerate([*stems, LAST])
    ]
    tried = [f"test_{STEM}.py", f"test_{LAST}.py", "test_notebooks.py", "test_reached.py"]
    tried = [f"tests/{name}" for name in [*tried, "tools/test_mutants.py"]]
    for words in (["pytest", "-q", *tried], ["ruff", "check"], ["ruff", "format", "--check"]):
        done = run("-m", *words)
        assert done.returncode == 0, (words, done.stdout[-3000:] + done.stderr[-3000:])


@pytest.mark.parametrize("name", ["", "3d", "a/b", "naïve", "x", "Bad-Name"])
def test_a_name_that_cannot_be_a_module_is_refused(name):
    with pytest.raises(ValueError, match="expected a topic such as"):
        stem_of(name)
