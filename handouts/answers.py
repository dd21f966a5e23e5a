"""Which pieces of a notebook answer a prediction or name a finding.

After a prediction come the cells that are run, up to the next text. What they show is the
answer, and so is the first paragraph of the text under them, with its lists. Where that only
leads to more cells (it ends with a colon), what they show and its explanation belong to it
too, unless they show a listing. What a cell tagged `finding` asks for is said by the first
paragraph of the text under it. The students' book moves all this to the end of the chapter, a
web page and a student's notebook fold it.
"""

import re
from dataclasses import dataclass, field
from itertools import groupby

from handouts.notebook import Piece, elements

SHOWN = ("text", "error", "html", "image")
LISTS = ("BulletList", "OrderedList", "Table")
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*$\[\d\"“(])")
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
    said: list[int] = []
    for i in cell:
        listed = bool(said) and pieces[i].blocks[0]["t"] in LISTS
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


def lead_apart(block: dict) -> tuple[dict, dict | None]:
    """The same of a paragraph that pandoc has read."""
    if block["t"] != "Para":
        return block, None
    inlines = block["c"]
    words = [[e["c"] for e in elements(i) if e["t"] in ("Str", "Quoted")] for i in inlines]
    for i in reversed(range(1, len(inlines))):
        ends = words[i - 1] and str(words[i - 1][-1])[-1] in ".!?"
        if inlines[i]["t"] in ("Space", "SoftBreak") and ends:
            return {**block, "c": inlines[:i]}, {**block, "c": inlines[i + 1 :]}
    return block, None
