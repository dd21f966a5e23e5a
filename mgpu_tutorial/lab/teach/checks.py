"""Exercise checks: say what is still wrong in fixed words, and never raise."""

from collections.abc import Callable
from typing import Any

import torch

NOT_YET, CORRECT, BLANK = "not yet", "correct", "nothing is filled in"


def check(answer: Any, expected: Any, hint: str = "") -> None:
    """Compare an exercise's answer with what is expected, and print the verdict.

    `answer` may be a function without arguments, such as `lambda: launch(mine, 4).results`;
    then it is called here, and what it raises is part of the verdict. An answer of None
    or `...`, alone or for each rank, counts as not begun.
    """
    if isinstance(answer, Callable):
        try:
            answer = answer()
        except Exception as error:  # the learner's code: anything can happen
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            blank = "ellipsis" in first.lower()
            print(f"{NOT_YET}: {BLANK}" if blank else f"{NOT_YET}: {first}{_hint(hint)}")
            return
    if _is_blank(answer):
        print(f"{NOT_YET}: {BLANK}")  # a hint comes after a try
        return
    wrong = difference(answer, expected)
    print(f"{NOT_YET}: {wrong}{_hint(hint)}" if wrong else CORRECT)


def difference(answer: Any, expected: Any, name: str = "the answer") -> str:
    """Say where `answer` first differs from `expected`, or nothing where it does not."""
    if isinstance(expected, torch.Tensor) or isinstance(answer, torch.Tensor):
        return _tensor_difference(answer, expected, name)
    if isinstance(expected, list | tuple):
        if not isinstance(answer, list | tuple) or len(answer) != len(expected):
            return f"{name} is {answer!r}, expected {len(expected)} values"
        whose = "rank" if name == "the answer" and len(expected) > 1 else name
        found = (
            difference(a, e, f"{whose} {i}" if whose == "rank" else f"{name}[{i}]")
            for i, (a, e) in enumerate(zip(answer, expected, strict=True))
        )
        return next((text for text in found if text), "")
    if isinstance(expected, float) and isinstance(answer, int | float):
        return (
            ""
            if abs(answer - expected) <= 1e-6 * max(1, abs(expected))
            else _say(name, answer)
        )
    return "" if type(answer) is type(expected) and answer == expected else _say(name, answer)


def _tensor_difference(answer: Any, expected: Any, name: str) -> str:
    try:
        torch.testing.assert_close(answer, expected, check_device=False)
    except (AssertionError, TypeError, ValueError):
        return _say(name, answer)
    return ""


def _say(name: str, answer: Any) -> str:
    return f"{name} gave {answer!r}"


def _is_blank(answer: Any) -> bool:
    if isinstance(answer, list | tuple) and answer:
        return all(_is_blank(a) for a in answer)
    return answer is None or answer is ...


def _hint(hint: str) -> str:
    return f"\nhint: {hint}" if hint else ""
