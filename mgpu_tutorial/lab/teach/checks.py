"""Exercise checks: say what is still wrong in fixed words, and never raise."""

import functools
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np
import torch

from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.run.errors import LaunchError
from mgpu_tutorial.lab.teach.verdict import Verdict

NOT_YET, CORRECT, BLANK = "not yet", "correct", "nothing is filled in"
TOLERANCE, EXACT = 1e-5, 1e-9  # relative: of measured numbers, and of whole ones
SHOWN = 80  # characters of an answer


def verdict(
    answer: Any,
    expected: Any,
    hint: str = "",
    *,
    name: str = "your answer",
    tolerance: float | None = None,
) -> Verdict:
    """Compare an exercise's answer with what is expected.

    `answer` may be a function without arguments, such as `lambda: launch(mine, 4)`; what it
    raises is part of the verdict. Of a launch, the results are compared rank by rank with the
    list `expected`. An answer of None or `...`, alone or for each rank, counts as not begun,
    and a hint comes after a try only. A number may be a tensor of one element, a list a
    tuple, a range or a tensor. `tolerance` is the distance allowed, in shares of what is
    expected: 1e-5, and rounding only where that is an int; where 0 is expected the distance
    itself. `name` is how the verdict calls the answer: "the distance".
    """
    try:
        answer = answer() if isinstance(answer, Callable) else answer
        each = "{}[{}]"
        if isinstance(answer, Report):
            each = f"rank {{1}} of {answer.world_size}: {{0}}"
            name = "its answer" if name == "your answer" else name
            if _is_blank(answer.results) and any(answer.stdout):
                return Verdict(NOT_YET, False, "the ranks print and return nothing", hint)
            answer = answer.results
        if _is_blank(answer):
            return Verdict(NOT_YET, None, BLANK)
        wrong = _difference(answer, expected, name, tolerance, each)
    except (Exception, SystemExit) as error:  # the learner's code: anything can happen
        if "ellipsis" in str(error).lower():  # the type of the `...` in a stub
            return Verdict(NOT_YET, None, BLANK)
        wrong = _told(error)
    return Verdict(NOT_YET, False, wrong, hint) if wrong else Verdict(CORRECT, True)


@functools.wraps(verdict, assigned=["__doc__"])
def check(*given: Any, **more: Any) -> None:
    from IPython.display import display

    display(verdict(*given, **more))


def _difference(
    answer: Any, expected: Any, name: str, tolerance: float | None, each: str = "{}[{}]"
) -> str:
    """Where the answer first differs from what is expected; nothing where it does not."""
    answer, expected = _plain(answer), _plain(expected)
    said = f"{name}, {_shown(answer)}, is not right"
    if isinstance(expected, list):
        if not isinstance(answer, list):
            return f"{said}: return a list of {_values(expected)}"
        if len(answer) != len(expected):
            return f"{said}: {_values(answer)}, expected {len(expected)}"
        pairs = enumerate(zip(answer, expected, strict=True))
        found = (_difference(a, e, each.format(name, i), tolerance) for i, (a, e) in pairs)
        return next(filter(None, found), "")
    if not _is_number(expected):
        if not isinstance(answer, type(expected)):
            return f"{said}: return a {type(expected).__name__}"
        return "" if answer == expected else said
    if not _is_number(answer):
        return f"{said}: return a number"
    is_whole = isinstance(expected, int)
    limit = (EXACT if is_whole else TOLERANCE) if tolerance is None else tolerance
    if math.isclose(answer, expected, rel_tol=limit, abs_tol=0.0 if expected else limit):
        return ""
    if is_whole and abs(expected) < 100:  # a rank or a count
        return said
    if not expected:
        return f"{said}: expected 0"
    share = 100 * abs((answer - expected) / expected)
    percent = f"{share:.2g}" if share < 99.5 else f"{share:.0f}"
    return f"{name}, {_shown(answer)}, is off by {percent}%"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """Numbers and lists as Python's own."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.tolist()
        while isinstance(value, list) and len(value) == 1:
            (value,) = value
    return list(value) if isinstance(value, tuple | range) else value


def _values(things: list) -> str:
    return f"{len(things)} value{'s' * (len(things) != 1)}"


def _shown(answer: Any) -> str:
    if isinstance(answer, float):
        answer = float(f"{answer:.6g}")
    text = " ".join(repr(answer).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"


def _told(error: BaseException) -> str:
    """The launcher's whole message, which says where the ranks are; else the first line."""
    if isinstance(error, LaunchError):
        return str(error)
    first = str(error).strip().partition("\n")[0]
    is_ours = isinstance(error, AssertionError) and first  # of the exercise itself
    return first if is_ours else f"{type(error).__name__}: {first}".removesuffix(": ")


def _is_blank(answer: Any) -> bool:
    if isinstance(answer, list | tuple) and answer:
        return all(map(_is_blank, answer))
    return answer is None or answer is ...
