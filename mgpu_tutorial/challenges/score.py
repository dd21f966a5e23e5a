"""A problem with a score, the same on every machine, and the reader's best so far.

What is scored is an answer: plain lists that a function returns. The judge plays the answer
by itself, so that an answer can't lie about its result. The function runs in a process of its
own, on the sizes of the page and on others, which are drawn from its own text.
"""

import ast
import html
import inspect
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mgpu_tutorial.challenges.figures import lanes
from mgpu_tutorial.lab import RanksHung
from mgpu_tutorial.lab.draw.drawing import Drawing
from mgpu_tutorial.lab.run.launch import launch
from mgpu_tutorial.lab.teach import mine, solution
from mgpu_tutorial.lab.teach.build import (
    PACKAGE,
    Behaviour,
    Builder,
    Outcome,
    Row,
    is_readable,
)
from mgpu_tutorial.lab.teach.source import namespace_of, source_of

DIST = "torch.distributed"
FILE = Path("challenges.json")  # in the folder where a notebook's kernel works
SLACK = 2.0  # where other sizes do not divide
DRAWN = 6  # other sizes
SECONDS = 60  # a function's, for all of its sizes
LETTERS = 5_000_000  # of an answer as text
WIDE = 100  # letters of a line; a longer one counts as several
# What an answer can need; a clock, or files, would make it another one on each machine.
MODULES = {"torch", "numpy", "math", "cmath", "fractions", "decimal", "numbers", "statistics"}
MODULES |= {"itertools", "functools", "operator", "collections", "heapq", "bisect", "array"}
MODULES |= {"random", "copy", "typing", "dataclasses", "enum", "abc", "string", "re"}
MODULES |= {"contextlib", "__future__"}


def require(holds: bool, what: str) -> None:
    """AssertionError with these words, unless it holds."""
    if not holds:
        raise AssertionError(what)


def whole(value: Any, below: int, what: str) -> int:
    """A whole number from 0 to below `below`, or an AssertionError that names it."""
    is_whole = type(value) is int and 0 <= value < below
    require(is_whole, f"{what}: {value!r}, expected a whole number from 0 to {below - 1}")
    return value


def rows_of(answer: Any, fields: int, what: str) -> list[list]:
    """A list of lists of so many fields, or an AssertionError that names what is not."""
    require(isinstance(answer, list), f"{what}: {answer!r:.60} is no list")
    for row in answer:
        is_row = isinstance(row, list) and len(row) == fields
        require(is_row, f"{what}: {row!r:.60}, expected {fields} values")
    return answer


class Problem:
    """An open problem. A subclass says how an answer is played, and what nobody can pass.

    `shown` are the arguments that the page shows, and the score's. `target` is what we reach.
    """

    chapter = ""  # after which it comes
    unit = ""  # "rounds"
    axis = ""  # of the picture, where it is not the unit
    must = ""  # what an answer must do, as a row of a build has it
    why = ""  # nobody can pass the bound
    shown: tuple = ()
    target: float = 0
    sends = False  # whether it may use torch.distributed
    slack: float = SLACK  # how much worse other sizes may come out than the page's
    failed: tuple | None = None  # the case that failed last

    def other(self, rng: random.Random) -> tuple:
        """Other arguments, drawn."""
        raise NotImplementedError

    def play(self, case: tuple, answer: Any) -> float:
        """The score of an answer; AssertionError for one that does not do what it must."""
        raise NotImplementedError

    def bound(self, case: tuple) -> float:
        """What no answer can pass."""
        raise NotImplementedError

    def lanes(self, case: tuple, answer: Any) -> list[tuple[str, list[tuple]]]:
        """The rows of the picture; a bar is (begin, end, text, colour)."""
        raise NotImplementedError

    def ask(self, function: Callable, cases: Sequence[tuple]) -> list:
        """What the function answers, as plain values, from a process of its own."""
        more = {"backend": "none", "device": "cpu", "timeout": SECONDS}
        (texts,) = returned(launch, _answers, 1, function, list(cases), **more).results
        return [json.loads(text) for text in texts]

    # What is judged of every problem

    def cases(self, function: Callable) -> list[tuple]:
        """The arguments of the page, and others that depend on the function's text."""
        rng = random.Random(source_of(function))
        return [self.shown, *(self.other(rng) for _ in range(DRAWN))]

    def answers(self, function: Callable) -> list[tuple[tuple, Any]]:
        """Each case with what the function answers; asked once for all rows of a build."""
        if (self, function) not in asked:
            cases = self.cases(function)
            asked.clear()
            answers = self.ask(function, cases)
            asked[self, function] = list(zip(cases, answers, strict=True))
        return asked[self, function]

    def score(self, function: Callable) -> float:
        """What an answer to the page's arguments costs."""
        return self.play(*self.answers(function)[0])

    def told(self, score: float) -> str:
        """A score in words: "8 rounds"."""
        return f"{score:,.10g} {self.unit}"

    def drawing(self, function: Callable) -> Drawing:
        """The picture of the answer to the page's arguments."""
        case, answer = self.answers(function)[0]
        whose = "ours" if is_ours(function) else function.__name__
        title = f"{whose}: {self.told(self.play(case, answer))}"
        return lanes(self.lanes(case, answer), title, self.axis or self.unit)

    def behaviours(self) -> list[Behaviour]:
        """The rows of the judge, the target last."""

        def alone(function: Callable) -> None:
            require_own(function, self.sends)

        def holds(function: Callable) -> None:
            for case, answer in self.answers(function):
                try:
                    score, least = self.play(case, answer), self.bound(case)
                    says = f"{self.told(score)}, below {least:,.10g}, which nobody can be"
                    require(score > least - 1e-6, f"{says}: it went around the judge")
                except AssertionError as error:
                    raise AssertionError(f"{self.blamed(case)}: {error}") from None

        def fair(function: Callable) -> None:
            (shown, answer), *others = self.answers(function)
            share = self.slack * max(1, self.play(shown, answer) / self.bound(shown))
            for case, other in others:
                score, least = self.play(case, other), self.bound(case)
                if score > share * least:
                    says = f"{self.told(score)}, where {least:g} is the bound"
                    better = "the page's size comes out better"
                    raise AssertionError(f"{self.blamed(case)}: {says}; {better}")

        def reach(function: Callable) -> None:
            score = self.score(function)
            bound = self.bound(self.shown)
            says = f"{self.told(score)}; nobody gets below {bound:,.10g}"
            require(round(score, 9) <= self.target, says)

        alone.__doc__ = "be written with Python and torch, and nothing of this course"
        holds.__doc__ = f"{self.must}, here and on {DRAWN} other sizes"
        fair.__doc__ = "be about as good on those other sizes"
        reach.__doc__ = f"reach the target, {self.told(self.target)}"
        return [alone, holds, fair, reach]

    def arguments(self, case: tuple) -> tuple:
        """What the function gets in a case."""
        return case

    def blamed(self, case: tuple) -> str:
        """A case in words, which `.case` of the judge has from now on."""
        self.failed = case
        return f"{self.named(case)} (.case has it)"

    def named(self, case: tuple) -> str:
        """A case in words."""
        return ", ".join(f"{value!r:.40}" for value in case)


asked: dict[tuple[Problem, Callable], list] = {}


def returned(call: Callable, *given: Any, **more: Any) -> Any:
    """What a launch returns; AssertionError where the function took too long."""
    try:
        return call(*given, **more)
    except RanksHung:
        raise AssertionError(
            f"it had not answered after {more['timeout']} s, for the page's sizes and others"
        ) from None


def _answers(rank: int, world_size: int, function: Callable, cases: list[tuple]) -> list[str]:
    """In a process of its own: each answer as text, so that only plain values come back."""
    asked = [json.loads(json.dumps(case)) for case in cases]
    return [_text_of(function(*case)) for case in asked]


