"""Programs of their own, for what only a fresh interpreter shows."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(source: str, folder: Path, *words: str, **options: object) -> subprocess.Popen:
    """Start a program that stands in `folder`; its temporary files are in folder/tmp."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(source))
    (folder / "tmp").mkdir(exist_ok=True)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(
        [sys.executable, path, *words],
        cwd=folder,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")},
        **options,
    )


def run(source: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run a few lines with `python -c` in `folder`."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )
