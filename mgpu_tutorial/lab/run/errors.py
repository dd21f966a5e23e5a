"""Failure as a lesson: which rank, which line of the worker, and what of the others."""

import re
import signal
import textwrap
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mgpu_tutorial.lab import borrowed
from mgpu_tutorial.lab.record import source_lines
from mgpu_tutorial.lab.record.report import Report, printed_lines
from mgpu_tutorial.lab.record.source_lines import SourceLine
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.lab.run import meaning
from mgpu_tutorial.lab.words import in_a_row

KEPT = 110  # characters kept of each end of a very long line
SHOWN = (4, 2)  # lines of a long message: so many of its beginning, so many of its end
PRINTS = re.compile(r"Rank \d+ is running collective: .*?\.(?=Collectives differ)", re.DOTALL)
LOST_PEER = re.compile(
    r"gloo.*(closed by peer|reset by peer|Broken pipe|Socket (closed|Timeout)"
    r"|pair closure|Connection refused)"
    r"|remote process exited|ncclRemoteError|Connection was likely closed",
    re.IGNORECASE | re.DOTALL,
)
WIDTH = 88  # of a line of an error beside the file browser of JupyterLab
SAID = 10  # lines that an error repeats of what a rank had printed
IN_A_REAL_JOB = (  # PyTorch's own limits: `launch` lets a group wait for longer
    "in a real job, after 30 minutes: RuntimeError: Timed out waiting 1800000ms for {} "
    "operation to complete (with NCCL, after 10: its watchdog ends the process)"
)
IN_A_MEETING = (  # of rank 0, which counts who has come; and of the others without it
    "in a real job, after 30 minutes: DistStoreError: Timed out after 1801 seconds waiting "
    "for clients (after 10 with NCCL)",
    "in a real job, after 30 minutes: DistNetworkError: The client socket has timed out "
    "after 1800000ms while trying to connect to the store (after 10 with NCCL)",
)


class LaunchError(RuntimeError):
    """A launch that did not end well.

    `report` holds what the ranks said until then; `tracebacks` maps a rank that raised to
    its whole Python traceback. What the ranks had printed is a note of the error, which
    Python and a notebook show under its message.
    """

    def __init__(self, message: str, report: Report, outcomes: Sequence = ()) -> None:
        super().__init__(message)
        self.report = report
        self.tracebacks = {o.rank: o.traceback for o in outcomes if o.traceback}
        if said := _said(report):
            self.add_note(said)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message, without the frames of the launcher."""
        return _wrapped(f"{type(self).__name__}: {self}") + getattr(self, "__notes__", [])


class RankFailed(LaunchError):
    """A rank raised, was killed, or left while others still waited for it."""


class RanksHung(LaunchError):
    """At the timeout some ranks were still at work, or waiting."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or the stop button, during a launch; says where each rank was."""

    def _render_traceback_(self) -> list[str]:
        return _wrapped(f"KeyboardInterrupt: {self}")


@dataclass
class RankOutcome:
    """How one rank ended: it "returned", "raised", or "died" (without a word).

    Or the launcher ended it: "stopped", because another rank had failed or the time was up,
    or "flooded" if it had printed too much. `lost_peer` is an error that only tells of
    another rank's end; `waits_in` the function of torch.distributed where it was stopped.
    """

    rank: int
    kind: str
    where: Sequence | None = None  # a source line, maybe as the list that a file has
    type: str = ""
    message: str = ""
    traceback: str = ""
    lost_peer: bool = False
    began: float = 0.0  # the moments at which its worker began and ended
    ended: float = 0.0
    joined: bool = True
    exitcode: int = 0
    last_words: str = ""
    waits_in: str = ""

    @property
    def is_cause(self) -> bool:
        """False where the rank only suffers from what another did."""
        return self.kind in ("raised", "died", "flooded") and not self.lost_peer

    @property
    def is_stopped(self) -> bool:
        """Whether the rank was still running when the launcher looked."""
        return self.kind in ("stopped", "flooded")

    def at(self) -> str:
        if self.where is None:
            return "an unknown line" if self.joined else "no line of the worker yet"
        place = SourceLine(*self.where)
        return f"{place}  {place.text}".rstrip()

    def what(self, several: bool = False) -> str:
        """What happened to a rank that is a cause, as the rest of a sentence."""
        were, its = ("were", "their") if several else ("was", "its")
        more = [f"{its} last words: {self.last_words}"] if self.last_words else []
        if self.kind == "raised":
            first, *more = _shown(self.message) or [""]
            how = f"raised {self.type}: {first}".removesuffix(": ")
        elif self.kind == "flooded":
            how = f"printed without end and {were} stopped"
        elif self.exitcode < 0:
            how = f"{were} killed by {signal.Signals(-self.exitcode).name}"
        else:
            how = f"left with exit code {self.exitcode}"
        return "\n    ".join([f"{how}, at {self.at()}", *more])

    def line(self) -> str:
        """One line about a rank that is not the cause."""
        if self.kind == "returned":
            return f"  rank {self.rank} had returned"
        absent = "" if self.joined else " had not joined, and"
        return f"  rank {self.rank}{absent} was at {self.at()}"