def _text_of(answer: Any) -> str:
    """An answer as JSON; ValueError for an enormous one."""
    text = json.dumps(answer, default=_plain)
    if len(text) > LETTERS:
        count = f"{len(text):,} letters as text, expected {LETTERS:,} or fewer"
        raise ValueError(f"the answer has {count}: leave out what does nothing")
    return text


def _plain(value: Any) -> Any:
    """Numbers of NumPy and torch as Python's; TypeError for what is no list of numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    kind = type(value).__name__
    raise TypeError(f"the answer has a {kind} in it: return lists, numbers and texts")


def is_ours(function: Callable) -> bool:
    """True for a function of this package, which is nobody's attempt."""
    return function.__module__.startswith(PACKAGE)


def require_own(
    function: Callable, sends: bool = False, require_text: Callable[[str], None] | None = None
) -> None:
    """AssertionError for an attempt that uses this course, messages, or a module too many.

    `require_text` is given each text too, and may refuse more.

    Helpers of the reader's own are followed. It looks at what is imported, and finds nothing
    that somebody hides: the rule is for people, and a person reads the best attempts of a
    class.
    """
    if is_ours(function):
        return
    waiting, seen = [function], set()
    while waiting:
        thing = inspect.unwrap(waiting.pop())
        if thing in seen:
            continue
        seen.add(thing)
        text = source_of(thing)
        if require_text:
            require_text(text)
        for module in _imported(text):
            _require_module(module, module, sends)
        around = namespace_of(thing)
        for name in sorted(mine.names_in(text) & around.keys()):
            value = inspect.unwrap(around[name])
            if type(value) is type(ast):
                _require_module(name, value.__name__, sends)
                continue
            home = getattr(value, "__module__", "") or ""
            _require_home(name, home, sends=False)
            if home in ("__main__", mine.MINE) and is_readable(value):
                waiting.append(value)


