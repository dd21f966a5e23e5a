"""Which pieces of a notebook answer a prediction or name a finding.

After a prediction come the cells that are run, up to the next text. What they show is the
answer, and so is the first paragraph of the text under them, with its lists. Where that only
leads to more cells (it ends with a colon), what they show and its explanation belong to it
too, unless they show a listing. What a cell tagged `finding` asks for is said by the first
paragraph of the text under it. The students' book moves all this to the end of the chapter, a
web page and a student's notebook fold it.
"""

import re
from dataclasses import dataclass, field, replace
from itertools import groupby, takewhile

from handouts.notebook import Piece, stringify

SHOWN = ("text", "error", "html", "image")
LISTS = ("BulletList", "OrderedList", "Table")
GOES_ON = re.compile(r"\*\*Change|\*\*\d+\.\*\*")


@dataclass
class Answer:
    """A question, by the index of its piece, and the indices of what answers it."""

    question: int
    shown: list[int] = field(default_factory=list)
    said: list[int] = field(default_factory=list)

    @property
    def pieces(self) -> list[int]:
        return sorted([*self.shown, *self.said])

    @property
    def last(self) -> int:
        return self.pieces[-1]

    @property
    def room(self) -> int:
        """The first results end here: behind them the students' book has its room."""
        before = self.said[0] if self.said else self.shown[-1] + 1
        return max((i for i in self.shown if i < before), default=self.question)


def answers(pieces: list[Piece]) -> list[Answer]:
    """Every question that something answers, in reading order."""
    cells = [
        list(group) for _, group in groupby(range(len(pieces)), lambda i: pieces[i].cell)
    ]
    found: list[Answer] = []
    for number, cell in enumerate(cells):
        answer = Answer(cell[-1])
        if pieces[cell[-1]].kind == "predict":
            answer = _answer(pieces, cell[-1], cells[number + 1 :])
        elif pieces[cell[0]].role == "finding" and not (found and cell[0] < found[-1].last):
            answer.said = _explaining(pieces, cells[number + 1])
        if answer.pieces:
            found.append(answer)
    return found


def _answer(pieces: list[Piece], question: int, following: list[list[int]]) -> Answer:
    answer = Answer(question)
    for cell in following:
        kinds = [pieces[i].kind for i in cell]
        if kinds[0] == "code":
            if answer.said and "listing" in kinds:
                break
            answer.shown += [i for i in cell if pieces[i].kind in SHOWN]
            continue
        if answer.shown:
            answer.said += _explaining(pieces, cell)
        if not answer.said or answer.said[-1] != cell[-1] or not leads(pieces[cell[-1]]):
            break
    return answer


def leads(piece: Piece) -> bool:
    """True for a text that only leads to the next cell."""
    return piece.text.rstrip().endswith(":")


def _explaining(pieces: list[Piece], cell: list[int]) -> list[int]:
    """The first paragraph of a cell, and the lists that belong to it."""

    def belongs(i: int) -> bool:
        piece = pieces[i]
        is_text = piece.kind == "prose" and not GOES_ON.match(piece.text)
        return is_text and (i == cell[0] or piece.blocks[0]["t"] in LISTS)

    return list(takewhile(belongs, cell))


def lead_apart(piece: Piece) -> tuple[Piece, Piece | None]:
    """A text without a last sentence that leads to the next cell, and that sentence."""
    inlines = piece.blocks[0]["c"] if leads(piece) and piece.blocks[0]["t"] == "Para" else []
    for i in reversed(range(1, len(inlines))):
        ends = stringify(inlines[i - 1]).endswith((".", "!", "?"))
        if inlines[i]["t"] in ("Space", "SoftBreak") and ends:
            count = len(stringify(inlines[i + 1 :]).split())
            said = piece.text.rsplit(maxsplit=count)[0]
            halves = (said, inlines[:i]), (piece.text[len(said) :].strip(), inlines[i + 1 :])
            return tuple(
                replace(piece, text=text, blocks=[{"t": "Para", "c": half}])
                for text, half in halves
            )
    return piece, None
