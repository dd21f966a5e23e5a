"""Students' notebooks and live slides: a question comes before its answer."""

import re
import zipfile

import nbformat
import pytest

from handouts import slides, student
from handouts.answers import answers
from handouts.notebook import ROOT, read
from tests.handouts.conftest import LISTING, SAID

PATHS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
pytestmark = pytest.mark.slow  # pandoc


def test_a_student_gets_open_questions(small, tmp_path):
    student.write(tmp_path / "student", folder=small.parent)
    cells = nbformat.read(tmp_path / "student" / small.name, 4).cells
    assert [len(c.outputs) for c in cells if c.cell_type == "code"][1:4] == [0, 0, 1]
    assert "[The notebook with all outputs](../notebooks/00_small.ipynb)" in cells[0].source
    assert {c.execution_count for c in cells if c.cell_type == "code"} == {None}
    fold = re.search(r"<details>.*</details>", cells[6].source, re.S)
    assert SAID in fold[0] and "Here is the function:" not in fold[0]
    assert cells[6].source.endswith("**Change** the four.")
    finding = r"<details>.*It is rank 1\..*</details>\n\nAnother"
    assert re.search(finding, cells[10].source, re.S)


def test_the_links_of_a_students_contents_lead_somewhere(tmp_path):
    student.write(tmp_path, ("no notebook",))
    text = (tmp_path / "README.md").read_text("utf-8")
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        folder = "notebooks" if re.match(r"\d\d_", target) else "student"
        assert (ROOT / folder / target).resolve().exists(), target
    assert text.index("](00_") < text.index("../docs/ring.svg")  # chapters come first
    assert "cell.svg" not in text and "This cell comes" not in text  # it shows a solution
    assert "git clone" not in text and "](../docs/path.md)" in text
    assert student.contents("[below](#start)") == "[below](#start)"


def test_what_a_student_changed_is_kept_and_what_nobody_changed_is_renewed(small, tmp_path):
    out, copy = tmp_path / "student", tmp_path / "student" / small.name

    def updated(word):
        small.write_text(small.read_text().replace("First words", word))
        return "\n".join(student.write(out, folder=small.parent))

    assert "00_small.ipynb is written" in updated("First words")
    assert updated("First words") == ""  # nothing is to be done
    assert "00_small.ipynb is renewed" in updated("Other words")
    assert "Other words" in copy.read_text()
    copy.write_text(copy.read_text() + " ")
    assert "kept, since changed: 00_small.ipynb" in updated("Last words")
    assert "Other words" in copy.read_text()
    (out / student.WRITTEN).unlink()  # as a copy of before there was such a file
    assert "kept, since changed: 00_small.ipynb" in updated("Last words")


def kind(cell):
    return cell.metadata.get("slideshow", {}).get("slide_type", "")


def test_the_rules_of_slides(small, tmp_path):
    slides.write(tmp_path / "slides", folder=small.parent)
    deck = nbformat.read(tmp_path / "slides" / small.name, 4).cells
    notes = "".join(cell.source for cell in deck if kind(cell) == "notes")
    cells = [cell for cell in deck if kind(cell) != "notes"]
    shown = [cell.source for cell in cells]
    assert shown[0] == "# Title\n\n## Is it seven?"
    assert "## 1. One\n\nFor the hall." in shown and f"```python\n{LISTING}```" in shown
    run, more = cells[shown.index("> **Predict** the sum.") + 1 :][:2]
    finding = next(c for c in cells if c.source.startswith("finding"))
    assert run.source == "print(4 + 3)" and kind(run) == kind(finding) == "fragment"
    assert not run.outputs and not more.outputs and not finding.outputs
    solution = shown.index("x = 3 + 4\ncheck(x, 7)")
    assert kind(cells[solution - 1]) == "subslide"  # not on the one of the exercise
    assert "**1.** Add." in shown[:solution] and "It is seven." in shown[solution:]
    assert all(said in notes for said in (SAID, "First words.", "Ask *twice*.", "**Change**"))