def _imported(text: str) -> Iterator[str]:
    """The modules that a text imports, and torch.distributed where it stands there."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == DIST:
            yield DIST


def _require_module(name: str, module: str, sends: bool) -> None:
    _require_home(name, module, sends)
    root = module.partition(".")[0]
    require(root in MODULES, f"it imports {root}, which it can't need")


def _require_home(name: str, home: str, sends: bool) -> None:
    ours = f"{home}.".startswith(PACKAGE)
    require(not ours, f"`{name}` is of this course: write it yourself")
    is_door = "distributed" in home.lower() and not (sends and home == DIST)
    require(not is_door, f"`{name}` is of torch.distributed, a door beside the judge")


class Challenges(Builder):
    """The `build` of this chapter: rows, a score, the picture at once, and the best kept."""

    def __init__(self, chapter: str, problems: Mapping[Callable, Problem]) -> None:
        each = {ours: problem.behaviours() for ours, problem in problems.items()}
        super().__init__(chapter, each)
        self.problems = {ours.__name__: problem for ours, problem in problems.items()}
        self.case: tuple = ()  # the arguments on which the last answer failed

    def rows(self, *functions: Callable) -> list[Row]:
        """Each behaviour, asked anew: a module that was edited has the same name."""
        asked.clear()
        return super().rows(*functions)

    def _judge(self, *functions: Callable) -> None:
        """Try one function, show its rows and its picture, and keep its score."""
        from IPython.display import display

        if len(functions) != 1 or not is_readable(functions[0]):
            super()._judge(
                *(functions if len(functions) == 1 else ())
            )  # it says what it wants
            return
        (function,) = functions
        problem = self.problems.get(function.__name__)
        if problem:
            problem.failed = None
        rows = self.rows(function)
        if problem and problem.failed:
            self.case = problem.arguments(problem.failed)
        display(Outcome([function.__name__], rows, []))
        if not problem or not all(r.holds for r in rows[:2]):
            return
        with suppress(AssertionError):  # of a whole step without a price
            display(problem.drawing(function))
        if is_ours(function):  # whoever asks for it may read it too
            text = source_of(function)
            page = f"<pre>{html.escape(text)}</pre>"
            display({"text/plain": text, "text/html": page}, raw=True)
        if solution.running or is_ours(function) or not all(r.holds for r in rows[:-1]):
            return
        print(keep(function, problem))
        if (score := problem.score(function)) < problem.target:
            is_best = score <= problem.bound(problem.shown)
            more = ", and nobody can do better" if is_best else ""
            print(f"Better than ours, which takes {problem.told(problem.target)}{more}.")
        if rows[-1].holds:
            print(self._kept(functions))

    @contextmanager
    def _lent(self, functions: Sequence[Callable]) -> Iterator[list[str]]:
        """Nothing of ours is lent: a challenge is done alone."""
        yield []

    def picture(self, function: Callable) -> Drawing:
        """The picture of an answer, whatever its score."""
        asked.clear()
        return self.problems[function.__name__].drawing(function)


def lines_of(function: Callable) -> int:
    """The lines of code that an attempt has, without docstring, comments and empty lines.

    A line of more than WIDE letters counts as several.
    """
    tree = ast.parse(source_of(function))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            body[:1] = [] if len(body) > 1 else [ast.Pass()]
    return sum(-(-len(line) // WIDE) for line in ast.unparse(tree).splitlines() if line)


def scores(file: Path | None = None) -> dict[str, dict[str, float]]:
    """The best scores, of a file; none where it is missing.

    Raises ValueError, which names the file, where it is not what was written.
    """
    file = file or FILE
    try:
        found = json.loads(file.read_text("utf-8"))
        return {name: {"score": e["score"], "lines": e["lines"]} for name, e in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{file} is damaged: mend it, or move it away") from None


def keep(function: Callable, problem: Problem) -> str:
    """Keep a score that is better than the best so far, or as good in fewer lines."""
    name, score, lines = function.__name__, problem.score(function), lines_of(function)
    try:
        best = scores()
    except ValueError as error:
        return f"{problem.told(score)} in {lines} lines, but it was not kept: {error}."
    before = best.get(name)
    if before and (before["score"], before["lines"]) <= (score, lines):
        return f"{problem.told(score)}. Your best stays {problem.told(before['score'])}."
    best[name] = {"score": score, "lines": lines}
    FILE.write_text(json.dumps(best, indent=1) + "\n", "utf-8")
    return f"{problem.told(score)} in {lines} lines: your best so far, in {FILE.name}."


def listing(build: Challenges) -> str:
    """Each problem with its target, its bound and the reader's best."""
    best = scores()
    rows = [("", "problem", "after", "target", "bound", "yours")]
    for number, (name, problem) in enumerate(build.problems.items(), 1):
        own = best.get(name)
        yours = f"{own['score']:,.10g} ({own['lines']} lines)" if own else "-"
        bound = f"{problem.bound(problem.shown):,.10g}"
        target = problem.told(problem.target)
        rows.append((str(number), name, problem.chapter, target, bound, yours))
    return _aligned(rows)


def class_table(folder: Path, build: Challenges) -> str:
    """Who is best at what, of each challenges.json below a folder: ties go by fewer lines."""
    files = sorted(folder.rglob(FILE.name))
    if not files:
        raise ValueError(f"there is no {FILE.name} below {folder}: give the graders' folder")
    rows, kept = [("problem", "place", "score", "lines", "who")], {}
    for file in files:
        who = file.parent.relative_to(folder).as_posix()
        try:
            kept[who] = scores(file)
        except ValueError:
            rows.append(("-", "-", "damaged", "-", who))
    for name, problem in build.problems.items():
        found = {
            who: (own[name]["score"], own[name]["lines"])
            for who, own in kept.items()
            if name in own
        }
        for who, one in sorted(found.items(), key=lambda item: item[1]):
            place = 1 + sum(other < one for other in found.values())
            rows.append((name, str(place), problem.told(one[0]), str(one[1]), who))
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(text.ljust(wide) for text, wide in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
