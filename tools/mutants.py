"""Seed mistakes one by one and see whether the checks notice: `make mutants`.

tools/mutants/ holds the mistakes, a file per chapter. Each is a text that stands once in a
file, what stands there instead, and a sentence on what then goes wrong. It is made in a
temporary copy of the tree, and the tests that are closest run there, then all tests of the
chapter, then its notebook, until one of them fails. Tests that compare times are left out,
and so is what a cell shows of the source itself: a listing differs for any change at all.
A mistake counts as caught where a check fails with it and passes without it.

`make mutants NAMES="point_to_point lab"` takes these chapters only.
"""

import argparse
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tools import check  # noqa: E402

DATA = Path(__file__).with_name("mutants")
PYTEST = ["-q", "-x", "--no-header", "--tb=no", "-rfE"]
CHOSEN = ["-m", "not timing and not gpu"]
LIMIT = 900.0  # seconds for one pytest; each test has a shorter limit of its own
NOT_COPIED = (".git", ".venv", "build", "__pycache__", "*.egg-info", ".ipynb_checkpoints")
FAILED = (1, 2)  # pytest's exit codes where a test failed, or could not be imported
LISTINGS = ("show_source(", "show_changes(", "edit(")


class Unfit(ValueError):
    """An entry that cannot be made in today's tree."""


@dataclass(frozen=True)
class Mutant:
    """One mistake: in `file` the text `old`, which stands there once, becomes `new`.

    `wrong` says what then goes wrong. `tests` are run first; `notebooks` are the chapters
    whose notebooks come last. `survives` explains why nothing can notice it.
    """

    chapter: str
    number: int
    file: str
    old: str
    new: str
    wrong: str
    tests: tuple[str, ...] = ()
    notebooks: tuple[str, ...] = ()
    survives: str = ""

    def applied(self, text: str) -> str:
        """The text of the file with the mistake in it; Unfit where it cannot be made."""
        times = text.count(self.old)
        if times != 1:
            raise Unfit(
                f"{self.chapter} {self.number}: its old text stands {times} times in "
                f"{self.file}, and must stand there once: {self.old!r}"
            )
        changed = text.replace(self.old, self.new)
        if changed == text:
            raise Unfit(f"{self.chapter} {self.number}: old and new text are the same")
        return changed


@dataclass
class Outcome:
    """What became of a mutant: "caught", "survived" or "undecided".

    `by` is what failed first, `where` the file, folder or notebook that was run.
    """

    mutant: Mutant
    verdict: str
    by: str = ""
    where: str = ""


def chapters() -> list[str]:
    """The names of the files of mistakes."""
    return sorted(path.stem for path in DATA.glob("*.toml"))


def load(chapter: str) -> list[Mutant]:
    """The mistakes of one chapter, numbered from 1; Unfit for an entry with other fields.

    What stands before the first entry holds for all that do not say otherwise.
    """
    defaults = tomllib.loads((DATA / f"{chapter}.toml").read_text(encoding="utf-8"))
    entries, found = defaults.pop("mutant"), []
    for number, given in enumerate(entries, 1):
        entry = defaults | given
        for name in ("tests", "notebooks"):
            entry[name] = tuple(entry.get(name, ()))
        try:
            found.append(Mutant(chapter, number, **entry))
        except TypeError as problem:
            raise Unfit(f"{chapter} {number}: {problem}") from None
    return found


def checks_of(mutant: Mutant) -> Iterator[list[str]]:
    """The arguments of one pytest after the other, the closest tests first."""
    if mutant.tests:
        yield [*CHOSEN, *mutant.tests]
    whole = next(
        (p for p in (f"tests/{mutant.chapter}", f"tests/test_{mutant.chapter}.py")
         if (ROOT / p).exists()), None,
    )  # fmt: skip
    if whole and (whole,) != mutant.tests:
        yield [*CHOSEN, whole]
    for name in mutant.notebooks or (mutant.chapter,):
        for path in ROOT.glob(f"notebooks/[0-9][0-9]_{name}.ipynb"):
            yield [*check.NBVAL, f"notebooks/{path.name}"]


