"""Live slides: the question first, nothing torn, a prediction before its answer."""

from itertools import groupby

import nbformat
import pytest

from handouts import slides
from handouts.notebook import ROOT, read
from tests.handouts.conftest import LISTING, SAID

PATHS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
pytestmark = pytest.mark.slow  # pandoc


@pytest.fixture(scope="module")
def decks(tmp_path_factory):
    out = tmp_path_factory.mktemp("slides")
    slides.write(out)
    return out


def kind(cell):
    return cell.metadata.get("slideshow", {}).get("slide_type", "")


def pages(path):
    """The cells of each slide, without what only the speaker sees."""
    page, found = 0, []
    for cell in nbformat.read(path, 4).cells:
        page += kind(cell) in ("slide", "subslide")
        if kind(cell) not in ("notes", "skip"):
            found.append((page, cell))
    return [[cell for _, cell in each] for _, each in groupby(found, lambda pair: pair[0])]


def notes(path):
    return "\n".join(c.source for c in nbformat.read(path, 4).cells if kind(c) == "notes")


def test_the_rules_of_slides(small, tmp_path):
    slides.write(tmp_path / "slides", folder=small.parent)
    deck = tmp_path / "slides" / small.name
    nbformat.validate(nbformat.read(deck, 4))
    first, *rest = pages(deck)
    assert (
        first[0].source == "# Title\n\n## Is it seven?" and first[1].source == "import torch"
    )
    shown = [[cell.source for cell in page] for page in rest]
    assert shown[0][0] == "## 1. One\n\nFor the hall."
    asked = next(
        page for page in rest if "> **Predict** the sum." in [c.source for c in page]
    )
    question = [c.source for c in asked].index("> **Predict** the sum.")
    run, more = asked[question + 1 : question + 3]
    assert (run.source, kind(run), run.outputs, more.outputs) == (
        "print(4 + 3)",
        "fragment",
        [],
        [],
    )
    assert f"```python\n{LISTING}```" in [source for page in shown for source in page]
    finding = next(c for page in rest for c in page if c.source.startswith("finding"))
    assert kind(finding) == "fragment" and not finding.outputs
    task, solution = shown[-3:-1]
    assert task[0].startswith("## Exercises") and "**1.** Add." in task
    assert solution[-1] == "x = 3 + 4\ncheck(x, 7)" and solution[-1] not in task
    assert "It is seven." in shown[-1]
    assert all(
        said in notes(deck) for said in (SAID, "First words.", "Ask *twice*.", "**Change**")
    )


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_chapter_has_its_question_and_sentences_for_the_hall(path, decks, tmp_path):
    notebook = read(path, tmp_path)
    assert notebook.question.endswith("?")
    first, *rest = pages(decks / path.name)
    assert notebook.question in first[0].source
    said = {p.cell: p.about["slide"] for p in notebook.pieces if p.about.get("slide")}
    assert 3 <= len(said) <= 5
    shown = "\n".join(cell.source for page in rest for cell in page)
    assert all(sentences in shown for sentences in said.values())


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_no_code_is_lost_or_torn_and_all_prose_is_said_or_shown(path, decks, tmp_path):
    notebook = read(path, tmp_path)
    everything = [cell.source for cell in nbformat.read(decks / path.name, 4).cells]
    whole = "\n".join(everything)
    for piece in notebook.pieces:
        if piece.kind == "listing":
            parts = [part.strip("\n") for part in piece.text.split("\n\n\n")]
            assert all(any(part in source for source in everything) for part in parts)
        elif piece.kind in ("prose", "predict"):
            closing = piece.cell == notebook.pieces[-1].cell
            assert closing or piece.text in whole, piece.text
    assert not any(source.startswith("%%solution") for source in everything)
