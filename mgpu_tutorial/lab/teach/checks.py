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
    name: str = "the answer",
    tolerance: float | None = None,
    by_messages: bool = False,
) -> Verdict:
    """Compare an exercise's answer with what is expected.

    `answer` may be a function without arguments, such as `lambda: launch(mine, 4)`; then it
    is called here, and what it raises is part of the verdict. Of a launch, the results are
    compared rank by rank with the list `expected`. An answer of None or `...`, alone or for
    each rank, counts as not begun, and a hint comes after a try only.

    A number is a number, whether an int, a float or a tensor of one element; a list may be a
    tuple, a range or a tensor. `tolerance` is the distance allowed, in shares of what is
    expected (of its largest number in a tensor): 1e-5, and rounding only where that is an
    int. Where 0 is expected it is the distance itself. `name` is how the verdict calls the
    answer, such as "the distance". `by_messages`: each rank of a launch, which must be
    traced, must have called an operation other than a barrier.
    """
    try:
        if isinstance(answer, Callable):
            answer = answer()
        if _is_blank(answer):
            if isinstance(answer, Report) and any(answer.stdout):
                return Verdict(NOT_YET, False, "the ranks print and return nothing", hint)
            return Verdict(NOT_YET, None, BLANK)
        wrong = _Comparison(tolerance, by_messages).of(answer, expected, name)
    except (Exception, SystemExit) as error:  # the learner's code: anything can happen
        if "ellipsis" in str(error).lower():  # the type of the `...` in a stub
            return Verdict(NOT_YET, None, BLANK)
        wrong = _told(error)
    return Verdict(NOT_YET, False, wrong, hint) if wrong else Verdict(CORRECT, True)


@functools.wraps(verdict, assigned=["__doc__"])
def check(*given: Any, **more: Any) -> None:
    from IPython.display import display

    display(verdict(*given, **more))


class _Comparison:
    """Says where an answer first differs from what is expected; nothing where it does not."""

    def __init__(self, tolerance: float | None, by_messages: bool) -> None:
        self.tolerance = tolerance
        self.by_messages = by_messages

    def of(self, answer: Any, expected: Any, name: str) -> str:
        if isinstance(answer, Report):
            whole = "the answer" if "[" in name else name
            each = f"rank {{}} of {answer.world_size}: {whole}"
            wrong = self._list(answer.results, expected, name, each)
            return wrong or (_silent(answer) if self.by_messages else "")
        expected = _plain(expected)
        if isinstance(expected, torch.Tensor):
            return self._tensor(answer, expected, name)
        answer = _plain(answer)
        if isinstance(expected, bool):
            kind, fits = "return True or False", isinstance(answer, bool)
        elif isinstance(expected, Real):
            fits = isinstance(answer, Real) and not isinstance(answer, bool)
            several = isinstance(answer, torch.Tensor)
            kind = "return a number" + (", with .item() of one element" if several else "")
        elif isinstance(expected, list | tuple | range):
            return self._list(answer, expected, name, name.replace("the ", "") + "[{}]")
        else:
            kind = f"expected a {type(expected).__name__}"
            fits = isinstance(answer, type(expected))
        if not fits:
            return f"{name} is {_shown(answer)}: {kind}"
        if isinstance(expected, Real) and not isinstance(expected, bool):
            return self._number(answer, expected, name)
        return "" if answer == expected else f"{name} is {_shown(answer)}"

    def _allowed(self, expected: Any) -> float:
        default = EXACT if isinstance(expected, int) else TOLERANCE
        return default if self.tolerance is None else self.tolerance

    def _number(self, answer: Real, expected: Real, name: str) -> str:
        if answer == expected or (math.isnan(answer) and math.isnan(expected)):
            return ""
        allowed, distance = self._allowed(expected), abs(answer - expected)
        if distance <= allowed * (abs(expected) or 1) and math.isfinite(expected):
            return ""
        if isinstance(expected, int) and abs(expected) < 100:  # a rank or a count
            return f"{name} is {_shown(answer)}"
        return f"{name} is {_shown(answer)}{_off(distance, abs(expected))}"

    def _list(self, answer: Any, expected: Any, name: str, each: str) -> str:
        answer = answer.tolist() if isinstance(answer, torch.Tensor) else answer
        if not isinstance(answer, list | tuple | range):
            return f"{name} is {_shown(answer)}: return a list of {_values(len(expected))}"
        if len(answer) != len(expected):
            found = f"{_values(len(answer))}, expected {len(expected)}"
            return f"{name} is {_shown(answer)}: {found}"
        pairs = enumerate(zip(answer, expected, strict=True))
        found = (self.of(a, e, each.format(i)) for i, (a, e) in pairs)
        return next((text for text in found if text), "")

    def _tensor(self, answer: Any, expected: torch.Tensor, name: str) -> str:
        shape = list(expected.shape)
        if not isinstance(answer, torch.Tensor | np.ndarray | list | tuple):
            return f"{name} is {_shown(answer)}: return a tensor of shape {shape}"
        found, right = (
            torch.as_tensor(t).detach().cpu().double() for t in (answer, expected)
        )
        if found.shape != right.shape:
            return f"{name} has shape {list(found.shape)}: expected {shape}"
        largest = right.abs().max().item() if right.numel() else 0.0
        allowed = self._allowed(0.0) * (largest or 1)
        if torch.allclose(found, right, rtol=0, atol=allowed, equal_nan=True):
            return ""
        if found.isnan().any() and not right.isnan().any():
            return f"{name} holds nan, which is not a number"
        distance = (found - right).abs().max().item()
        off = _off(distance, largest)
        of = " of its largest number" if off.endswith("%") else ""
        return f"{name} is a tensor of the right shape{off}{of}"


def _silent(report: Report) -> str:
    """Names the first rank that has exchanged nothing with the others."""
    calls = [e for e in report.events if e.kind in ("p2p", "collective")]
    silent = set(range(report.world_size)) - {e.rank for e in calls if e.op != "barrier"}
    return f"rank {min(silent)} is right, but has exchanged no message" if silent else ""


def _plain(value: Any) -> Any:
    """A number of numpy or in a tensor of one element as Python's; an array as a tensor."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        single = value.numel() if isinstance(value, torch.Tensor) else value.size
        return value.item() if single == 1 else torch.as_tensor(value)
    return value


def _off(distance: float, size: float) -> str:
    """How far off: in shares of what is expected where that is a size at all."""
    if not math.isfinite(distance) or not math.isfinite(size):
        return ""
    if not size:
        return f", off by {distance:.2g}"
    share = 100 * distance / size
    return f", off by {share:.2g} %" if share < 99.5 else f", off by {share:.0f} %"


def _values(number: int) -> str:
    return f"{number} value{'s' * (number != 1)}"


def _shown(answer: Any) -> str:
    if isinstance(answer, torch.Tensor):
        return f"a tensor of shape {list(answer.shape)}"
    text = " ".join(repr(answer).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"


def _told(error: BaseException) -> str:
    """The launcher's whole message, which says where the ranks are; else the first line."""
    if isinstance(error, LaunchError):
        return str(error)
    first = str(error).strip().partition("\n")[0]
    if isinstance(error, AssertionError) and first:  # of the exercise itself
        return first
    return f"{type(error).__name__}: {first}".removesuffix(": ")


def _is_blank(answer: Any) -> bool:
    if isinstance(answer, Report):
        return _is_blank(answer.results)
    if isinstance(answer, list | tuple) and answer:
        return all(_is_blank(a) for a in answer)
    return answer is None or answer is ...
