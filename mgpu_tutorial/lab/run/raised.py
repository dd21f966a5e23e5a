"""What an exception of a worker says, and where it was raised; written by its rank."""

import re
import traceback
from typing import Any

from mgpu_tutorial.lab.record import source_lines
from mgpu_tutorial.lab.run.transfer import CannotTravel

LOST_PEER = re.compile(
    r"gloo.*(closed by peer|reset by peer|Broken pipe|Socket (closed|Timeout)"
    r"|pair closure|Connection refused)"
    r"|remote process exited|ncclRemoteError|Connection was likely closed",
    re.IGNORECASE | re.DOTALL,
)


class WrongSignature(TypeError):
    """The worker does not take the arguments that launch was given."""


def outcome_of(error: BaseException) -> dict[str, Any]:
    """How a rank ended whose worker raised `error`, or could not be called."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [source_lines.SourceLine(f.filename, f.lineno or 0, f.name) for f in stack]
    refused = isinstance(error, WrongSignature | CannotTravel)
    message = message_of(error)
    try:
        whole = "".join(traceback.format_exception(error))
    except BaseException:  # of a `__str__`, or too many causes
        whole = "".join(traceback.format_tb(error.__traceback__)) + message
    return {
        "kind": "refused" if refused else "raised",
        "type": type(error).__name__,
        "message": message,
        "where": None if refused else source_lines.innermost(frames),
        "lost_peer": isinstance(error, RuntimeError) and bool(LOST_PEER.search(_text(error))),
        "traceback": whole,
    }


def message_of(error: BaseException) -> str:
    """What an exception says, its notes, the members of a group and what it came from."""
    texts: list[str] = []
    seen: set[int] = set()
    left = [("", error)]  # the next one is the last
    while left:
        how, error = left.pop()
        if id(error) in seen:  # `raise e from e` is its own cause
            continue
        seen.add(id(error))
        texts.append(how + _text(error))
        if error.__cause__ is not None:
            left.append((f"because of {_name(error.__cause__)}", error.__cause__))
        elif error.__context__ is not None and not error.__suppress_context__:
            left.append((f"while handling {_name(error.__context__)}", error.__context__))
        if isinstance(error, BaseExceptionGroup):
            left += [(_name(member), member) for member in reversed(error.exceptions)]
    return "\n".join(texts)


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: "


def _text(error: BaseException) -> str:
    try:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    except BaseException as failure:
        return f"(its message cannot be shown: {type(failure).__name__})"