class Copy:
    """A copy of the tree in which mistakes are made and taken back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
        for path in folder.glob("notebooks/*.ipynb"):
            path.write_text(without_listings(path.read_text(encoding="utf-8")), "utf-8")
        self._moment = int(time.time())
        self._output = folder.with_name("output")
        self._pytest: int | None = None
        self._stopped = False
        environment = os.environ | {
            "PYTHONPATH": str(folder),  # before the package that is installed
            "TMPDIR": str(folder.parent),
        }
        self._warm = subprocess.Popen(
            [sys.executable, "-m", "tools.warm"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us, who stop it
        )

    @contextmanager
    def mistaken(self, mutant: Mutant) -> Iterator[None]:
        """Inside, the copy has this mistake."""
        path = self.folder / mutant.file
        text = path.read_text(encoding="utf-8")
        self._write(path, mutant.applied(text))
        try:
            yield
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        """Each time a second later: Python knows a compiled file by its time and length."""
        self._moment += 1
        path.write_text(text, encoding="utf-8")
        os.utime(path, (self._moment, self._moment))

    def pytest(self, words: Sequence[str]) -> tuple[int | None, list[str]]:
        """Run pytest in the copy; its exit code (None past the limit), and what failed."""
        if self._stopped:
            raise KeyboardInterrupt
        print(
            json.dumps([str(self._output), *PYTEST, *words]),
            file=self._warm.stdin,
            flush=True,
        )
        self._pytest = self._answer()
        within = bool(select.select([self._warm.stdout], [], [], LIMIT)[0])
        if not within:
            self._kill()
        code, self._pytest = self._answer(), None
        lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines()
        named = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        failed = [line.split(" - ")[0].partition(" ")[2] for line in named]
        return code if within else None, failed or lines[-3:]

    def _answer(self) -> int:
        line = self._warm.stdout.readline()
        if self._stopped:
            raise KeyboardInterrupt
        if not line:
            raise RuntimeError("the Python that runs the tests of mistakes has ended")
        return int(line)

    def stop(self) -> None:
        """End what runs here, for good."""
        self._stopped = True
        self._kill()
        self._warm.kill()
        self._warm.wait()

    def _kill(self) -> None:
        if self._pytest:
            with suppress(ProcessLookupError):
                os.killpg(self._pytest, signal.SIGKILL)


def without_listings(notebook: str) -> str:
    """A notebook in which no output that shows the source itself is compared."""
    book = json.loads(notebook)
    for cell in book["cells"]:
        if cell["cell_type"] == "code" and any(
            w in "".join(cell["source"]) for w in LISTINGS
        ):
            cell["metadata"].setdefault("tags", []).append("nbval-ignore-output")
    return json.dumps(book)


def try_out(mutant: Mutant, copy: Copy) -> Outcome:
    """Make the mistake and run the checks until one of them fails."""
    shaky = ""
    for words in checks_of(mutant):
        with copy.mistaken(mutant):
            code, failed = copy.pytest(words)
        if code in (0, check.NOTHING_TO_RUN):
            continue
        if code is None:
            shaky = f"no end within {LIMIT:.0f} s of {words[-1]}"
            continue
        if code not in FAILED:
            shaky = f"pytest could not run {words[-1]}"
            continue
        return Outcome(mutant, "caught", failed[0], words[-1])
    return Outcome(mutant, "undecided" if shaky else "survived", shaky)


def confirm(outcomes: Sequence[Outcome], copy: Copy) -> None:
    """Run without any mistake all that noticed one; who fails then has noticed nothing."""
    caught = [outcome for outcome in outcomes if outcome.verdict == "caught"]
    books = {o.where for o in caught if o.where.endswith(".ipynb")}
    tests = {o.by if "::" in o.by else o.where for o in caught if o.where not in books}
    failed: set[str] = set()
    if tests:
        code, names = copy.pytest(["--maxfail=1000", *CHOSEN, *sorted(tests)])
        failed |= {0: set(), 1: set(names)}.get(code, tests)
    for book in sorted(books):
        if copy.pytest([*check.NBVAL, book])[0]:
            failed.add(book)
    for outcome in caught:
        if {outcome.by, outcome.where} & failed:
            outcome.verdict, outcome.by = "undecided", f"{outcome.by} fails without it too"


def try_all(
    mutants: Sequence[Mutant], jobs: int, tell: Callable[[Outcome], None]
) -> list[Outcome]:
    """Try each and `tell` what became of it; then confirm, chapter by chapter.

    The copies are gone at the end, whatever ends it.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        copies = [Copy(Path(folder) / str(job) / "tree") for job in range(jobs)]
        free = queue.SimpleQueue()
        for copy in copies:
            free.put(copy)

        def with_copy(action: Callable, *args: Any) -> Any:
            copy = free.get()
            try:
                return action(*args, copy)
            finally:
                free.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            try:
                tried = [pool.submit(with_copy, try_out, mutant) for mutant in mutants]
                outcomes = [_told(future.result(), tell) for future in tried]
                by_chapter = defaultdict(list)
                for outcome in outcomes:
                    by_chapter[outcome.mutant.chapter].append(outcome)
                groups = by_chapter.values()
                confirmed = [pool.submit(with_copy, confirm, group) for group in groups]
                for future in confirmed:
                    future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for copy in copies:
                    copy.stop()
    return outcomes


