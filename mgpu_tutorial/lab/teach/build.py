"""Builds: the reader writes a mechanism, real ranks try it, and what passes is kept.

A chapter's `builds.py` names in order what each function must do. A behaviour is a function
of one argument, the function to be tried; its docstring completes the sentence "`ring` must
…", and it raises an AssertionError that says what was seen.
"""

import ast
import functools
import html
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch

from mgpu_tutorial.lab.run.errors import Interrupted, LaunchError, RankFailed, outcome_of
from mgpu_tutorial.lab.run.launch import launch as launch_ranks
from mgpu_tutorial.lab.teach import mine, solution
from mgpu_tutorial.lab.teach.limit import NotReturned, limited
from mgpu_tutorial.lab.teach.source import namespace_of, source_of
from mgpu_tutorial.lab.teach.verdict import MARK, page_of, written
from mgpu_tutorial.lab.words import in_a_row

Behaviour = Callable[[Callable], None]
BLANK = "a `...` is left to fill in"
OUR_LINE = re.compile(r", at builds\.py:\d+  .*")  # says nothing to the reader
ITSELF = (
    "get the function itself, build(name), with no quotes or brackets around the name; a "
    "cell makes it with def or class"
)
NAMELESS = "get a function that has a name: write it with def, because a lambda has none"
PACKAGE = f"{__name__.partition('.')[0]}."  # whose functions are ours
WORDS = {True: "yes", False: "no", None: "not tried"}

launch = functools.partial(launch_ranks, timeout=10)  # a build that hangs says so soon


def expect(found: Any, expected: Any, what: str, within: float = 0.0) -> None:
    """Raise AssertionError unless what was found is what was expected, or nearly.

    `what` begins the sentence: "on 3 ranks the sums". `within` is the largest difference of
    two numbers, or of two tensors, that is still right.
    """
    if found is None and expected is not None:
        why = "Either it was not set, or nothing was returned. Is a `return` missing?"
        if "gradient" in what:
            why = "Nothing came back in backward. Is it cut off, or a `return` missing?"
        raise AssertionError(f"{what}: None. {why}")
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        count = len(expected)
        assert len(found) == count, f"{what}: {len(found)} of them, expected {count}"
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            expect(one, other, f"{what}, entry {i} of {count}", within)
    elif not _same(found, expected, within):
        shapes = {getattr(value, "shape", None) for value in (found, expected)}
        pair = [_short(value, len(shapes) > 1) for value in (found, expected)]
        raise AssertionError(f"{what}: {pair[0]}, expected {pair[1]}")


def _same(found: Any, expected: Any, within: float) -> bool:
    """Whole numbers are compared as such, all others in float64 or complex128."""
    try:
        one, other = torch.as_tensor(found), torch.as_tensor(expected)
        kind = torch.promote_types(one.dtype, other.dtype)
        if kind.is_complex or kind.is_floating_point:
            kind = torch.complex128 if kind.is_complex else torch.float64
        one, other = one.to(kind), other.to(kind)
    except (TypeError, ValueError, RuntimeError):  # neither numbers nor tensors
        return found == expected
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=within)


def _short(value: Any, with_shape: bool) -> str:
    """A value on one line: of a tensor the first numbers, and on demand the shape."""
    if not isinstance(value, torch.Tensor):
        return f"{value:g}" if isinstance(value, float) else repr(value)
    numbers = [f"{number:g}" for number in value.flatten()[:6].tolist()]
    text = ", ".join([*numbers, "…"] if value.numel() > 6 else numbers)
    return f"[{text}]" + (f" of shape {tuple(value.shape)}" if with_shape else "")


def cut(text: str, length: int = 2000) -> str:
    """A text, or of a very long one its beginning and its end."""
    if len(text) <= length:
        return text
    return f"{text[: length // 2]} … ({len(text):,} characters) … {text[-length // 4 :]}"


class Row(NamedTuple):
    """What a function must do, whether it does (None: not tried), and what was seen."""

    must: str
    holds: bool | None
    seen: str = ""


