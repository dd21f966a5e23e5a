"""A problem with a score, the same on every machine, and the reader's best so far.

What is scored is an answer: plain lists that a function returns. The judge plays the answer
by itself, so that an answer can't lie about its result. The function runs in a process of its
own, on the sizes of the page and on others, which are drawn from its own text.
"""

import ast
import html
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle

from mgpu_tutorial.challenges.figures import lanes
from mgpu_tutorial.lab import RanksHung
from mgpu_tutorial.lab.draw.drawing import Drawing
from mgpu_tutorial.lab.run.launch import launch
from mgpu_tutorial.lab.teach import mine, solution
from mgpu_tutorial.lab.teach.build import PACKAGE, Behaviour, Builder, Outcome, is_readable
from mgpu_tutorial.lab.teach.source import namespace_of, source_of

DIST = "torch.distributed"
FILE = Path("challenges.json")  # in the folder where a notebook's kernel works
SLACK = 2.0  # where other sizes do not divide
DRAWN = 6  # other sizes
SECONDS = 60  # a function's, for all of its sizes
LETTERS = 5_000_000  # of an answer as text
IMPORTS = {"torch", "math", "itertools", "collections", "functools", "heapq", "bisect"}
IMPORTS |= {"random", "operator", "typing", "dataclasses", "copy", "statistics", "numpy"}
DOORS = {"open", "eval", "exec", "compile", "globals", "vars", "getattr", "setattr", "sys"}
DOORS |= {"os", "gc", "inspect", "importlib", "ctypes", "pickle", "subprocess", "builtins"}
INSIDE = {"os", "sys", "gc", "inspect", "importlib", "ctypes", "pickle", "subprocess"}
INSIDE |= {"builtins", "save", "load", "hub", "from_file", "fromfile", "tofile", "memmap"}
INSIDE |= {"gi_frame", "cr_frame", "ag_frame", "tb_frame", "f_back", "f_globals", "f_locals"}
INSIDE |= {"f_builtins", "f_code"}  # attributes, of whatever it is
OBJECTS = {"all_gather_object", "broadcast_object_list", "gather_object", "send_object_list"}
OBJECTS |= {"recv_object_list", "scatter_object_list"}
READY = {"DistributedDataParallel", "DataParallel", "fully_shard", "replicate"}
READY |= {"FullyShardedDataParallel", "parallelize_module"}


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
    limit = ""  # in words, where the bound is not what can be reached
    shown: tuple = ()
    target: float = 0
    allowed: frozenset[str] = frozenset()  # names of DOORS and OBJECTS, or modules
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
        """Each case with what the function answers; asked once for all rows."""
        key = cloudpickle.dumps((type(self).__name__, function))
        if key not in _asked:
            cases = self.cases(function)
            _asked.clear()
            _asked[key] = list(zip(cases, self.ask(function, cases), strict=True))
        return _asked[key]

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
            require_own(function, self.allowed)

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
            says = f"{self.told(score)}; {self.limit or f'nobody gets below {bound:,.10g}'}"
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
        """A case in words, which `build.case` has from now on."""
        self.failed = case
        return f"{self.named(case)} (build.case)"

    def named(self, case: tuple) -> str:
        """A case in words."""
        return ", ".join(f"{value!r:.40}" for value in case)


_asked: dict[bytes, list] = {}


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
    function: Callable,
    allowed: frozenset[str] = frozenset(),
    require_text: Callable[[str], None] | None = None,
) -> None:
    """AssertionError for an attempt that uses this course, or a way around the judge.

    `require_text` is given each text too, and may refuse more.

    Helpers of the reader's own are followed. It finds what stands in the text, not what
    somebody hides: the rule is for people, and a person reads the best attempts of a class.
    """
    if is_ours(function):
        return
    waiting, seen = [function], set()
    while waiting:
        thing = waiting.pop()
        seen.add(thing)
        text = source_of(thing)
        _require_text(text, allowed)
        if require_text:
            require_text(text)
        around = namespace_of(thing)
        for name in sorted(mine.names_in(text) & around.keys()):
            value = around[name]
            home = getattr(value, "__module__", "") or ""
            home = value.__name__ if type(value) is type(ast) else home
            ours = f"{home}.".startswith(PACKAGE)
            require(not ours, f"`{name}` is of this course: write it yourself")
            if home in ("__main__", mine.MINE) and is_readable(value) and value not in seen:
                waiting.append(value)
            if type(value) is type(ast):
                _require_module(home, allowed)
            if "distributed" in home.split("."):
                is_fine = "distributed" in allowed and (name, home) == ("dist", DIST)
                says = f"`{name}` is of torch.distributed, a door beside the judge"
                require(is_fine, says)


