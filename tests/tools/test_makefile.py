"""What `make` does to a checkout before anything is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["lab", "test"])
def test_an_environment_behind_a_link_is_never_cleared(tmp_path, target):
    for name in ("Makefile", "README.md", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "pyvenv.cfg").touch()
    (tmp_path / ".venv").symlink_to(other)
    made = subprocess.run(["make", target], cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode and ".venv is a link" in made.stdout
    assert [path.name for path in other.iterdir()] == ["pyvenv.cfg"]