class Builder:
    """The `build` of one chapter: `build(function)` tries it and keeps what passes."""

    # `behaviours` are by the chapter's own version of each function, in the order of the page
    def __init__(self, chapter: str, behaviours: Mapping[Callable, Sequence[Behaviour]]):
        self.chapter = chapter
        self.ours = {function.__name__: function for function in behaviours}
        self.behaviours = {function.__name__: tried for function, tried in behaviours.items()}
        self.passed: set[str] = set()

    def __call__(self, *functions: Callable) -> None:
        """Try functions or classes of the reader, show each behaviour, keep what passes."""
        from IPython.display import display

        try:
            self._judge(*functions)
        except Exception as error:  # of the reader's code nothing gets here
            place = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{Path(place.filename).name}:{place.lineno}"
            seen = f"a mistake of this course, not of yours: {type(error).__name__}: {error}"
            display(Outcome(["build"], [Row("judge it", None, f"{seen}, at {at}")], []))

    def _judge(self, *functions: Callable) -> None:
        from IPython.display import display

        if not functions or not all(map(is_readable, functions)):
            nameless = [f for f in functions if getattr(f, "__name__", "") == "<lambda>"]
            must = NAMELESS if nameless else ITSELF
            display(Outcome(["build"], [Row(must, False)], []))
            return
        names = [function.__name__ for function in functions]
        with self._lent(functions) as lent:
            rows = self._tried(functions)
            display(Outcome(names, rows, lent))
            if solution.running or not all(row.holds for row in rows):
                return
            if any(function.__module__.startswith(PACKAGE) for function in functions):
                print(solution.UNKEPT)
            else:
                self.passed.update(names)
                print(self._kept(functions))

    def _kept(self, functions: Sequence[Callable]) -> str:
        """Put what has passed into the reader's library, and say how to import it."""
        names = [function.__name__ for function in functions]
        words = in_a_row(names) + (" is" if len(names) == 1 else " are")
        if all(map(mine.holds, functions)):
            return f"{words} from {mine.FILE.name}, and stays there."
        try:
            notes = mine.keep(self.chapter, functions, self.ours)
        except Exception as error:  # the answer is right, whatever a file does
            what = (
                error
                if isinstance(error, mine.NotKept)
                else f"{type(error).__name__}: {error}"
            )
            return f"{words} right, but {mine.FILE.name} stays as it was: {what}."
        taken = f"from {mine.FILE.stem} import {', '.join(names)}"
        where = "/".join(mine.FILE.resolve().parts[-2:])  # of the notebook's copy, too
        return "\n".join([f"{words} now in {where}. To use it: {taken}", *notes])

    def rows(self, *functions: Callable) -> list[Row]:
        """Each behaviour of each function, as far as they hold. Nothing is raised."""
        with self._lent(functions):
            return self._tried(functions)

    def require(self, *functions: Callable) -> None:
        """Raise AssertionError, which has the rows, unless all behaviours hold."""
        rows = self.rows(*functions)
        names = [function.__name__ for function in functions]
        assert all(row.holds for row in rows), Outcome(names, rows, [])

    @contextmanager
    def _lent(self, functions: Sequence[Callable]) -> Iterator[list[str]]:
        """Put ours for the builds that the reader has not made, and yield those in use."""
        around = namespace_of(functions[0])
        own = {function.__name__ for function in functions}
        passed = {name for name, value in around.items() if self._has_passed(name, value)}
        needed, waiting = set(), list(functions)
        while waiting:
            used = mine.names_in(source_of(waiting.pop())) & self.ours.keys() - needed - own
            needed |= used
            waiting += [around[name] for name in used & passed]
        needed -= passed
        before = {name: around[name] for name in needed & around.keys()}
        around.update({name: self.ours[name] for name in needed})
        try:
            yield sorted(needed)
        finally:
            for name in needed:
                around.pop(name, None)
            around.update(before)

    def _has_passed(self, name: str, value: Any) -> bool:
        """Whether a name still means what has passed; it may mean a number by now."""
        return (name in self.passed or mine.holds(value)) and is_readable(value)

    def _tried(self, functions: Sequence[Callable]) -> list[Row]:
        rows: list[Row] = []
        tried = [b for f in functions for b in self.behaviours.get(f.__name__, [])]
        for function in functions:
            if function.__name__ not in self.behaviours:
                known = ", ".join(self.behaviours)
                rows.append(Row(f"have a name of this chapter: {known}", False))
            for behaviour in self.behaviours.get(function.__name__, []):
                must = " ".join((behaviour.__doc__ or "").split()).rstrip(".")
                if [b.__doc__ for b in tried].count(behaviour.__doc__) > 1:
                    must += f" ({function.__name__})"
                if rows and not rows[-1].holds:
                    rows.append(Row(must, None))
                elif is_blank(function):
                    rows.append(Row(must, None, BLANK))
                else:
                    rows.append(Row(must, *_try(behaviour, function)))
        return rows


