"""What stands on paper and on a web page: the pieces of a notebook, in an edition.

An edition is a list of pandoc blocks, made here and turned into Typst or HTML by filter.lua.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from handouts.answers import Answer, answers, without_lead
from handouts.notebook import Notebook, Piece

STUDENT, INSTRUCTOR, HTML, EPUB = "student", "instructor", "html", "epub"
HINT = re.compile(r"^hint: (.*)", re.M | re.S)
FOLD = re.compile(
    r"<details><summary>(\d+\.) (.*?)</summary><p[^>]*>(.*?)</p></details>", re.S
)


def block(kind: str, text: str, where: str, /, **attributes: object) -> dict:
    """One piece for the filter: a code block whose class says what it is."""
    pairs = [[key, str(value)] for key, value in attributes.items()]
    return {"t": "CodeBlock", "c": [["", [kind], [["where", where], *pairs]], text]}


def group(kind: str, blocks: list[dict], /, **attributes: object) -> dict:
    """Several pieces that belong together: a solution, a slide, the notes of one."""
    pairs = [[key, str(value)] for key, value in attributes.items()]
    return {"t": "Div", "c": [["", [kind], pairs], blocks]}


def plain(piece: Piece, where: str, number: str = "") -> dict:
    """A piece as it is, in every edition."""
    more = {}
    if piece.kind == "heading":
        more = {"level": piece.level, "number": number if piece.level == 1 else ""}
    elif piece.kind == "html":
        more = {"caption": piece.about.get("caption", "")}
    elif piece.kind == "image":
        more = {"alt": piece.alt, "caption": piece.caption, "width": piece.width}
    return block(piece.kind, piece.text, where, **more)


def edition(notebook: Notebook, name: str) -> list[dict]:
    """The blocks of one edition of a notebook."""
    return list(_Edition(notebook, name).blocks())


class _Edition:
    """Goes through the pieces; remembers the answers to predictions and an open solution."""

    def __init__(self, notebook: Notebook, name: str) -> None:
        self.notebook, self.name = notebook, name
        self.times = minutes(notebook) if name == INSTRUCTOR else {}
        self.answers = [] if name == INSTRUCTOR else answers(notebook.pieces)
        self.open: list[dict] = []  # the pieces of an answer so far
        self.kept: list[dict] = []  # answers that come at the end
        self.unfolded: list[Piece] = []  # and what was folded in an output

    def blocks(self) -> Iterator[dict]:
        solution: list[dict] = []
        held = {i: answer for answer in self.answers for i in self._held(answer)}
        for i, piece in enumerate(self.notebook.pieces):
            if i in held:
                yield from self._answer(held[i], i)
                continue
            if solution and piece.role != "solution":
                yield group("solution", solution)
                solution = []
            if piece.role != "solution":
                yield from self._block(piece, i)
            elif self.name != STUDENT:
                solution.append(plain(piece, self._where(piece)))
            note = piece.about.get("note") if self._ends_cell(i) else ""
            if note and self.name == INSTRUCTOR:
                yield block("note", note, self._where(piece))
        if solution:
            yield group("solution", solution)
        if self.kept:
            where = self._where(self.notebook.pieces[-1])
            yield block("heading", "Answers to the predictions", where, level=2)
            yield from self.kept
        for piece in self.unfolded:
            yield block("heading", "Answers to the questions", self._where(piece), level=2)
            text = FOLD.sub(r"<p>\1 \3</p>", piece.text)
            yield plain(replace(piece, text=text), self._where(piece))

    def _held(self, answer: Answer) -> Sequence[int]:
        """What stands with an answer; a web page folds the cells between its parts too."""
        parts = answer.pieces
        return range(parts[0], parts[-1] + 1) if self.name == HTML else parts

    def _answer(self, answer: Answer, i: int) -> Iterator[dict]:
        """What answers a prediction: folded on a web page. A book shows it at the end of the
        chapter, and the students' has room for the prediction here."""
        piece = self.notebook.pieces[i]
        last, lead = i == answer.pieces[-1], ""
        if last and i in answer.said:
            text, lead = without_lead(piece.text)
            piece = replace(piece, text=text)
        if i in answer.pieces:
            self.open.append(plain(piece, self._where(piece)))
        else:
            self.open += self._block(piece, i)
        number = self.answers.index(answer) + 1
        label = {"id": f"{self.notebook.id}--answer-{number}", "number": number}
        if self.name != HTML and i == answer.room:
            yield block("room", "", self._where(piece), **label)
        if last and self.name == HTML:
            yield group("answer", self.open)
        elif last:
            self.kept += [block("answers", "", self._where(piece), **label), *self.open]
        if last:
            self.open = []
        if lead:
            yield block("lead", lead, self._where(piece))

    def _leads(self, piece: Piece, i: int) -> bool:
        """True for a text that stands on the page of the code after it."""
        following = self.notebook.pieces[i + 1 : i + 2]
        if piece.kind != "prose" or not following or following[0].kind != "code":
            return False
        return following[0].role == "exercise" or piece.text.endswith(":")

    def _ends_cell(self, i: int) -> bool:
        following = self.notebook.pieces[i + 1 : i + 2]
        return not following or following[0].cell != self.notebook.pieces[i].cell

    def _where(self, piece: Piece) -> str:
        return self.notebook.place(piece.cell)

    def _raw(self, piece: Piece, text: str) -> dict:
        return block("raw", text, self._where(piece))

    def _block(self, piece: Piece, i: int) -> Iterator[dict]:
        where = self._where(piece)
        if piece.kind == "navigation" or (self.name == HTML and piece.level == 1):
            return  # a web page has both in its template
        if piece.role == "exercise" and piece.kind == "text":
            yield from self._stub(piece)
            return
        if piece.kind == "code":
            apart = "yes" if self._ends_cell(i) else ""
            yield block("code", piece.text, where, apart=apart)
        elif self._leads(piece, i):
            yield block("lead", piece.text, where)
        elif self.name == STUDENT and piece.kind == "html" and FOLD.search(piece.text):
            self.unfolded.append(piece)
            yield plain(
                replace(piece, text=FOLD.sub(r"<p>\1 \2 …………</p>", piece.text)), where
            )
        else:
            yield plain(piece, where, self.notebook.number)
        if piece.kind == "heading" and self.name not in (HTML, EPUB):
            yield from self._timing(piece, i)

    def _stub(self, piece: Piece) -> Iterator[dict]:
        """The "not yet" of an exercise is of use to nobody on paper, its hint is."""
        if self.name == STUDENT:
            yield self._raw(piece, "#space()")
        if hint := HINT.search(piece.text):
            text = " ".join(hint[1].split("\n"))
            upright = self.name in (INSTRUCTOR, EPUB)
            text, kind = (f"*Hint:* {text}", "prose") if upright else (text, "hint")
            yield block(kind, text, self._where(piece))

    def _timing(self, piece: Piece, i: int) -> Iterator[dict]:
        if piece.level == 1 and self.notebook.number:
            yield self._raw(piece, "#sections()")
        if piece.level == 1 and self.times:
            rows = ", ".join(
                f"({typst_string(self.notebook.pieces[at].text)}, {time}, {asked})"
                for at, (time, asked) in self.times.items()
            )
            yield self._raw(piece, f"#plan(({rows},), {self.notebook.minutes})")
        elif self.times.get(i, (0, 0))[0]:
            yield self._raw(piece, f"#minutes({self.times[i][0]})")


