"""What a launch brought back, and how it looks in a notebook: the same from run to run."""

import html
from dataclasses import dataclass, field

from mgpu_tutorial.lab import borrowed
from mgpu_tutorial.lab.colours import colour
from mgpu_tutorial.lab.record.trace import Event

SHOWN_LINES = 60
SHOWN_CHARACTERS = 500


@dataclass
class Report:
    """The outcome of one launch; every list is indexed by rank.

    `events` is empty without `trace=True`; `seconds` is wall time from the moment
    all ranks had joined until the last one ended, and no part of the repr.
    """

    world_size: int
    results: list = field(default_factory=list)
    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self, rank: int) -> list[str]:
        """What one rank said, line by line: output, then errors, then its result."""
        said = _cut(printed_lines(self.stdout[rank]), f"report.stdout[{rank}]")
        said += _cut(printed_lines(self.stderr[rank]), f"report.stderr[{rank}]")
        if self.results and self.results[rank] is not None:
            said += returned(self.results[rank])
        return said or ["(silent)"]

    def __repr__(self) -> str:
        width = len(str(self.world_size - 1))
        said = ((rank, line) for rank in range(self.world_size) for line in self.lines(rank))
        return "\n".join(f"rank {rank:>{width}} │ {line}" for rank, line in said)

    def _repr_html_(self) -> str:
        panels = "".join(self._panel(rank) for rank in range(self.world_size))
        style = "display:flex;flex-wrap:wrap;gap:8px;align-items:stretch"
        return f'<div style="{style}">{panels}</div>'

    def _panel(self, rank: int) -> str:
        text, tone = html.escape("\n".join(self.lines(rank))), colour(rank)
        frame = f"flex:1 1 150px;border:1px solid {tone};border-left:6px solid {tone}"
        inside = "margin:2px 0;white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere"
        return (
            f'<div style="{frame};border-radius:4px;padding:4px 10px"><b>rank {rank}</b>'
            f'<pre style="{inside};background:none;color:inherit">{text}</pre></div>'
        )


def returned(value: object) -> list[str]:
    """What a worker returned, as lines of a bearable length."""
    text = borrowed.safe_text(value, "result", repr)
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[:SHOWN_CHARACTERS]} … ({len(text):,} characters)"
    return f"returned {text}".splitlines()


def printed_lines(text: str) -> list[str]:
    """The lines as a terminal shows them: what follows a carriage return overwrites."""
    lines = text.rstrip("\n").split("\n") if text else []
    return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in lines]


def _cut(lines: list[str], whole: str) -> list[str]:
    shown = [
        line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]} …"
        for line in lines[:SHOWN_LINES]
    ]
    if (more := len(lines) - SHOWN_LINES) > 0:
        shown.append(f"… {more:,} more lines in {whole}")
    return shown
