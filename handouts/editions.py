"""What stands on paper and on a web page: the pieces of a notebook, in an edition.

An edition is a list of pandoc blocks, each piece in a div whose class says what it is;
write.lua gives them the form of Typst or HTML.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

from handouts.answers import Answer, answers, lead_apart, leads
from handouts.notebook import Notebook, Piece, elements, place, slug, stringify

STUDENT, INSTRUCTOR, HTML, EPUB = "student", "instructor", "html", "epub"
STRIP = 6  # drawings of a film on paper


def div(kind: str, blocks: list[dict], /, **attributes: object) -> dict:
    """Blocks that are one thing: a piece, a solution, a chapter."""
    pairs = [[key, str(value)] for key, value in attributes.items()]
    return {"t": "Div", "c": [["", [kind], pairs], blocks]}


def words(text: str) -> list[dict]:
    """A text without any marks."""
    return [{"t": "Str", "c": text}]


def code(text: str, *classes: str, **attributes: str) -> dict:
    return {"t": "CodeBlock", "c": [["", [*classes], [*map(list, attributes.items())]], text]}


def raw(text: str, language: str = "typst") -> dict:
    return {"t": "RawBlock", "c": [language, text]}


def heading(level: int, inlines: list[dict], name: str = "") -> dict:
    return {"t": "Header", "c": [level, [name, [], []], inlines]}


def edition(notebook: Notebook, name: str, root: Path | None = None) -> dict:
    """One edition of a notebook."""
    file = notebook.path.relative_to(root or notebook.path.parent.parent)
    place = {"id": notebook.id, "file": file.as_posix(), "folder": file.parent.as_posix()}
    return div("chapter", list(_Edition(notebook, name).blocks()), **place)


class _Edition:
    """Goes through the pieces; remembers the answers to predictions and an open solution."""

    def __init__(self, notebook: Notebook, name: str) -> None:
        self.notebook, self.name = notebook, name
        self.print = name in (STUDENT, INSTRUCTOR)
        self.answers = [] if name == INSTRUCTOR else answers(notebook.pieces)
        self.open: list[dict] = []  # the pieces of an answer so far
        self.kept: list[dict] = []  # answers that come at the end
        self.unfolded: list[Piece] = []  # and what was folded in an output
        drawn = [i for i, piece in enumerate(notebook.pieces) if _is_figure(piece)]
        self.figures = {i: number for number, i in enumerate(drawn, 1)}

    def blocks(self) -> Iterator[dict]:
        solution: list[dict] = []
        held = {i: answer for answer in self.answers for i in self._held(answer)}
        rooms = {answer.room: answer for answer in self.answers}
        for i, piece in enumerate(self.notebook.pieces):
            if solution and piece.role != "solution":
                yield div("solution", solution)
                solution = []
            if i in held:
                yield from self._answer(held[i], i)
            elif piece.role != "solution":
                yield from self._block(piece, i)
            elif self.name != STUDENT:
                solution.append(self._plain(piece, i))
            if i in rooms and self.name != HTML:
                yield div("room", [], **self._label(rooms[i]))
            note = self.notebook.notes.get(piece.cell) if self._ends_cell(i) else None
            if note and self.name == INSTRUCTOR:
                yield div("note", note, where=self._where(piece))
        if solution:
            yield div("solution", solution)
        if self.kept:
            yield heading(2, words("Answers to the predictions"))
            yield from self.kept
        for piece in self.unfolded:
            yield heading(2, words("Answers to the questions"))
            yield div("rich", piece.blocks, where=self._where(piece))

    def _held(self, answer: Answer) -> Sequence[int]:
        """What stands with an answer; a web page folds the cells between its parts too."""
        parts = answer.pieces
        return range(parts[0], parts[-1] + 1) if self.name == HTML else parts

    def _label(self, answer: Answer) -> dict[str, object]:
        number = self.answers.index(answer) + 1
        return {"label": f"{self.notebook.id}--answer-{number}", "number": number}

    def _answer(self, answer: Answer, i: int) -> Iterator[dict]:
        """What answers a prediction: folded on a web page. A book shows it at the end of the
        chapter, and the students' has room for the prediction here."""
        piece, lead = self.notebook.pieces[i], None
        if i == answer.last and i in answer.said and leads(piece):
            block, lead = lead_apart(piece.blocks[-1])
            piece = replace(piece, blocks=[*piece.blocks[:-1], block])
        if i in answer.pieces:
            self.open.append(self._plain(piece, i))
        else:
            self.open += self._block(piece, i)
        if i != answer.last:
            return
        if self.name == HTML:
            yield div("answer", self.open)
        else:
            self.kept += [div("answers", [], **self._label(answer)), *self.open]
        self.open = []
        if lead:
            yield div("lead", [lead], where=self._where(piece))

    def _leads(self, piece: Piece, i: int) -> bool:
        """True for a text that stands on the page of the code after it."""
        following = self.notebook.pieces[i + 1 : i + 2]
        if piece.kind != "prose" or not following or following[0].kind != "code":
            return False
        return following[0].role == "exercise" or leads(piece)

    def _ends_cell(self, i: int) -> bool:
        following = self.notebook.pieces[i + 1 : i + 2]
        return not following or following[0].cell != self.notebook.pieces[i].cell

    def _where(self, piece: Piece) -> str:
        return place(self.notebook.path, piece.cell)

    def _plain(self, piece: Piece, i: int) -> dict:
        """A piece as it is, in every edition."""
        blocks, about = piece.blocks, {}
        if piece.kind == "heading":
            blocks = [self._heading(piece)]
        elif piece.kind == "code":
            apart = {"apart": "yes"} if self._ends_cell(i) else {}
            blocks = [code(piece.text, *["cell"][: self.print], "python", **apart)]
        elif piece.kind in ("text", "error"):
            blocks = [code(piece.text, "output", piece.kind)]
        elif piece.kind == "image":
            blocks = [self._figure(piece, i)]
        kind = "rich" if piece.kind == "html" else piece.kind
        if i in self.figures and piece.kind == "html":
            steps = [e for e in elements(blocks) if e["t"] == "Figure"]
            caption = piece.about.get("caption", f"Step by step, in {len(steps)} drawings.")
            if self.print and len(steps) > STRIP:
                caption += f" (Here are {STRIP} of the steps 0 to {len(steps) - 1}.)"
                steps = _that_matter(steps)
            blocks = steps if self.print else blocks
            about = {"caption": self._numbered(caption, i)}
        return div(kind, blocks, where=self._where(piece), **about)

    def _heading(self, piece: Piece) -> dict:
        _, _, inlines = piece.blocks[0]["c"]
        name = slug(piece.text)
        if self.name != HTML:
            name = self.notebook.id + (f"--{name}" if piece.level > 1 else "")
        if piece.level == 1 and self.notebook.number:
            inlines = [*words(self.notebook.number), {"t": "Space"}, *inlines]
        return heading(piece.level, inlines, name)

    def _figure(self, piece: Piece, i: int) -> dict:
        size = [["width", f"{piece.width:g}"]] if piece.width else []
        image = {"t": "Image", "c": [["", [], size], words(piece.alt), [piece.text, ""]]}
        caption = [{"t": "Plain", "c": words(self._numbered(piece.caption, i))}]
        return {
            "t": "Figure",
            "c": [["", [], []], [None, caption], [{"t": "Plain", "c": [image]}]],
        }

    def _numbered(self, caption: str, i: int) -> str:
        number = self.notebook.number
        return f"Figure {int(number)}.{self.figures[i]}. {caption}" if number else caption

    def _block(self, piece: Piece, i: int) -> Iterator[dict]:
        if piece.kind == "navigation" or (self.name == HTML and piece.level == 1):
            return  # a web page has both in its template
        made = self._plain(piece, i)
        if piece.kind == "hint":
            yield from self._hint(piece)
            return
        if self._leads(piece, i):
            made["c"][0][1] = ["lead"]
        elif (
            self.name == STUDENT
            and piece.kind == "html"
            and i not in self.figures
            and "<details" in str(piece.blocks)
        ):
            self.unfolded.append(piece)
            return
        yield made
        if piece.level == 1 and self.print and self.notebook.number:
            yield raw("#sections()")
            if self.name == INSTRUCTOR:
                yield raw(plan(self.notebook))

    def _hint(self, piece: Piece) -> Iterator[dict]:
        """The hint of an exercise, upside down for who shall not read it at once."""
        if self.name == STUDENT:
            yield raw("#space[]")
        for block in piece.blocks[:1]:
            shown, kind = block["c"], "hint"
            if self.name in (INSTRUCTOR, EPUB):
                named = {"t": "Emph", "c": words("Hint:")}
                shown, kind = [named, {"t": "Space"}, *block["c"]], "prose"
            first = {**block, "c": shown}
            yield div(kind, [first, *piece.blocks[1:]], where=self._where(piece))


