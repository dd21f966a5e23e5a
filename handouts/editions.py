"""What stands on paper and on a web page: the pieces of a notebook, in an edition.

An edition is a list of pandoc blocks, in the form of Typst or of a screen: forms.py.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from handouts import forms
from handouts.answers import Answer, answers, lead_apart, leads
from handouts.convert import Unprintable
from handouts.forms import HTML, INSTRUCTOR, STUDENT, Book
from handouts.notebook import Notebook, Piece, elements, place, slug, stringify

STRIP = 8  # drawings of a film in a book


def edition(notebook: Notebook, name: str, book: Book | None = None) -> list[dict]:
    """One edition of a notebook. Unprintable has a line for each link that leads nowhere."""
    made = _Edition(notebook, name, book or Book(notebook.path.parent.parent))
    blocks = list(made.blocks())
    if made.form.problems:
        raise Unprintable("\n".join(made.form.problems))
    return blocks


class _Edition:
    """Goes through the pieces; remembers the answers to predictions and an open solution."""

    def __init__(self, notebook: Notebook, name: str, book: Book) -> None:
        self.notebook, self.name = notebook, name
        self.print = name in (STUDENT, INSTRUCTOR)
        file = notebook.path.relative_to(book.root)
        form = forms.Paper if self.print else forms.Screen
        self.form = form(name, notebook.id, file, book)
        self.answers = [] if name == INSTRUCTOR else answers(notebook.pieces)
        self.open: list[dict] = []  # the pieces of an answer so far
        self.kept: list[dict] = []  # answers that come at the end
        self.after = [*notebook.pieces[1:], None]
        pieces = enumerate(notebook.pieces)
        drawn = [i for i, p in pieces if p.kind == "image" or p.kind == "html" and _steps(p)]
        self.figures = {i: number for number, i in enumerate(drawn, 1)}

    def blocks(self) -> Iterator[dict]:
        solution: list[dict] = []
        held = {i: answer for answer in self.answers for i in self._held(answer)}
        rooms = {answer.room: answer for answer in self.answers}
        for i, piece in enumerate(self.notebook.pieces):
            self.form.where = place(self.notebook.path, piece.cell)
            if solution and piece.role != "solution":
                yield from self.form.box("solution", solution)
                solution = []
            if i in held:
                yield from self._answer(held[i], i)
            elif piece.kind == "asked" and self.name == INSTRUCTOR:
                continue  # the solution's verdict says it
            elif piece.role != "solution":
                yield from self._block(piece, i)
            elif self.name != STUDENT:
                solution += self._plain(piece, i)
            if i in rooms and self.name != HTML:
                yield from self.form.asked("room", *self._label(rooms[i]))
            note = self.notebook.notes.get(piece.cell) if self._ends_cell(i) else None
            if note and self.name == INSTRUCTOR:
                yield from self.form.box("note", self.form.made(note))
        if self.kept:
            yield forms.heading(2, forms.words("Answers to the predictions"))
            yield from self.kept

    def _held(self, answer: Answer) -> Sequence[int]:
        """What stands with an answer; a web page folds the cells between its parts too."""
        parts = answer.pieces
        return range(parts[0], parts[-1] + 1) if self.name == HTML else parts

    def _label(self, answer: Answer) -> tuple[str, int]:
        number = self.answers.index(answer) + 1
        return f"{self.notebook.id}--answer-{number}", number

    def _answer(self, answer: Answer, i: int) -> Iterator[dict]:
        """What answers a prediction: folded on a web page. A book shows it at the end of the
        chapter, and the students' has room for the prediction here."""
        piece, lead = self.notebook.pieces[i], None
        if i == answer.last and i in answer.said:
            piece, lead = lead_apart(piece)
        self.open += (self._plain if i in answer.pieces else self._block)(piece, i)
        if i != answer.last:
            return
        if self.name == HTML:
            yield from self.form.box("answer", self.open)
        else:
            self.kept += [*self.form.asked("answer", *self._label(answer)), *self.open]
        self.open = []
        if lead:
            yield from self.form.box("lead", self.form.made(lead.blocks))

    def _leads(self, piece: Piece, i: int) -> bool:
        """True for a text that stands on the page of the code after it."""
        after = self.after[i]
        if piece.kind != "prose" or not after or after.kind != "code":
            return False
        return after.role == "exercise" or leads(piece)

    def _ends_cell(self, i: int) -> bool:
        return not self.after[i] or self.after[i].cell != self.notebook.pieces[i].cell

    def _plain(self, piece: Piece, i: int) -> list[dict]:
        """A piece as it is, in every edition."""
        form = self.form
        if piece.kind in ("code", "text", "error"):
            return form.code(piece.kind, piece.text, self._ends_cell(i))
        if piece.kind == "image":
            caption = self._numbered(piece.caption, i)
            return form.made([forms.figure(piece.text, piece.alt, caption, piece.width)])
        if piece.kind == "html" and i in self.figures:
            return self._film(piece, i)
        blocks = [self._heading(piece)] if piece.kind == "heading" else piece.blocks
        kind = "rich" if piece.kind == "html" else piece.kind
        made = form.box(kind, form.made(blocks)) if blocks else []
        room = [forms.raw("#space[]")] * (kind == "hint" and self.name == STUDENT)
        return room + made

    def _film(self, piece: Piece, i: int) -> list[dict]:
        steps = _steps(piece)
        said = f"Step by step, in {len(steps)} drawings."
        if piece.text.startswith('<div class="explore"'):
            said = "At other settings. On the web page sliders move it."
        caption = piece.about.get("caption", said)
        if self.name != HTML and len(steps) > STRIP + 1:
            first, *_, last = (forms.parts_of(step)[2] for step in steps)
            caption += f" (Here are {STRIP} of {len(steps)}, from {first} to {last}.)"
            steps = _that_matter(steps)
        return self.form.film(steps, piece.blocks, self._numbered(caption, i))

    def _heading(self, piece: Piece) -> dict:
        _, _, inlines = piece.blocks[0]["c"]
        name = slug(piece.text)
        if self.name != HTML:
            name = self.notebook.id + (f"--{name}" if piece.level > 1 else "")
        if piece.level == 1 and self.notebook.number:
            inlines = [*forms.words(self.notebook.number), {"t": "Space"}, *inlines]
        return forms.heading(piece.level, inlines, name)

    def _numbered(self, caption: str, i: int) -> str:
        number = self.notebook.number
        return f"Figure {int(number)}.{self.figures[i]}. {caption}" if number else caption

    def _block(self, piece: Piece, i: int) -> Iterator[dict]:
        if piece.kind == "navigation" or (self.name == HTML and piece.level == 1):
            return  # a web page has both in its template
        made = self._plain(piece, i)
        yield from self.form.box("lead", made) if self._leads(piece, i) else made
        if piece.level == 1 and self.print and self.notebook.number:
            yield forms.call("sections")
            if self.name == INSTRUCTOR:
                yield plan(self.notebook)


