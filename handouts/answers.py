"""Which pieces of a notebook answer a prediction: what the code shows, and why.

After a prediction come the cells that are run, up to the next text. What they show is the
answer, and so is the first paragraph of the text under them, with its lists. Where that only
leads to more cells (it ends with a colon), what they show and its explanation belong to it
too. The students' book moves both to the end of the chapter, a web page and a student's
notebook fold them.
"""

import re
from dataclasses import dataclass, field
from itertools import groupby

from handouts.notebook import Piece

SHOWN = ("text", "error", "html", "image")
LISTED = re.compile(r"[-*+] |\d+[.)] |\|")
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*$\[\d\"“(])")
GOES_ON = re.compile(r"\*\*Change|\*\*\d+\.\*\*")


@dataclass
class Answer:
    """A prediction, by the index of its piece, and the indices of what answers it."""

    question: int
    shown: list[int] = field(default_factory=list)
    said: list[int] = field(default_factory=list)

    @property
    def pieces(self) -> list[int]:
        return sorted([*self.shown, *self.said])

    @property
    def room(self) -> int:
        """The first results end here: behind them the students' book has its room."""
        before = self.said[0] if self.said else self.shown[-1] + 1
        return max(i for i in self.shown if i < before)


def answers(pieces: list[Piece]) -> list[Answer]:
    """Every prediction that a result answers, in reading order."""
    cells = [
        list(group) for _, group in groupby(range(len(pieces)), lambda i: pieces[i].cell)
    ]
    found = []
    for number, cell in enumerate(cells):
        if pieces[cell[-1]].kind == "predict":
            answer = _answer(pieces, cell[-1], cells[number + 1 :])
            if answer.shown:
                found.append(answer)
    return found


def _answer(pieces: list[Piece], question: int, following: list[list[int]]) -> Answer:
    answer = Answer(question)
    for cell in following:
        if pieces[cell[0]].kind == "code":
            answer.shown += [i for i in cell if pieces[i].kind in SHOWN]
            continue
        if answer.shown:
            answer.said += _explaining(pieces, cell)
        if not answer.said or answer.said[-1] != cell[-1] or not _leads(pieces[cell[-1]]):
            break
    return answer


def _leads(piece: Piece) -> bool:
    return piece.text.rstrip().endswith(":")


def _explaining(pieces: list[Piece], cell: list[int]) -> list[int]:
    """The first paragraph of a cell, and the lists that belong to it."""
    said: list[int] = []
    for i in cell:
        listed = bool(said) and LISTED.match(pieces[i].text)
        if pieces[i].kind != "prose" or GOES_ON.match(pieces[i].text):
            break
        if said and not listed:
            break
        said.append(i)
    return said


def without_lead(text: str) -> tuple[str, str]:
    """An answer, and apart from it a last sentence that leads to the next cell."""
    if not text.rstrip().endswith(":"):
        return text, ""
    said, last = "", 0
    for end in SENTENCE.finditer(text):
        said, last = text[: end.start()], end.end()
    return (said, text[last:]) if said else (text, "")
