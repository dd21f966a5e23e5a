"""What stands on the slides: one idea each, chosen by rule, and by hand where a cell says so.

The rules: a heading begins a slide, and so does a prediction; it is asked together with the
code, and the answer comes on the next slide. A listing has a slide of its own. Of a paragraph
the slide shows the first sentences, and the speaker's notes have all of it. Imports and bare
assertions are left out, unless a text leads to them, and solutions are in the notes only.

A cell's metadata overrides: `slideshow.slide_type` as in Jupyter ("slide" and "subslide"
begin a slide, "-" goes on with the last one, "fragment" adds to it on the next slide, "notes"
is only said, "skip" is neither), `handout.slide` is what stands on the slide instead of the
cell's text, and `handout.note` is said as well.
"""

import ast
import re
import textwrap
from dataclasses import dataclass, field

from handouts.answers import SHOWN as ANSWERS
from handouts.editions import HINT, block, group, plain
from handouts.notebook import Notebook, Piece

WORDS = 30  # of a paragraph, on a slide
MORE_WORDS = 80  # of it, where the slide would be nearly empty
SHORT = 10  # lines of a listing that leave room for a cell
FEW = 12  # words that say nothing alone
LIST_WORDS = 180  # of a list, on a slide
COLUMNS = 76  # of a docstring, so that it does not make the code small
STRUCTURE = re.compile(r"\s*([-*+] |\d+[.)] |\||```|~~~|\$\$|<|!\[)", re.M)
SENTENCE = re.compile(r"(?:(?<=[.!?])|(?<=[.!?]\*\*))\s+(?=[A-Z`*$\[\d\"“])")
ITEM = re.compile(r"^(?=(?:[-*+] |\d+[.)] ))", re.M)
RUN_IN = re.compile(r"\*\*[^*]+[.:?]\*\* \S")  # the first words of what comes next
TASK = re.compile(r"\*\*\d+\.\*\*")
DOCSTRING = re.compile(r'"""((?:(?!""").)*?)(?:\n(?:(?!""").)*)?"""', re.S)
CHANGE = re.compile(r"(?<=\S)\s+(?=\*\*Change\b)")  # only a reader can
SPAN = re.compile(r"`[^`]*`|\$[^$]*\$|\]\([^)]*\)")


@dataclass
class Slide:
    """A slide before it is laid out: `notes` is markdown."""

    title: str
    cell: int
    kind: str = "plain"
    blocks: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    @property
    def shows_result(self) -> bool:
        """True if something that code made stands on it."""
        return any(kind in (*ANSWERS, "listing") for kind in self.kinds)


def slides(notebook: Notebook) -> list[dict]:
    """The slides of a notebook as blocks for the filter."""
    maker = _Maker(notebook)
    for i in range(len(notebook.pieces)):
        maker.add(i)
    return [_block(notebook, slide) for slide in maker.slides if slide.blocks]


def _block(notebook: Notebook, slide: Slide) -> dict:
    where = notebook.place(slide.cell)
    said = [block("prose", text, where) for text in slide.notes]
    text = "\n\n".join(slide.notes)
    blocks = [*slide.blocks, group("notes", said)] if said else slide.blocks
    return group("slide", blocks, kind=slide.kind, title=slide.title, where=where, plain=text)


