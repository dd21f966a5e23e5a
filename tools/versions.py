"""Run everything with the lowest and the newest PyTorch that pyproject.toml promises.

    make test-versions [NAMES="tests/sharding notebooks/14_sharding.ipynb"]

Each version gets an environment of its own in `.venv/versions/`, with all other packages as
pinned; the tests run first, then the notebooks' stored outputs are compared. The pinned
version must be one of the two: `make test` runs it already, and here it is run again.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACE = ROOT / ".venv/versions"


def promised(pyproject: str, constraints: str) -> tuple[str, str]:
    """The lowest version that is promised, and the pinned one, which is the newest.

    Raises ValueError where pyproject's range doesn't begin with a whole version, or where
    the pinned version isn't in its last minor release.
    """
    lowest, below = re.search(r'"torch>=(\d+\.\d+\.\d+),<(\d+\.\d+)"', pyproject).groups()
    pinned = re.search(r"^torch==(\S+)$", constraints, re.M)[1]
    minor = int(pinned.split(".")[1])
    if below != f"2.{minor + 1}":
        raise ValueError(f"pyproject promises torch<{below}, and torch {pinned} is pinned")
    return lowest, pinned


def constraints_for(torch: str, constraints: str) -> str:
    """All pins, but for this PyTorch and the torchvision that belongs to it."""
    _, minor, patch = torch.split(".")
    vision = f"0.{int(minor) + 15}.{patch}"
    changed = re.sub(r"^torch==\S+$", f"torch=={torch}", constraints, flags=re.M)
    return re.sub(r"^torchvision==\S+$", f"torchvision=={vision}", changed, flags=re.M)


def environment_of(torch: str) -> Path:
    """The interpreter of an environment with this PyTorch; made at the first time."""
    home, pins = PLACE / torch, PLACE / f"{torch}.txt"
    PLACE.mkdir(parents=True, exist_ok=True)
    pins.write_text(constraints_for(torch, (ROOT / "constraints.txt").read_text("utf-8")))
    python = home / "bin/python"
    done = home / "installed"
    if not done.exists() or done.read_text("utf-8") != pins.read_text("utf-8"):
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        build = os.environ.get("TORCH_BUILD", "")
        install = [python, ROOT / "tools/install.py", build, "test"]
        subprocess.run(install, check=True, env=os.environ | {"CONSTRAINTS": str(pins)})
        done.write_text(pins.read_text("utf-8"), "utf-8")
    return python


def run(python: Path, names: list[str]) -> list[str]:
    """The steps that failed, of: the tests, the notebooks."""
    two = ["--numprocesses", "2", "--dist", "loadfile"]
    compare = ["--nbval", "--nbval-cell-timeout", "120"]
    tests = [name for name in names if not name.startswith("notebooks")]
    books = [name for name in names if name.startswith("notebooks")]
    failed = []
    for step, how in (("tests", tests), ("notebooks", [*compare, *books] if books else [])):
        # What the kernels of notebooks find must be this environment, and no learner's
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        env = os.environ | {"PATH": path, "JUPYTER_PREFER_ENV_PATH": "1"}
        command = [python, "-m", "pytest", "-q", *two, *how]
        if how and subprocess.run(command, cwd=ROOT, env=env).returncode not in (0, 5):
            failed.append(step)
    return failed


def main(names: list[str]) -> int:
    texts = [
        (ROOT / name).read_text("utf-8") for name in ("pyproject.toml", "constraints.txt")
    ]
    failed = []
    for torch in promised(*texts):
        print(f"PyTorch {torch}", flush=True)
        failed += [
            f"{step} with {torch}"
            for step in run(environment_of(torch), names or ["tests", "notebooks"])
        ]
    print(
        f"failed: {', '.join(failed)}" if failed else "all checks passed with both versions"
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