def _require_text(text: str, allowed: frozenset[str]) -> None:
    for node in ast.walk(ast.parse(text)):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else []:
            home = getattr(node, "module", "") or ""
            _require_module(f"{home}.{alias.name}".lstrip("."), allowed)
        name = getattr(node, "id", getattr(node, "attr", ""))
        doors = (
            OBJECTS
            | READY
            | {"distributed"}
            | (DOORS if isinstance(node, ast.Name) else INSIDE)
        )
        is_own = getattr(getattr(node, "value", None), "id", "") == "self"
        is_hidden = name.startswith("__") and name != "__init__"
        is_hidden |= isinstance(node, ast.Attribute) and name.startswith("_") and not is_own
        is_door = is_hidden or name in doors
        require(not is_door or name in allowed, f"`{name}` is a door beside the judge")
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        is_hidden = is_text and re.search(r"__\w", node.value)
        require(not is_hidden, "a text with `__` in it is a door beside the judge")


def _require_module(name: str, allowed: frozenset[str]) -> None:
    root, *parts = name.split(".")
    require(f"{root}." != PACKAGE, f"it imports {root}: write it yourself")
    require(root in IMPORTS | allowed, f"it imports {root}, which it can't need")
    door = next((part for part in parts if part in READY | {"distributed"}), "")
    require(not door or door in allowed, f"`{door}` is a door beside the judge")


class Challenges(Builder):
    """The `build` of this chapter: rows, a score, the picture at once, and the best kept."""

    def __init__(self, chapter: str, problems: Mapping[Callable, Problem]) -> None:
        each = {ours: problem.behaviours() for ours, problem in problems.items()}
        super().__init__(chapter, each)
        self.problems = {ours.__name__: problem for ours, problem in problems.items()}
        self.case: tuple = ()  # the arguments on which the last answer failed

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
        return self.problems[function.__name__].drawing(function)


def lines_of(function: Callable) -> int:
    """The lines of code that an attempt has, without docstring, comments and empty lines."""
    tree = ast.parse(source_of(function))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            body[:1] = [] if len(body) > 1 else [ast.Pass()]
    return len(ast.unparse(tree).splitlines())


def scores(file: Path | None = None) -> dict[str, dict[str, float]]:
    """The best scores, of a file; none where it is missing, or is not what was written."""
    try:
        found = json.loads((file or FILE).read_text("utf-8"))
        return {name: {"score": e["score"], "lines": e["lines"]} for name, e in found.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def keep(function: Callable, problem: Problem) -> str:
    """Keep a score that is better than the best so far, or as good in fewer lines."""
    name, score, lines = function.__name__, problem.score(function), lines_of(function)
    best = scores()
    before = best.get(name)
    if before and (before["score"], before["lines"]) <= (score, lines):
        return f"{problem.told(score)}. Your best stays {problem.told(before['score'])}."
    best[name] = {"score": score, "lines": lines}
    FILE.write_text(json.dumps(best, indent=1) + "\n", "utf-8")
    return f"{problem.told(score)} in {lines} lines: your best so far, in {FILE.name}."


def listing(build: Challenges) -> str:
    """Each problem with its target, its bound and the reader's best."""
    best = scores()
    rows = [("problem", "after", "target", "bound", "yours")]
    for name, problem in build.problems.items():
        own = best.get(name)
        yours = f"{own['score']:,.10g} ({own['lines']} lines)" if own else "-"
        bound = f"{problem.bound(problem.shown):,.10g}"
        rows.append((name, problem.chapter, problem.told(problem.target), bound, yours))
    return _aligned(rows)


def class_table(folder: Path, build: Challenges) -> str:
    """Who is best at what: from each challenges.json below a folder, ties by fewer lines."""
    files = sorted(folder.rglob(FILE.name))
    if not files:
        raise ValueError(f"there is no {FILE.name} below {folder}: give the graders' folder")
    rows = [("problem", "place", "score", "lines", "who")]
    for name, problem in build.problems.items():
        found = [(scores(file)[name], file) for file in files if name in scores(file)]
        found.sort(key=lambda one: (one[0]["score"], one[0]["lines"]))
        for place, (one, file) in enumerate(found, 1):
            who = file.parent.relative_to(folder).as_posix()
            told = problem.told(one["score"])
            rows.append((name, str(place), told, str(one["lines"]), who))
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(text.ljust(wide) for text, wide in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
