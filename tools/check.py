"""Run the checks: `make test`, `make quick`, `make check NAME=point_to_point`.

Every step runs, whatever became of the one before it; at the end stands what failed, and
the exit code says it. The tests of one file stay with one worker, and so do the cells of one
notebook. Tests that compare times come last, with nothing beside them.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLAIN = [sys.executable, "-m", "pytest", "-q"]
PYTEST = [*PLAIN, "-p", "tools.budget"]
RUFF = [str(Path(sys.executable).with_name("ruff"))]
TWO = ["--numprocesses", "2", "--dist", "loadfile"]
# Half of a test is waiting. The times of a chapter are those of two workers, its budget too.
THREE = ["--numprocesses", "3", "--dist", "loadfile"]
NBVAL = ["--nbval", "--nbval-cell-timeout", "120"]
NOTHING_TO_RUN = 5  # pytest's exit code where no test was selected

Steps = dict[str, list[str]]


def style(places: list[str]) -> Steps:
    """What ruff says of these files; `ruff format` and `ruff check --fix` mend most of it."""
    return {
        "style": [*RUFF, "check", "--quiet", *places],
        "format": [*RUFF, "format", "--check", "--quiet", *places],
    }


def everything() -> Steps:
    """All there is."""
    return {
        **style(["."]),
        "tests": [*PYTEST, *TWO, "-m", "not timing", "tests"],
        "tests that compare times": [*PYTEST, "-m", "timing", "tests"],
        "notebooks": [*PYTEST, *NBVAL, *TWO, "notebooks"],
    }


def quick() -> Steps:
    """What starts no interpreter, kernel or compiler of its own, and is not `thorough`."""
    chosen = "not fresh and not thorough and not timing"
    return {**style(["."]), "tests": [*PLAIN, *THREE, "-m", chosen, "tests"]}


def one_chapter(name: str) -> Steps:
    """A chapter's style, its tests, the anatomy of its notebook, and the notebook itself.

    Raises ValueError for what is no chapter.
    """
    notebooks = sorted(ROOT.glob("notebooks/[0-9][0-9]_*.ipynb"))
    stems = [path.stem[3:] for path in notebooks]
    if name not in stems:
        raise ValueError(f"NAME={name!r}: no such chapter; there are {', '.join(stems)}")
    notebook = notebooks[stems.index(name)]
    code = _either(ROOT / "mgpu_tutorial" / name, ROOT / "mgpu_tutorial" / f"{name}.py")
    tests = _either(ROOT / "tests" / name, ROOT / "tests" / f"test_{name}.py")
    return {
        **style([code, tests, str(notebook)]),
        "tests": [*PYTEST, *TWO, tests],
        "anatomy": [*PYTEST, "tests/test_notebooks.py", "-k", name],
        "notebook": [*PYTEST, *NBVAL, str(notebook)],
    }


def _either(folder: Path, file: Path) -> str:
    return str(folder if folder.is_dir() else file)


def run(steps: Steps) -> list[str]:
    """Run all steps, one after the other; returns the names of those that failed."""
    failed = []
    for name, command in steps.items():
        begin = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode
        if code not in (0, NOTHING_TO_RUN):
            failed.append(name)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    return failed


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["test", "quick", "chapter"])
    parser.add_argument("name", nargs="?", default="", help="of a chapter")
    given = parser.parse_args(words)
    begin = time.monotonic()
    try:
        steps = {"test": everything, "quick": quick}.get(given.what)
        failed = run(steps() if steps else one_chapter(given.name))
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    said = f"failed: {', '.join(failed)}" if failed else "all checks passed"
    print(f"\n{said}, in {time.monotonic() - begin:.0f} s", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