def test_a_deck_needs_no_other_file_and_one_needs_no_jupyterlab(tmp_path):
    (path,) = (path for path in PATHS if path.stem.endswith("collectives"))
    slides.write(tmp_path, ("03",))
    deck = nbformat.read(tmp_path / path.name, 4).cells
    found = [
        (c, name) for c in deck for name in re.findall(r"attachment:([^)]+)\)", c.source)
    ]
    assert len(found) > 10 and all(name in cell.attachments for cell, name in found)
    assert not any("](drawings" in cell.source for cell in deck)
    with zipfile.ZipFile((tmp_path / path.name).with_suffix(".zip")) as archive:
        assert sorted(archive.namelist()) == [path.name, "rise.css"]
    page = (tmp_path / path.name).with_suffix(".html").read_text("utf-8")
    assert not re.findall(r'src="(?!data:)|href="(?!https?:|#|\.\./\d\d_\w+\.html")', page)
    assert page.count("<img") >= len(found) and 'class="film"' not in page
    assert page.count('class="slide"') > 30
    answers_of = re.findall(r'<div class="fragment">', page)
    assert len(answers_of) > 3 and "RanksHung" in page


def test_a_listing_too_long_for_a_slide_breaks_between_its_methods():
    methods = [[f"    def method_{i}(self):", *["        pass"] * 8, ""] for i in range(5)]
    listing = "\n".join(["class Long:", *(line for lines in methods for line in lines)])
    parts = slides._fitting(listing)
    assert len(parts) > 1 and all(part.count("\n") < slides.WHOLE for part in parts)
    assert all(part.lstrip().startswith("def") for part in parts[1:])
    assert [line for part in parts for line in part.splitlines() if line] == [
        line for line in listing.splitlines() if line
    ]


def test_a_long_function_is_cut_before_a_statement_and_its_comment():
    call = ["    # once more", "    total = add(", "        total,", "        1,", "    )"]
    listing = "\n".join(["def work(total):", *(8 * call), "    if total:", "        go()"])
    parts = slides._fitting(listing)
    assert len(parts) == 2 and "\n".join(parts) == listing
    assert parts[1].startswith(call[0])
    code = "\n".join(["def work():", *(slides.LINES * ["    a = 1"])])
    assert slides._fitting(code) == [code]  # a little too long: it is smaller


def test_a_table_in_a_deck_keeps_its_last_row_and_a_solution_waits(small, tmp_path):
    notebook = nbformat.read(small, 4)
    notebook.cells[2].source += "\n\n| a | b |\n|---|---|\n| c | last |"
    nbformat.write(notebook, small)
    slides.write(tmp_path / "slides", folder=small.parent)
    page = (tmp_path / "slides" / "00_small.html").read_text("utf-8")
    assert re.search(r"<td>last</td>", page) and "What the stored run showed" not in page
    title, *others = re.findall(r'<section class="slide">(.*?)</section>', page, re.S)
    assert "<pre" not in title
    (solved,) = [each for each in others if "✓ yes" in each]
    assert solved.index("fragment") < solved.index("sourceCode") < solved.index("✓ yes")
    deck = nbformat.read(tmp_path / "slides" / small.name, 4).cells
    (told,) = [c.source for c in deck if c.metadata.get("stored") and "7" in c.source]
    assert told.startswith("*What the stored run showed:*")  # if a cell fails in the hall


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_chapter_in_each_form(path, tmp_path):
    notebook, stored = read(path, tmp_path), nbformat.read(path, 4)
    pieces, each = notebook.pieces, answers(notebook.pieces)
    asked = {i for i, piece in enumerate(pieces) if piece.kind == "predict"}
    assert asked and asked <= {answer.question for answer in each}
    for i, piece in enumerate(pieces):  # a finding within a prediction needs no answer
        found = any(a.question == i or a.question < i < a.last for a in each)
        assert piece.role != "finding" or piece.kind != "code" or found

    copied = student.student_copy(notebook, path.name)
    nbformat.validate(copied)
    for ours, theirs in zip(copied.cells, stored.cells, strict=True):
        same = ours.cell_type == "markdown" or ours.source == theirs.source
        assert ours.id == theirs.id and same
        assert not any(
            o.get("text", "").startswith("mine.py:") for o in ours.get("outputs", ())
        )

    deck = slides.Deck(notebook, tmp_path).made()
    nbformat.validate(deck)
    assert notebook.question.endswith("?") and notebook.question in deck.cells[0].source
    shown = "\n".join(cell.source for cell in deck.cells if kind(cell) != "notes")
    said = {piece.about["slide"] for piece in pieces if piece.about.get("slide")}
    assert len(said) >= 3 and all(sentences in shown for sentences in said)
    whole = "\n".join(cell.source for cell in deck.cells)
    for piece in pieces:
        if piece.kind == "listing":
            assert all(line in shown for line in piece.text.splitlines())
        elif piece.kind in ("prose", "predict"):
            own = stored.cells[piece.cell].source
            ends = piece.cell == pieces[-1].cell or own.startswith("## Next")
            assert ends or piece.text in whole
