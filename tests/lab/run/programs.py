"""Programs of their own, for what only a fresh interpreter shows."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[3]


def start(
    source: str, folder: Path, temporary: str = "tmp", **options: object
) -> subprocess.Popen:
    """Start a program that stands in `folder`, and its temporary folder inside of that."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(source))
    (folder / temporary).mkdir(exist_ok=True)
    settings = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder / temporary)}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, path]
    return subprocess.Popen(command, cwd=folder, env=os.environ | settings, **options)