def _that_matter(steps: list[dict]) -> list[dict]:
    """A few frames of a film: the first, the last, and such as show an arrow."""
    moved = [step for step in steps[1:-1] if "→" in stringify(step)]
    found = [steps[0], *moved, steps[-1]] if len(moved) + 2 >= STRIP else steps
    return [found[round(n * (len(found) - 1) / (STRIP - 1))] for n in range(STRIP)]


def _is_figure(piece: Piece) -> bool:
    steps = piece.kind == "html" and any(e["t"] == "Figure" for e in elements(piece.blocks))
    return piece.kind == "image" or steps


def typst_string(text: str) -> str:
    """A text as a string of the Typst language."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def plan(notebook: Notebook) -> str:
    """A row for each section: the chapter's minutes, shared out by what there is to do."""
    pieces = notebook.pieces
    starts = [i for i, p in enumerate(pieces) if p.kind == "heading" and p.level == 2]
    parts = [pieces[a:b] for a, b in pairwise([*starts, len(pieces)])]
    weights = [sum(map(_weight, part)) for part in parts]
    ends = [round(notebook.minutes * w / (sum(weights) or 1)) for w in accumulate(weights)]
    rows = ""
    for part, (begin, end) in zip(parts, pairwise([0, *ends]), strict=True):
        asked = sum(piece.kind == "predict" for piece in part)
        rows += f"({typst_string(part[0].text)}, {end - begin}, {asked}), "
    return f"#plan(({rows}), {notebook.minutes})"


def _weight(piece: Piece) -> float:
    """About the minutes that one piece takes in a lecture."""
    if piece.role in ("exercise", "solution"):
        return 5 * (piece.role == "exercise" and piece.kind == "code")
    read = len(piece.text.split()) / 130
    times = {"predict": read + 1, "prose": read, "code": 0.3, "listing": 0.8}
    return times.get(piece.kind, 0.2)
