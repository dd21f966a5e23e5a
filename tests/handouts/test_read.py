"""A notebook as it is read, what answers its questions, and what a student gets."""

import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

from handouts import student
from handouts.answers import answers, without_lead
from handouts.editions import minutes
from handouts.notebook import ROOT, Unprintable, read, without_hint
from tests.handouts.conftest import LISTING, SAID, shown, write
from tools.store import normalise

PATHS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
VIEW = "application__vnd.jupyter.widget-view+json"
pytestmark = pytest.mark.slow  # pandoc


def pieces(path):
    return read(path, path.parent / "media").pieces


def test_a_notebook_is_read_into_pieces(small):
    found = [(piece.kind, piece.text) for piece in pieces(small)]
    assert ("heading", "1. One") in found and ("predict", "**Predict** the sum.") in found
    assert ("listing", LISTING.rstrip("\n")) in found  # without the links below it
    assert ("code", "x = 3 + 4\ncheck(x, 7)") in found and ("hint", "count") in found
    assert ("code", "x = ...\ncheck(x, 7)") in found  # its hint stands apart
    assert not any("not yet" in text or "verdict" in text for _, text in found)


def test_a_block_of_markdown_is_one_piece(tmp_path):
    fence = "```python\na = 1\n\n\nb = 2\n```"
    fold = "<details><summary>Hint</summary>\n\nInside *it*.\n\nMore.\n\n</details>"
    texts = ["# Title", "[a](b.ipynb) · [b](c.ipynb)", "- one\n\n- two", fence, fold]
    path = write(tmp_path, [new_markdown_cell("\n\n".join(texts))])
    found = [(piece.kind, piece.text) for piece in pieces(path)]
    kinds = ["heading", "navigation", "prose", "prose", "prose"]
    assert found == list(zip(kinds, ["Title", *texts[1:]], strict=True))


@pytest.mark.parametrize(
    "outputs",
    [
        shown(
            **{"application__vnd.jupyter.widget-view+json": {"id": "1"}, "text__plain": "B"}
        ),
        shown(text__html="<script>1</script>"),
        shown(text__html="<div></div>"),
        shown(text__plain="<a.B at 0x7f00>"),
    ],
)
def test_what_no_page_can_hold_is_refused_with_its_place(tmp_path, outputs):
    path = write(tmp_path, [new_code_cell("1"), new_code_cell("2", outputs=outputs)])
    with pytest.raises(Unprintable, match="00_small.ipynb, cell 2: an output of"):
        pieces(path)


@pytest.mark.parametrize(
    "source, shown",
    [
        ('check(\n    f,\n    1,\n    hint="so",\n)', "check(\n    f,\n    1,\n)"),
        ('x = ...\ncheck(x, [1], hint="so")', "x = ...\ncheck(x, [1])"),
        ('check(x, [1], hint="s" "o")', "check(x, [1])"),
        ('check("é", hint="so")', 'check("é")'),
        ('check(x, hint="so", name="x")', 'check(x, name="x")'),
    ],
)
def test_a_hint_does_not_stand_in_the_exercise(source, shown):
    assert without_hint(source) == (shown, "so")
    assert without_hint(shown) == (shown, "")


def test_an_answer_is_what_is_shown_and_the_first_paragraph(small):
    found = pieces(small)
    predicted, named = answers(found)
    assert found[predicted.question].kind == "predict"
    assert [found[i].text for i in predicted.shown] == ["7", "so"]
    (said,) = predicted.said  # a listing ends it, although the text leads on
    assert found[said].text.startswith(SAID)
    assert found[named.question].role == "finding" and not named.shown
    assert [found[i].text for i in named.said] == ["It is rank 1."]


def test_a_sentence_that_leads_on_is_no_answer():
    assert without_lead("It is so. Now look:") == ("It is so.", "Now look:")
    assert without_lead("It is so. That is why.") == ("It is so. That is why.", "")
    assert without_lead("Only this:") == ("Only this:", "")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_question_of_the_collection_is_answered(path):
    found = pieces(path)
    asked = [i for i, piece in enumerate(found) if piece.kind == "predict"]
    named = [i for i, piece in enumerate(found) if piece.role == "finding"]
    each = answers(found)
    assert {*asked} <= {answer.question for answer in each} and asked
    for i in named:  # within a prediction the finding needs no answer of its own
        assert any(a.question == i or a.question < i < a.last for a in each)


def test_the_minutes_of_the_sections_are_those_of_the_chapter(small):
    notebook = read(small, small.parent / "media")
    times = minutes(notebook)
    assert sum(time for time, _ in times.values()) == notebook.minutes == 5
    assert [asked for _, asked in times.values()] == [1, 0, 0, 0]


def test_a_student_gets_open_questions(small, tmp_path):
    student.write(tmp_path / "student", folder=small.parent)
    cells = nbformat.read(tmp_path / "student" / small.name, 4).cells
    assert [len(c.outputs) for c in cells if c.cell_type == "code"][1:4] == [0, 0, 1]
    assert "[The notebook with all outputs](../notebooks/00_small.ipynb)" in cells[0].source
    fold = re.search(r"<details>.*</details>", cells[6].source, re.S)
    assert SAID in fold[0] and "Here is the function:" not in fold[0]
    assert cells[6].source.endswith("**Change** the four.")
    assert re.search(
        r"<details>.*It is rank 1\..*</details>\n\nAnother", cells[10].source, re.S
    )


def test_the_work_of_a_student_is_kept(small, tmp_path):
    (tmp_path / small.name).write_text("mine")
    (said,) = student.write(tmp_path, folder=small.parent)
    assert "kept" in said and (tmp_path / small.name).read_text() == "mine"


def test_every_notebook_has_a_student_copy_with_the_same_cells(tmp_path):
    student.write(tmp_path)
    for path in PATHS:
        copied, stored = nbformat.read(tmp_path / path.name, 4), nbformat.read(path, 4)
        assert [c.id for c in copied.cells] == [c.id for c in stored.cells]
        pairs = zip(copied.cells, stored.cells, strict=True)
        assert all(a.source == b.source for a, b in pairs if a.cell_type == "code")
        nbformat.validate(copied)


def test_normalising_a_notebook_keeps_what_the_handouts_need(small):
    before = [cell.metadata for cell in nbformat.read(small, 4).cells]
    normalise(small)
    assert [cell.metadata for cell in nbformat.read(small, 4).cells] == before