def _that_matter(steps: list[dict]) -> list[dict]:
    """A few frames of a film: the first, the last, and such as show an arrow."""
    moved = [step for step in steps[1:-1] if "→" in stringify(step)]
    found = [steps[0], *moved, steps[-1]] if len(moved) + 2 >= STRIP else steps
    return [found[round(n * (len(found) - 1) / (STRIP - 1))] for n in range(STRIP)]


def _steps(piece: Piece) -> list[dict]:
    """The drawings of a film."""
    return [e for e in elements(piece.blocks) if e["t"] == "Figure"]


def plan(notebook: Notebook) -> dict:
    """A row for each section: the chapter's minutes, shared out by what there is to do."""
    pieces = notebook.pieces
    starts = [i for i, p in enumerate(pieces) if p.kind == "heading" and p.level == 2]
    parts = [pieces[a:b] for a, b in pairwise([*starts, len(pieces)])]
    weights = [sum(map(_weight, part)) for part in parts]
    ends = [round(notebook.minutes * w / (sum(weights) or 1)) for w in accumulate(weights)]
    rows = []
    for part, (begin, end) in zip(parts, pairwise([0, *ends]), strict=True):
        asked = sum(piece.kind == "predict" for piece in part)
        rows.append((part[0].text, end - begin, asked))
    return forms.call("plan", rows, notebook.minutes)


def _weight(piece: Piece) -> float:
    """About the minutes that one piece takes in a lecture."""
    if piece.role in ("exercise", "solution"):
        return 5 * (piece.role == "exercise" and piece.kind == "code")
    read = len(piece.text.split()) / 130
    times = {"predict": read + 1, "prose": read, "code": 0.3, "listing": 0.8}
    return times.get(piece.kind, 0.2)
