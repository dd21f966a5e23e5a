"""Exercise checks: say what is still wrong in fixed words, and never raise."""

import functools
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

    `answer` may be a function without arguments, such as `lambda: launch(mine, 4)`; it is
    called here, and what it raises is part of the verdict. Of a launch, the results are
    compared rank by rank with the list `expected`. An answer of None or `...`, alone or for
    each rank, counts as not begun, and a hint comes after a try only.

    A number may be an int, a float or a tensor of one element, a list a tuple, a range or a
    tensor. `tolerance` is the distance allowed, in shares of what is expected (of its largest
    number in a tensor): 1e-5, and rounding only where that is an int. Where 0 is expected it
    is the distance itself. `name` is how the verdict calls the answer: "the distance".
    """
    try:
        if isinstance(answer, Callable):
            answer = answer()
        if _is_blank(answer):
            if isinstance(answer, Report) and any(answer.stdout):
                return Verdict(NOT_YET, False, "the ranks print and return nothing", hint)
            return Verdict(NOT_YET, None, BLANK)
        wrong = _difference(answer, expected, name, tolerance)
    except (Exception, SystemExit) as error:  # the learner's code: anything can happen
        if "ellipsis" in str(error).lower():  # the type of the `...` in a stub
            return Verdict(NOT_YET, None, BLANK)
        wrong = _told(error)
    return Verdict(NOT_YET, False, wrong, hint) if wrong else Verdict(CORRECT, True)


@functools.wraps(verdict, assigned=["__doc__"])
def check(*given: Any, **more: Any) -> None:
    from IPython.display import display

    display(verdict(*given, **more))


def _difference(answer: Any, expected: Any, name: str, tolerance: float | None) -> str:
    """Where the answer first differs from what is expected; nothing where it does not."""
    if isinstance(answer, Report) or isinstance(expected, list | tuple | range):
        return _difference_of_lists(answer, expected, name, tolerance)
    answer, expected = _plain(answer), _plain(expected)
    said = f"{name}, {_shown(answer)},"
    if isinstance(expected, torch.Tensor):
        answer, said = torch.as_tensor(answer), f"{name}, a tensor of the right shape,"
        if answer.shape != expected.shape:
            return f"{name} has shape {list(answer.shape)}: expected {list(expected.shape)}"
    elif not _is_number(expected):
        if not isinstance(answer, type(expected)):
            return f"{said} is not right: return a {type(expected).__name__}"
        return "" if answer == expected else f"{said} is not right"
    elif not _is_number(answer):
        return f"{said} is not right: return a number"
    return _unless_near(said, answer, expected, tolerance)


def _difference_of_lists(answer: Any, expected: Any, name: str, *tolerance: Any) -> str:
    each, said = name + "[{}]", f"{name}, {_shown(answer)}, is not right"
    if isinstance(answer, Report):
        whole = "its answer" if name.startswith("your answer") else name
        each, answer = f"rank {{}} of {answer.world_size}: {whole}", answer.results
    elif isinstance(answer, torch.Tensor | np.ndarray):
        answer = answer.tolist()
    if not isinstance(answer, list | tuple | range):
        return f"{said}: return a list of {_values(expected)}"
    if len(answer) != len(expected):
        return f"{said}: {_values(answer)}, expected {len(expected)}"
    pairs = enumerate(zip(answer, expected, strict=True))
    found = (_difference(a, e, each.format(i), *tolerance) for i, (a, e) in pairs)
    return next((text for text in found if text), "")


def _unless_near(said: str, answer: Any, expected: Any, tolerance: float | None) -> str:
    """What is said of numbers, and how far off they are; nothing where they are near."""
    is_whole = isinstance(expected, int)
    if tolerance is None:
        tolerance = EXACT if is_whole else TOLERANCE
    both = (answer, expected)
    found, right = (torch.as_tensor(n, dtype=torch.float64).detach().cpu() for n in both)
    size = max(right.nan_to_num().abs().flatten().tolist(), default=0)
    if torch.allclose(found, right, rtol=0, atol=tolerance * (size or 1), equal_nan=True):
        return ""
    if is_whole and size < 100:  # a rank or a count
        return f"{said} is not right"
    if not size:
        return f"{said} is not right: expected 0"
    share = 100 * (found - right).abs().max().item() / size
    percent = f"{share:.2g}" if share < 99.5 else f"{share:.0f}"
    of = " of its largest number" if right.dim() else ""
    return f"{said} is off by {percent} %{of}"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """A number of numpy or in a tensor of one element as Python's; an array as a tensor."""
    if isinstance(value, np.ndarray | np.generic):
        value = torch.as_tensor(value) if value.size > 1 else value.item()
    is_single = isinstance(value, torch.Tensor) and value.numel() == 1
    return value.item() if is_single else value


def _values(things: Any) -> str:
    return f"{len(things)} value{'s' * (len(things) != 1)}"


def _shown(answer: Any) -> str:
    if isinstance(answer, torch.Tensor):
        return f"a tensor of shape {list(answer.shape)}"
    if isinstance(answer, float):
        answer = float(f"{answer:.6g}")
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
        return all(map(_is_blank, answer))
    return answer is None or answer is ...
