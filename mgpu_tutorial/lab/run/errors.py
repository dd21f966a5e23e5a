"""Failure as a lesson: which rank, which line of the worker, and what of the others."""

import re
import signal
from dataclasses import dataclass

from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.source_lines import Place
from mgpu_tutorial.lab.record.trace import Event

KEPT = 110  # characters kept of each end of a very long message


class LaunchError(RuntimeError):
    """A launch that did not end well.

    `report` holds what the ranks said until then; `tracebacks` maps a rank that
    raised to its whole Python traceback.
    """

    def __init__(
        self, message: str, report: Report, tracebacks: dict[int, str] | None = None
    ) -> None:
        super().__init__(message)
        self.report = report
        self.tracebacks = tracebacks or {}

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message, without the frames of the launcher."""
        return [f"{type(self).__name__}: {self}"]


class RankFailed(LaunchError):
    """A rank raised, was killed, or left while others still waited for it."""


class RanksHung(LaunchError):
    """At the timeout some ranks were still at work, or waiting."""


@dataclass
class Fate:
    """How one rank ended.

    `kind` is "returned", "raised", "refused", "died" or "stopped" (by the launcher,
    because another rank had failed or the time was up).
    """

    rank: int
    kind: str
    where: Place | None = None
    type: str = ""
    message: str = ""
    lost_peer: bool = False
    exitcode: int | None = None
    last_words: str = ""
    traceback: str = ""

    @property
    def is_cause(self) -> bool:
        """False where the rank only suffers from what another did."""
        return self.kind in ("raised", "refused", "died") and not self.lost_peer

    def at(self) -> str:
        """The place and its text, or a word that nobody knows it."""
        if self.where is None:
            return "an unknown line"
        return f"{self.where}  {self.where.text}".rstrip()

    def what(self) -> str:
        """What happened to a rank that is a cause, as the rest of a sentence."""
        if self.kind == "raised":
            first = self.message.strip().splitlines()[0] if self.message.strip() else ""
            if len(first) > 2 * KEPT:  # the whole of it is in the error's tracebacks
                first = f"{first[:KEPT]} … {first[-KEPT:]}"
            colon = f": {first}" if first else ""
            return f"raised {self.type}{colon}, at {self.at()}"
        if self.exitcode is not None and self.exitcode < 0:
            how = f"was killed by {signal.Signals(-self.exitcode).name}"
        else:
            how = f"left with exit code {self.exitcode}"
        words = f"\n    its last words: {self.last_words}" if self.last_words else ""
        return f"{how}, at {self.at()}{words}"

    def line(self) -> str:
        """One line about a rank that is not the cause."""
        if self.kind == "returned":
            return f"rank {self.rank} had returned"
        return f"rank {self.rank} was at {self.at()}"


def failure(fates: list[Fate], report: Report) -> RankFailed:
    """Compose the error: causes first, then what became of the other ranks."""
    tracebacks = {fate.rank: fate.traceback for fate in fates if fate.traceback}
    causes = [fate for fate in fates if fate.is_cause]
    refused = [fate for fate in causes if fate.kind == "refused"]
    if refused:
        return RankFailed(refused[0].message, report, tracebacks)
    if causes:
        lines = _headlines(causes)
    else:
        gone = [fate.rank for fate in fates if fate.kind == "returned"]
        left = [fate.rank for fate in fates if fate.kind != "returned"]
        lines = [f"{_ranks(gone)} returned while {_ranks(left)} still waited for an answer"]
    lines += [f"  {fate.line()}" for fate in fates if fate not in causes]
    return RankFailed("\n".join(lines), report, tracebacks)


def _headlines(causes: list[Fate]) -> list[str]:
    """One line for each different thing that happened, however many ranks it hit."""
    same: dict[str, list[int]] = {}
    for fate in causes:
        same.setdefault(fate.what(), []).append(fate.rank)
    return [f"{_ranks(ranks)} {what}" for what, ranks in same.items()]


def hang(fates: list[Fate], timeout: float, report: Report) -> RanksHung:
    """Compose the error: where each rank waits, and for whom when the trace can tell."""
    stuck = [fate for fate in fates if fate.kind == "stopped"]
    lines = [f"{len(stuck)} of {len(fates)} ranks had not returned after {timeout:g} s"]
    lines += [f"  {fate.line()}" for fate in fates]
    waits = {event.rank: event for event in report.events if _pending(event)}
    lines += [f"  rank {rank} waits {_whom(waits[rank])}" for rank in sorted(waits)]
    circle = _circle({rank: event.peer for rank, event in waits.items()})
    if circle:
        lines.append(f"  deadlock: {' → '.join(map(str, circle))}")
    return RanksHung("\n".join(lines), report)


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _pending(event: Event) -> bool:
    return event.end is None and event.kind in ("p2p", "collective")


def _whom(event: Event) -> str:
    if event.kind == "collective":
        return f"in {event.op} for all of its group {list(event.group)}"
    whom = "anybody" if event.peer is None else f"rank {event.peer}"
    return f"in {event.op} for {whom}"


def _circle(waits: dict[int, int | None]) -> list[int]:
    """A closed chain of ranks that wait for each other, or nothing."""
    for start in sorted(waits):
        chain = [start]
        while (peer := waits.get(chain[-1])) is not None:
            if peer == start:
                return [*chain, start]
            if peer in chain:
                break
            chain.append(peer)
    return []


def last_words(stderr: str) -> str:
    """The message of a C++ exception that ended a rank, without its place in the build."""
    found = re.search(r"what\(\):\s*(.*)", stderr)
    return re.sub(r"\S*?(\w+\.\w+):\d+", r"\1", found.group(1)).strip() if found else ""