def typst_string(text: str) -> str:
    """A text as a string of the Typst language."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def minutes(notebook: Notebook) -> dict[int, tuple[int, int]]:
    """For each section (by the index of its heading) its minutes and its predictions.

    The minutes that the head of the notebook names, shared out by words to read, cells to
    run, questions to think about and exercises; "minutes" in a heading's cell overrides.
    """
    pieces = list(enumerate(notebook.pieces))
    starts = [i for i, p in pieces if p.kind == "heading" and p.level == 2]
    if not starts or not notebook.minutes:
        return {}
    weights, fixed, asked = {}, {}, {}
    for start, end in zip(starts, [*starts[1:], len(notebook.pieces)], strict=True):
        inside = notebook.pieces[start:end]
        weights[start] = sum(map(_weight, inside)) or 0.1
        asked[start] = sum(piece.kind == "predict" for piece in inside)
        if set_by_hand := inside[0].about.get("minutes"):
            fixed[start] = int(set_by_hand)
    left = max(notebook.minutes - sum(fixed.values()), 0)
    free = {start: w for start, w in weights.items() if start not in fixed}
    exact = {start: left * w / sum(free.values()) for start, w in free.items()}
    shared = {start: int(value) for start, value in exact.items()}
    by_remainder = sorted(exact, key=lambda start: shared[start] - exact[start])
    for start in by_remainder[: left - sum(shared.values())]:
        shared[start] += 1
    return {start: (fixed.get(start, shared.get(start, 0)), asked[start]) for start in starts}


def _weight(piece: Piece) -> float:
    """About the minutes that one piece takes in a lecture."""
    if piece.role == "solution":
        return 0
    if piece.role == "exercise":
        return 5 if piece.kind == "code" else 0
    read = len(piece.text.split()) / 130
    times = {"predict": read + 1, "prose": read, "code": 0.3, "listing": 0.8}
    return times.get(piece.kind, 0.2)
