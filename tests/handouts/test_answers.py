"""What answers a prediction is found, folded, cleared, and put at the end of a book."""

import re
import xml.etree.ElementTree as ElementTree
import zipfile

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from handouts import student
from handouts.answers import answers, without_lead
from handouts.build import ROOT, build
from handouts.editions import EPUB, HTML, INSTRUCTOR, STUDENT, edition
from handouts.notebook import read

STEMS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
SAID = "Seven, because four and three make seven."


@pytest.fixture
def small(tmp_path):
    """A chapter with one prediction, its answer in two cells, and what comes after."""

    def printed(text):
        return [new_output("stream", name="stdout", text=text)]

    cells = [
        new_markdown_cell("# Title\n\nAbout 5 minutes.\n\n## 1. One"),
        new_markdown_cell("Before.\n\n**Predict** the sum."),
        new_code_cell("print(4 + 3)", outputs=printed("7\n"), execution_count=1),
        new_code_cell("print('so')", outputs=printed("so\n"), execution_count=2),
        new_markdown_cell(f"{SAID} Now we go on:\n\n**Change** the four."),
        new_code_cell("print(8)", outputs=printed("8\n"), execution_count=3),
    ]
    path = tmp_path / "notebooks" / "00_small.ipynb"
    path.parent.mkdir()
    nbformat.write(new_notebook(cells=cells), path)
    return path


def test_an_answer_is_what_is_shown_and_the_first_paragraph(small, tmp_path):
    notebook = read(small, tmp_path)
    (answer,) = answers(notebook.pieces)
    assert notebook.pieces[answer.question].kind == "predict"
    assert [notebook.pieces[i].text for i in answer.shown] == ["7", "so"]
    assert notebook.pieces[answer.said[0]].text.startswith(SAID)


def test_a_sentence_that_leads_on_is_no_answer():
    assert without_lead("It is so. Now look:") == ("It is so.", "Now look:")
    assert without_lead("It is so. That is why.") == ("It is so. That is why.", "")
    assert without_lead("Only this:") == ("Only this:", "")


def test_every_prediction_of_the_collection_is_answered(tmp_path):
    for stem in STEMS:
        notebook = read(ROOT / "notebooks" / f"{stem}.ipynb", tmp_path)
        asked = sum(piece.kind == "predict" for piece in notebook.pieces)
        assert asked == len(answers(notebook.pieces)) > 0, stem


def texts(blocks):
    """The kind and the text of each block, those inside of a group too."""
    for made in blocks:
        (_, kinds, _), content = made["c"]
        yield (
            kinds[0],
            content if made["t"] == "CodeBlock" else [t for _, t in texts(content)],
        )


@pytest.mark.parametrize("name", [STUDENT, EPUB])
def test_a_book_answers_at_the_end_of_the_chapter(small, tmp_path, name):
    found = list(texts(edition(read(small, tmp_path), name)))
    kinds = [kind for kind, _ in found]
    shown = [text for _, text in found]
    assert kinds.index("room") > shown.index("print('so')")
    end = shown.index("Answers to the predictions")
    assert end < shown.index("7") < shown.index("so") and "8" in shown[:end]
    assert any(text.startswith(SAID) for text in shown[end:])
    assert not any(SAID in text for text in shown[:end]) and "Now we go on:" in shown[:end]


def test_instructors_see_the_answer_in_its_place_and_a_web_page_folds_it(small, tmp_path):
    notebook = read(small, tmp_path)
    plain = [text for _, text in texts(edition(notebook, INSTRUCTOR))]
    assert plain.index("7") < plain.index("8") and "Answers to the predictions" not in plain
    folds = [text for kind, text in texts(edition(notebook, HTML)) if kind == "answer"]
    assert folds == [["7", "print('so')", "so", SAID]]


def test_a_student_gets_open_predictions(small, tmp_path):
    out = tmp_path / "student"
    assert [path.name for path in student.write(out, small.parent)] == ["00_small.ipynb"]
    cells = nbformat.read(out / "00_small.ipynb", 4).cells
    assert [len(cell.outputs) for cell in cells if cell.cell_type == "code"] == [0, 0, 1]
    assert "[The notebook with all outputs](../notebooks/00_small.ipynb)" in cells[0].source
    fold = re.search(r"<details>.*</details>", cells[4].source, re.S)
    assert SAID in fold[0] and "Now we go on:" not in fold[0]
    assert cells[4].source.endswith("**Change** the four.")


def test_the_work_of_a_student_is_kept(small, tmp_path):
    out = tmp_path / "student"
    out.mkdir()
    (out / "00_small.ipynb").write_text("mine")
    assert student.write(out, small.parent) == []
    assert (out / "00_small.ipynb").read_text() == "mine"


def test_every_notebook_has_a_student_copy_with_the_same_cells(tmp_path):
    written = student.write(tmp_path / "student")
    assert [path.stem for path in written] == STEMS
    for path in written:
        copied, stored = (
            nbformat.read(path, 4),
            nbformat.read(ROOT / "notebooks" / path.name, 4),
        )
        assert [c.id for c in copied.cells] == [c.id for c in stored.cells]
        pairs = zip(copied.cells, stored.cells, strict=True)
        assert all(a.source == b.source for a, b in pairs if a.cell_type == "code")
        nbformat.validate(copied)


@pytest.mark.fresh
def test_the_electronic_book_is_whole(small, tmp_path):
    """Its pages are well-formed, its links lead somewhere, its pictures have words."""
    build([], tmp_path / "build", small.parent, quiet=True)
    ids, links, pictures = set(), [], []
    with zipfile.ZipFile(tmp_path / "build" / "book.epub") as book:
        for name in book.namelist():
            if not name.endswith(".xhtml"):
                continue
            file = name.rpartition("/")[2]
            for element in ElementTree.fromstring(book.read(name)).iter():
                ids.add(f"{file}#{element.get('id')}")
                if element.tag.endswith("}a") and "#" in element.get("href", ""):
                    target = element.get("href").rpartition("/")[2]
                    links.append(target if target[0] != "#" else file + target)
                if element.tag.endswith("}img"):
                    pictures.append(element.get("alt"))
    assert links and not [link for link in links if link not in ids] and all(pictures)