def outcome_of(error: BaseException) -> dict[str, Any]:
    """How a rank ended whose worker raised `error`; written by that rank."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [SourceLine(f.filename, f.lineno or 0, f.name) for f in stack]
    said = meaning.said_by(error)
    lines = [said, *getattr(error, "__notes__", [])]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause:
        how = "because of" if cause is error.__cause__ else "while handling"
        text = borrowed.safe_text(cause, "exception")
        lines.append(f"{how} {type(cause).__name__}: {text}")
    return {
        "kind": "raised",
        "type": type(error).__name__,
        "message": "\n".join(lines),
        "where": source_lines.innermost(frames),
        "lost_peer": isinstance(error, RuntimeError) and bool(LOST_PEER.search(said)),
        "traceback": "".join(traceback.format_exception(error)),
    }


def alone(error: Exception) -> Exception:
    """The same error; a notebook shows its sentence, without the frames of the launcher."""
    error._render_traceback_ = lambda: _wrapped(f"{type(error).__name__}: {error}")
    return error


def _wrapped(message: str) -> list[str]:
    """The lines of a message, the long ones broken at spaces instead of inside of words."""
    lines: list[str] = []
    for line in message.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        style = {"subsequent_indent": indent, "break_on_hyphens": False}
        lines += textwrap.wrap(line, WIDTH, break_long_words=False, **style) or [""]
    return lines


def _shown(message: str) -> list[str]:
    """The lines of a message that say something: its beginning and its end.

    A message may hold a whole traceback of another process, or of C++, with paths and
    addresses that differ from machine to machine.
    """
    text = PRINTS.sub("… ", message.split("\nException raised from ")[0])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any("Traceback (most recent call last)" in line for line in lines):
        lines = [lines[0], lines[-1]]
    if len(lines) > sum(SHOWN):
        lines = [*lines[: SHOWN[0]], "…", *lines[-SHOWN[1] :]]
    return [
        line if len(line) <= 2 * KEPT else f"{line[:KEPT]} … {line[-KEPT:]}" for line in lines
    ]


def _said(report: Report) -> str:
    """The last lines that each rank had printed, or nothing where all were silent."""
    lines = []
    for rank, text in enumerate(report.stdout):
        printed = printed_lines(text)
        if len(printed) > SAID:
            lines.append(f"rank {rank} │ … {len(printed) - SAID:,} lines before these")
        lines += [f"rank {rank} │ {line[: 2 * KEPT]}" for line in printed[-SAID:]]
    return "\n".join(lines)


def failure(outcomes: list[RankOutcome], report: Report) -> RankFailed:
    """Compose the error: causes first, then what became of the other ranks."""
    causes = [outcome for outcome in outcomes if outcome.is_cause]
    gone = [outcome.rank for outcome in outcomes if outcome.kind == "returned"]
    if causes or not gone:  # without anybody who left, the loss of a peer is a cause
        causes = causes or [outcome for outcome in outcomes if outcome.lost_peer]
        lines = _headlines(causes)
    else:
        left = [o.rank for o in outcomes if o.lost_peer or o.waits_in]
        lines = [f"{_ranks(gone)} returned while {_ranks(left)} still waited for an answer"]
    lines += _dropped(report)
    lines += [outcome.line() for outcome in outcomes if outcome not in causes]
    return RankFailed("\n".join(lines), report, outcomes)


def _headlines(causes: list[RankOutcome]) -> list[str]:
    """A line for each different thing that happened; further lines are of its first rank."""
    same: dict[str, list[RankOutcome]] = {}
    for cause in causes:
        same.setdefault(cause.what().split("\n")[0], []).append(cause)
    return [f"{_ranks([c.rank for c in e])} {e[0].what(len(e) > 1)}" for e in same.values()]


def hang(
    outcomes: list[RankOutcome],
    timeout: float,
    report: Report,
    earlier: Sequence[Event] | None = None,
) -> RanksHung:
    """Compose the error: where each rank waits, and for whom when the trace can tell.

    `earlier` are the events of a look a moment ago: a rank that went on since isn't stuck.
    """
    each = [outcome.line() for outcome in outcomes]
    if absent := [outcome for outcome in outcomes if not outcome.joined]:
        some = f"{len(absent)} of {len(outcomes)} ranks had not joined"
        return RanksHung("\n".join([f"{some} after {report.seconds:.0f} s", *each]), report)
    stuck = [outcome for outcome in outcomes if outcome.kind == "stopped"]
    head = f"{len(stuck)} of {len(outcomes)} ranks had not returned after {timeout:g} s"
    lines = [head, *each]
    moving = _moving(report.events, earlier)
    pending = [e for e in report.events if e.end is None and e.rank not in moving]
    waits = {e.rank: e for e in pending if e.kind in ("p2p", "collective")}
    lines += [f"  rank {rank} waits {_whom(waits[rank])}" for rank in sorted(waits)]
    if dropped := _dropped(report):
        lines += dropped
    elif circle := _circle({rank: event.peer for rank, event in waits.items()}):
        lines.append(f"  deadlock: {' → '.join(map(str, circle))}")
    if meeting := [o.rank for o in stuck if o.waits_in == "init_process_group"]:
        lines.append(f"  {IN_A_MEETING[0 not in meeting]}")
    elif moving:
        sent = sum(event.sends for event in report.events)
        so_far = f"{sent:,} messages" if sent else f"{len(report.events):,} calls"
        lines.append(f"  {_ranks(moving)} went on all the time: {so_far} so far")
    elif calls := {outcome.waits_in for outcome in stuck} - {""}:
        way = "send" if calls <= {"send", "isend"} else "recv"
        lines.append(f"  {IN_A_REAL_JOB.format(way)}")
    return RanksHung("\n".join(lines), report)


def _moving(events: Sequence[Event], earlier: Sequence[Event] | None) -> list[int]:
    """The ranks that have begun something since an earlier look."""
    before = Counter(event.rank for event in (events if earlier is None else earlier))
    now = Counter(event.rank for event in events)
    return [rank for rank in sorted(now) if now[rank] > before[rank]]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {in_a_row(ranks)}"


def _whom(event: Event) -> str:
    if event.kind == "collective":
        return f"in {event.op} for all of its group {list(event.group)}"
    return f"in {event.op} for {'anybody' if event.peer is None else f'rank {event.peer}'}"


def _dropped(report: Report) -> list[str]:
    """The transfers that nobody waited for, and that another rank still waits for."""
    calls = {(event.rank, event.index): event for event in report.events}
    pending = [event for event in report.events if event.end is None]
    waiting = [e if e.of is None else calls.get((e.rank, e.of), e) for e in pending]
    missed = {(e.rank, e.peer) for e in waiting if e.kind == "p2p"}
    lost: dict[str, set[int]] = {}
    for event in report.events:
        pairs = {(event.peer, event.rank), (event.peer, None)}
        if event.dropped is not None and event.at and pairs & missed:
            place = SourceLine(*event.at)
            call = f"{event.op} at {place}  {place.text}"
            lost.setdefault(call, set()).add(event.rank)
    why = "a transfer ends with its work object, even before the other side has asked"
    return [
        f"  {_ranks(sorted(ranks))} never waited for the {call}\n    {why}"
        for call, ranks in lost.items()
    ]


def _circle(waits: dict[int, int | None]) -> list[int]:
    """A closed chain of ranks that wait for each other, or nothing."""
    for start in sorted(waits):
        chain = [start]
        while (peer := waits.get(chain[-1])) is not None and peer not in chain:
            chain.append(peer)
        if peer == start:
            return [*chain, start]
    return []


def last_words(stderr: str) -> str:
    """The message of a C++ exception that ended a rank, without its place in the build."""
    found = re.search(r"what\(\):\s*(.*)", stderr)
    text = re.sub(r"\S*?(\w+\.\w+):\d+", r"\1", found.group(1)).strip() if found else ""
    return meaning.with_lengths(text)
