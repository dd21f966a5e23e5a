"""Seed mistakes one by one and see whether the checks notice: `make mutants`.

tools/mutants/ has a list for each chapter: a text that stands once in a file, what stands
there instead, in as many lines, and what then goes wrong. Each is made in a copy of the tree.
The test file that mirrors the changed one runs there, then all tests of the chapter, what
its builds must do, then its notebook, until one fails.
What only a listing of the source shows does not count.
`make mutants NAMES="point_to_point lab:3"` takes this chapter and this mistake.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LISTS = Path(__file__).with_name("mutants")
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", ".hypothesis")
LISTINGS = ("show_source(", "show_changes(", "edit(")
# Edits of ours find no text to edit in a mistaken one: what ours must do is tried itself.
CHOSEN = ["-m", "not gpu", "--ignore-glob=tests/*/test_builds.py"]
BUILDS = ["tools/mutants/ours.py", "-k", "{}."]
NBVAL = ["--nbval", "--nbval-cell-timeout", "120"]
LIMIT = 900  # seconds for one pytest
FAILED, NOTHING_TO_RUN = (1, 2), 5  # pytest's exit codes


@dataclass(frozen=True, eq=False)
class Mistake:
    """In `file` the text `old`, which stands there once, becomes `new`; `tests` run first."""

    chapter: str
    number: int
    file: str
    old: str
    new: str
    wrong: str
    tests: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.chapter}:{self.number}, {self.wrong}"

    def made_in(self, text: str) -> str:
        """The file with the mistake in it; ValueError where it cannot be made."""
        times, lines = text.count(self.old), self.old.count("\n")
        if times != 1 or self.old == self.new or lines != self.new.count("\n"):
            must = "It must stand there once, and the new one differ in as many lines"
            raise ValueError(f"{self}: in {self.file} {times} times. {must}:\n{self.old}")
        return text.replace(self.old, self.new)

    def closest_tests(self) -> list[str]:
        """What to run, the closest first: its own, what mirrors the file, the chapter's."""
        inside = Path(self.file).relative_to("mgpu_tutorial")
        mirror = f"tests/{inside.parent}/test_{inside.name}"
        whole = f"tests/{self.chapter}", f"tests/test_{self.chapter}.py"
        places = dict.fromkeys([*self.tests, mirror, *whole])
        return [place for place in places if (ROOT / place).exists()]


def chosen(names: list[str]) -> Iterator[Mistake]:
    """All mistakes, or a chapter's, or one such as lab:3; what stands above holds for all."""
    there = sorted(path.stem for path in LISTS.glob("*.toml"))
    for name in names or there:
        chapter, _, number = name.partition(":")
        if chapter not in there:
            raise ValueError(f"NAMES={name!r}: no such chapter; there are {', '.join(there)}")
        common = tomllib.loads((LISTS / f"{chapter}.toml").read_text("utf-8"))
        for i, entry in enumerate(common.pop("mutant"), 1):
            if number in ("", str(i)):
                yield Mistake(chapter, i, **common | entry)


def pytest(folder: Path, *words: str) -> tuple[int | None, list[str]]:
    """Its exit code in that copy (None past the limit), and the names of what failed."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", *words]
    environment = os.environ | {"PYTHONPATH": str(folder)}  # before the installed package
    how = {"cwd": folder, "env": environment, "stdin": subprocess.DEVNULL, "text": True}
    try:
        done = subprocess.run(command, **how, capture_output=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return None, []
    return done.returncode, re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", done.stdout, re.M)


def try_out(mistake: Mistake) -> tuple[str, str]:
    """Make it in a new copy: caught, survived or undecided, and by what."""
    with tempfile.TemporaryDirectory(prefix="mistake-", ignore_cleanup_errors=True) as place:
        folder = Path(place) / "tree"
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
        changed = folder / mistake.file
        changed.write_text(mistake.made_in(changed.read_text("utf-8")), "utf-8")
        builds = [word.format(mistake.chapter) for word in BUILDS]
        places = [*([tests] for tests in mistake.closest_tests()), builds]
        runs = [[*CHOSEN, *tests] for tests in places]
        for book in folder.glob(f"notebooks/[0-9][0-9]_{mistake.chapter}.ipynb"):
            book.write_text(without_listings(book.read_text("utf-8")), "utf-8")
            runs.append([*NBVAL, str(book)])
        for words in runs:
            code, failed = pytest(folder, "-x", *words)
            if code in FAILED:
                return "caught", (failed or words[-1:])[0]
            if code not in (0, NOTHING_TO_RUN):
                return "undecided", f"{words[-1]} came to no end"
    return "survived", ""


def without_listings(notebook: str) -> str:
    """A notebook in which no output that shows the source itself is compared."""
    book = json.loads(notebook)
    for cell in book["cells"]:
        if any(call in "".join(cell["source"]) for call in LISTINGS):
            cell["metadata"].setdefault("tags", []).append("nbval-ignore-output")
    return json.dumps(book)


def failing_without(names: set[str]) -> set[str]:
    """Which of these tests and cells fail in today's tree too, and have noticed nothing."""
    places = {name.partition("::")[0] if ".ipynb" in name else name for name in names}
    return set(pytest(ROOT, *NBVAL, *sorted(places))[1]) if places else set()


def main(names: list[str]) -> int:
    """Try each, two at a time, and say what became of it; then what was not caught."""
    try:
        mistakes = list(chosen(names))
        for mistake in mistakes:
            mistake.made_in((ROOT / mistake.file).read_text("utf-8"))
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    found = {}
    with ThreadPoolExecutor(2) as pool:
        for mistake, said in zip(mistakes, pool.map(try_out, mistakes), strict=True):
            found[mistake] = said
            print(f"{said[0]:9} {mistake} [{said[1]}]", flush=True)
    shaky = failing_without({by for verdict, by in found.values() if verdict == "caught"})
    caught = [m for m, (said, by) in found.items() if said == "caught" and by not in shaky]
    print(f"{len(caught)} of {len(mistakes)} caught by behaviour")
    for mistake in found.keys() - set(caught):
        verdict, by = found[mistake]
        print(f"{verdict}: {mistake}", f"({by} fails without it too)" * (by in shaky))
    return int(len(caught) < len(mistakes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