def _try(behaviour: Behaviour, function: Callable) -> tuple[bool, str]:
    try:
        with limited(except_in=launch_ranks):
            behaviour(function)
    except RankFailed as error:
        ranks = error.report.world_size
        return False, cut(
            f"on {ranks} rank{'s' * (ranks > 1)}: {OUR_LINE.sub('', str(error))}"
        )
    except (AssertionError, LaunchError) as error:
        return False, cut(OUR_LINE.sub("", str(error)).strip()) or "it does not"
    except NotReturned as error:
        return False, f"{error}{_place_of(error)}"
    except Interrupted:  # of a launch, which says where each rank was
        raise
    except KeyboardInterrupt as error:
        raise Interrupted(f"the build was stopped{_place_of(error)}") from None
    except (Exception, SystemExit) as error:  # the reader's code: anything can happen
        said = f"{type(error).__name__}: {error}{_place_of(error)}"
        return False, cut(OUR_LINE.sub("", said))
    return True, ""


def _place_of(error: BaseException) -> str:
    where = outcome_of(error)["where"]
    return f", at {where}  {where.text}" if where else ""


def is_readable(thing: Any) -> bool:
    """Whether it is a function or class whose text can be read: no lambda, no `len`."""
    try:
        is_named = thing.__name__.isidentifier() and isinstance(thing, type | FunctionType)
        return is_named and bool(source_of(thing))
    except (AttributeError, OSError, TypeError, ValueError):
        return False


def is_blank(function: Callable) -> bool:
    """True where a `...` of the stub is left; one that indexes a tensor is none."""
    nodes = list(ast.walk(ast.parse(source_of(function))))
    slices = [node.slice for node in nodes if isinstance(node, ast.Subscript)]
    indices = [node for part in slices for node in ast.walk(part)]
    dots = [n for n in nodes if isinstance(n, ast.Constant) and n.value is ...]
    return any(node not in indices for node in dots)


class Outcome(NamedTuple):
    """The rows of a build as a table, and whose builds it borrowed.

    Of a stub that is not filled in it is one line, and folded below it what will be tried.
    """

    names: list[str]
    rows: list[Row]
    lent: list[str]

    @property
    def _last(self) -> str:
        return f"Tried with our {in_a_row(self.lent)}." if self.lent else ""

    @property
    def is_open(self) -> bool:
        """True where the first function is not filled in, so that nothing was tried."""
        return bool(self.rows) and self.rows[0].seen == BLANK

    def __repr__(self) -> str:
        if self.is_open:
            return f"not yet: {BLANK}"
        word = "correct" if all(row.holds for row in self.rows) else "not yet"
        lines = [f"{word}: {in_a_row(self.names)}"]
        for row in self.rows:
            seen = f": {row.seen}" if row.seen else ""
            lines.append(f"  must {row.must}: {WORDS[row.holds]}{seen}")
        return "\n".join([*lines, self._last]).rstrip()

    def _repr_html_(self) -> str:
        style = 'style="text-align:left;vertical-align:top;padding:3px 8px"'
        names = in_a_row([f"<code>{html.escape(name)}</code>" for name in self.names])
        if self.is_open:  # the rows stand with an answer
            must = "".join(f"<li>{written(row.must)}</li>" for row in self.rows)
            told = f"<summary>What will be tried: {names} must</summary><ul>{must}</ul>"
            return f"{MARK}{page_of('not yet', None, BLANK)}<details>{told}</details></div>"
        body = f"<tr><th {style}>{names} must</th><th {style}></th></tr>"
        for row in self.rows:
            must = written(row.must)
            seen = page_of(WORDS[row.holds], row.holds, row.seen)
            body += f"<tr><td {style}>{must}</td><td {style}>{seen}</td></tr>"
        last = f"<p>{written(self._last)}</p>" if self._last else ""
        return f'{MARK}<div style="overflow-x:auto"><table>{body}</table></div>{last}</div>'