class _Maker:
    """Goes through the pieces of a notebook once."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook, self.pieces = notebook, notebook.pieces
        self.slides: list[Slide] = []
        self.title = notebook.title
        self.asked: list[dict] | None = None  # the code of an open question
        self.fresh = True  # the next piece begins a slide
        self.replaced: set[int] = set()  # cells that say themselves what is on the slide

    def add(self, i: int) -> None:
        piece = self.pieces[i]
        first = i == 0 or self.pieces[i - 1].cell != piece.cell
        if piece.kind == "navigation" or piece.slide == "skip":
            return
        if first and piece.slide in ("slide", "subslide"):
            self.fresh = True
        if first and piece.slide == "fragment" and self.slides:
            self._repeat()
        if first and (note := piece.about.get("note")):
            self._later(i, note)
        if piece.slide == "notes":
            self._say(piece.text if piece.kind in ("prose", "predict") else "")
        elif piece.role == "solution":
            if piece.kind == "code":
                self._say(f"Solution:\n\n```python\n{piece.text}\n```")
        elif piece.role == "exercise" and piece.kind != "code":
            if hint := HINT.search(piece.text):
                self._say(f"Hint: {hint[1]}")
        elif piece.about.get("slide") is not None and piece.kind in ("prose", "predict"):
            self._by_hand(piece)
        else:
            getattr(self, f"_{'answer' if piece.kind in ANSWERS else piece.kind}")(piece, i)
        if self.slides and piece.slide == "-":
            self.fresh = False

    def _later(self, i: int, note: str) -> None:
        """A teaching note belongs to the slide of its cell, which may only come now."""
        if self.pieces[i].kind in ("heading", "predict") or self.fresh or not self.slides:
            self.waiting = note
        else:
            self._say(f"*For the instructor.* {note}")

    waiting = ""

    def _new(self, piece: Piece, kind: str = "plain") -> Slide:
        self.slides.append(Slide(self.title, piece.cell, kind))
        self.fresh = False
        if self.waiting:
            self._say(f"*For the instructor.* {self.waiting}")
            self.waiting = ""
        return self.slides[-1]

    def _repeat(self) -> None:
        last = self.slides[-1]
        copy = Slide(last.title, last.cell, last.kind, [*last.blocks], [], [*last.kinds])
        self.slides.append(copy)
        self.fresh = False

    def _say(self, text: str) -> None:
        if text and self.slides:
            self.slides[-1].notes.append(text)

    def _show(self, piece: Piece, made: dict | None = None) -> None:
        slide = self._new(piece) if self.fresh else self.slides[-1]
        if piece.kind == "code":
            made = block("code", tight(piece.text), self._where(piece))
        slide.blocks.append(made or plain(piece, self._where(piece)))
        slide.kinds.append(piece.kind)

    def _where(self, piece: Piece) -> str:
        return self.notebook.place(piece.cell)

    def _heading(self, piece: Piece, i: int) -> None:
        self.asked = None
        if piece.text == "Next" and self.slides:  # the last slide says it too
            self.slides[-1].blocks.append(block("prose", "**Next**", self._where(piece)))
            return
        self.title, self.fresh = piece.text, True
        if piece.level == 1:
            self._new(piece, "title")

    def _by_hand(self, piece: Piece) -> None:
        """The cell says what is on the slide; its whole text is said."""
        self._say_on_show(piece, piece.about["slide"], piece.cell not in self.replaced)
        self.replaced.add(piece.cell)

    def _say_on_show(self, piece: Piece, text: str, shown: bool) -> None:
        if shown and text:
            if self.slides and self.slides[-1].shows_result and piece.kind == "predict":
                self.fresh = True
            self._show(piece, block(piece.kind, text, self._where(piece)))
        self._say(piece.text)

    def _prose(self, piece: Piece, i: int) -> None:
        if piece.text.startswith("**Change"):  # for whoever sits at the notebook
            self._say(piece.text)
            return
        leads = piece.text.rstrip().endswith(":") or self._explained(i) or self._lists(i)
        leads = leads or self._begins_something(i)
        if self.slides and self.slides[-1].kind != "title" and leads and self._busy():
            self.fresh = True
        if TASK.match(piece.text) and self.slides[-1].blocks:
            self.fresh = True  # an exercise
        if not self.fresh and self.slides[-1].kind == "title" and "**" not in piece.text:
            self.fresh = True
        text = piece.text if self._asks(i) or self._sets_a_task(i) else brief(piece.text)
        longer = brief(piece.text, MORE_WORDS)
        more = {"more": longer} if longer != text else {}
        self._show(piece, block("prose", text, self._where(piece), **more))
        if brief(piece.text) != piece.text:
            self._say(piece.text)

    def _asks(self, i: int) -> bool:
        """True if the next words of this cell are a prediction, which may need all of it."""
        after = self.pieces[i + 1 : i + 2]
        return (
            bool(after)
            and after[0].kind == "predict"
            and after[0].cell == self.pieces[i].cell
        )

    def _sets_a_task(self, i: int) -> bool:
        """True for the text of an exercise, of which every sentence may be needed."""
        cell = [piece for piece in self.pieces[: i + 1] if piece.cell == self.pieces[i].cell]
        return any(TASK.match(piece.text) for piece in cell)

    def _explained(self, i: int) -> bool:
        """True if an earlier paragraph of this cell has explained the result already."""
        return i > 0 and self.pieces[i - 1].cell == self.pieces[i].cell

    def _begins_something(self, i: int) -> bool:
        """True if its first words are the title of the code that follows."""
        following = self.pieces[i + 1 : i + 2]
        return bool(
            RUN_IN.match(self.pieces[i].text) and following and following[0].kind == "code"
        )

    def _lists(self, i: int) -> bool:
        """True if it leads from one listing to the next."""
        following = [piece.kind for piece in self.pieces[i + 1 : i + 3]]
        return following == ["code", "listing"] and self.slides[-1].kinds[-1:] == ["listing"]

    def _busy(self) -> bool:
        return not self.fresh and self.slides[-1].shows_result

    def _predict(self, piece: Piece, i: int) -> None:
        if not self.fresh and set(self.slides[-1].kinds) - {"prose"}:
            self.fresh = True
        self._show(piece, block("predict", piece.text, self._where(piece)))
        self.asked = []

    def _code(self, piece: Piece, i: int) -> None:
        silent = i + 1 == len(self.pieces) or self.pieces[i + 1].kind not in (
            *ANSWERS,
            "listing",
        )
        if not silent and self.pieces[i + 1].kind == "listing":
            return  # the listing says it all
        led_to = i > 0 and self.pieces[i - 1].text.rstrip().endswith(":")
        first = not self.slides or self.slides[-1].kind == "title"
        if silent and not piece.role and (first or is_plumbing(piece.text) and not led_to):
            return
        asked = self.asked is not None
        if self._busy() and not (asked and self.slides[-1].kinds == ["listing"]):
            self.fresh = True
        self._show(piece)
        if asked:
            self.asked.append(block("again", tight(piece.text), self._where(piece)))

    def _listing(self, piece: Piece, i: int) -> None:
        if not self.fresh and set(self.slides[-1].kinds) - {"prose"}:
            self.fresh = True
        text = DOCSTRING.sub(lambda doc: f'"""{doc[1]}"""', piece.text)
        text = "\n".join(map(narrow, text.split("\n")))
        self._show(piece, block("listing", tight(text), self._where(piece)))
        if self.asked is not None:
            self.fresh = piece.text.count("\n") > SHORT  # else the cell stands with it

    def _answer(self, piece: Piece, i: int) -> None:
        if self.asked is not None and piece.kind in ANSWERS:
            slide = self._new(piece)
            slide.blocks += self.asked
            slide.kinds += ["code"] * len(self.asked)
            self.asked = None
        elif self._busy() and piece.kind in ("image", "html"):
            self.fresh = True
        self._show(piece)


def tight(source: str) -> str:
    """Code with one empty line where it has two."""
    return source.replace("\n\n\n", "\n\n")


def narrow(line: str) -> str:
    """A docstring of one line on several, where it is long."""
    said = line.lstrip()
    if not said.startswith('"""') or len(line) <= COLUMNS:
        return line
    indent = line[: len(line) - len(said)]
    return "\n".join(
        textwrap.wrap(said, COLUMNS, initial_indent=indent, subsequent_indent=indent)
    )