def _told(outcome: Outcome, tell: Callable[[Outcome], None]) -> Outcome:
    tell(outcome)
    return outcome


def report(outcomes: Iterable[Outcome]) -> str:
    """Caught of seeded by chapter; then each that was not caught, with its explanation."""
    outcomes = list(outcomes)
    seeded = Counter(outcome.mutant.chapter for outcome in outcomes)
    caught = Counter(o.mutant.chapter for o in outcomes if o.verdict == "caught")
    width = max(map(len, [*seeded, "all"]))
    lines = [f"{name:{width}}  {caught[name]:3} of {seeded[name]}" for name in sorted(seeded)]
    all_caught = caught.total()
    share = all_caught / max(len(outcomes), 1)
    lines.append(f"{'all':{width}}  {all_caught:3} of {len(outcomes)}: {share:.1%} caught")
    for outcome in outcomes:
        mutant = outcome.mutant
        if outcome.verdict != "caught":
            lines.append(
                f"{outcome.verdict}: {mutant.chapter} {mutant.number}, {mutant.wrong}"
            )
            lines += [f"    {line}" for line in (outcome.by, mutant.survives) if line]
        elif mutant.survives:
            lines.append(
                f"caught, but explained as a survivor: {mutant.chapter} {mutant.number}"
            )
    return "\n".join(lines)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="chapters, lab, shared; or name:number")
    parser.add_argument(
        "--jobs", type=int, default=2, help="copies that run side by side (2)"
    )
    given = parser.parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also leaves nothing behind
    try:
        mutants = chosen(given.names)
        for mutant in mutants:
            mutant.applied((ROOT / mutant.file).read_text(encoding="utf-8"))
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    outcomes: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        mutant = outcome.mutant
        line = f"{outcome.verdict:9} {mutant.chapter} {mutant.number}: {mutant.wrong}"
        print(line + f" [{outcome.by}]" * bool(outcome.by), flush=True)

    try:
        try_all(mutants, given.jobs, tell)
    except KeyboardInterrupt:
        print("\nstopped; nothing below is confirmed", file=sys.stderr)
    print("\n" + report(outcomes))
    unexplained = [o for o in outcomes if o.verdict != "caught" and not o.mutant.survives]
    return int(bool(unexplained) or len(outcomes) < len(mutants))


def chosen(names: Sequence[str]) -> list[Mutant]:
    """All mistakes, or those of the named chapters, or single ones such as lab:3."""
    known, found = chapters(), []
    for name in names or known:
        chapter, _, number = name.partition(":")
        if chapter not in known:
            raise Unfit(f"NAMES={name!r}: no such chapter; there are {', '.join(known)}")
        found += [m for m in load(chapter) if not number or m.number == int(number)]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