def brief(text: str, words: int = WORDS) -> str:
    """The first sentences of a paragraph; tables, formulas and short ones whole.

    A list stays whole too, unless it is a page of text: then each item begins only.
    """
    text = CHANGE.split(text)[0]
    if ITEM.match(text) and len(text.split()) > LIST_WORDS and "```" not in text:
        return "\n".join(_beginning(item) for item in ITEM.split(text) if item.strip())
    if STRUCTURE.match(text) or len(text.split()) <= words or "$$" in text:
        return text
    held: list[str] = []

    def hold(found: re.Match) -> str:
        held.append(found[0])
        return f"\x00{len(held) - 1}\x01"

    sentences = SENTENCE.split(SPAN.sub(hold, " ".join(text.split("\n"))))
    kept = [sentences[0]]
    for sentence in sentences[1:]:
        said = " ".join(kept)
        enough = len(said.split()) > FEW and said.count("(") <= said.count(")")
        if enough and len(" ".join([*kept, sentence]).split()) > words:
            break
        kept.append(sentence)
    return re.sub(r"\x00(\d+)\x01", lambda found: held[int(found[1])], " ".join(kept))


def _beginning(item: str) -> str:
    """An item of a long list with its first words only: the bold ones, if it begins so."""
    mark, said = item.split(" ", 1)
    if lead := re.match(r"\*\*[^*]+[.!?]\*\*", said):
        return f"{mark} {lead[0]}"
    return f"{mark} {brief(said.strip())}"


def is_plumbing(source: str) -> bool:
    """True for a cell that only imports, asserts, deletes or opens a worker for editing."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return False
    return all(
        isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.Delete)
        or ast.unparse(node).startswith("edit(")
        for node in body
    )
