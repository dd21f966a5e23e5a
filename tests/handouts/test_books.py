"""Books hold what the notebooks hold, and a fault in one stops the build with its place."""

import re
import zipfile
from xml.etree import ElementTree

import pypdf
import pypdfium2 as pdfium
import pypdfium2.raw as raw
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

from handouts.build import build
from handouts.editions import EPUB, HTML, INSTRUCTOR, STUDENT, edition
from handouts.notebook import ROOT, Unprintable, elements, read, stringify
from tests.handouts.conftest import SAID, printed, shown, write

ALL = [path.stem for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))]
P2P, COLLECTIVES = (
    next(stem for stem in ALL if stem.endswith(name))
    for name in ("point_to_point", "collectives")
)
STEMS = [P2P, COLLECTIVES]
EDITIONS = ["student", "instructor"]
MARGIN = 20 / 25.4 * 72
ROOM = r"My prediction (\d+), and why \(answer on page (\d+)\)"
pytestmark = pytest.mark.slow  # pandoc and a typesetter


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("handouts")
    build(out, tuple(stem[:2] for stem in STEMS))
    return out


@pytest.fixture(scope="session")
def texts(built):
    """The text of each PDF, page by page."""
    return {
        f"{path.parent.name}/{path.stem}": [
            page.get_textpage().get_text_bounded() for page in pdfium.PdfDocument(path)
        ]
        for path in built.glob("*/*.pdf")
    }


@pytest.fixture(params=STEMS)
def notebook(request, tmp_path):
    return read(ROOT / "notebooks" / f"{request.param}.ipynb", tmp_path)


def squeezed(text):
    """Without white space and the marks that let long words break."""
    return re.sub(r"[\s\u200b\u00ad]+", "", text.replace("’", "'").replace("‘", "'"))


def solution_lines(notebook):
    """The lines of the solutions that stand nowhere else in the notebook."""
    elsewhere = squeezed("\n".join(p.text for p in notebook.pieces if p.role != "solution"))
    solutions = [p.text for p in notebook.pieces if p.role == "solution" and p.kind == "code"]
    lines = {squeezed(line) for text in solutions for line in text.splitlines()}
    return {line for line in lines if len(line) > 8 and line not in elsewhere}


def test_every_heading_is_on_paper_and_students_see_no_solution(texts, notebook):
    lines = solution_lines(notebook)
    assert lines
    for name in EDITIONS:
        for book in (notebook.id, "book"):
            text = squeezed("".join(texts[f"{name}/{book}"]))
            for piece in notebook.pieces:
                heading = re.sub(r"[`*]", "", piece.text)
                assert piece.kind != "heading" or squeezed(heading) in text, heading
            assert {line for line in lines if line in text} == (
                lines if name == "instructor" else set()
            )


def test_each_prediction_has_room_and_its_answer_comes_pages_later(texts, notebook):
    pages = texts[f"student/{notebook.id}"]
    where = {}
    for i, page in enumerate(pages, 1):
        for number, answered in re.findall(ROOM, " ".join(page.split())):
            where[int(number)] = i, int(answered)
    asked = sum(p.kind == "predict" for p in notebook.pieces)
    assert sorted(where) == list(range(1, asked + 1))
    for number, (asked_on, answered) in where.items():
        assert answered > asked_on and f"To prediction {number}" in pages[answered - 1]
    assert not any("My prediction" in page for page in texts[f"instructor/{notebook.id}"])


def test_instructors_get_timing_and_teaching_notes(texts, notebook):
    text = squeezed("".join(texts[f"instructor/{notebook.id}"]))
    student = squeezed("".join(texts[f"student/{notebook.id}"]))
    notes = [squeezed(stringify(blocks)) for blocks in notebook.notes.values()]
    assert notes and all(note[:30] in text and note[:30] not in student for note in notes)
    assert "PLANOFTHELESSON" in text and "PLANOFTHELESSON" not in student


def test_running_heads_bookmarks_and_links_inside_the_book(built, texts):
    title = f"{COLLECTIVES[:2]} Collectives"
    assert any(t.startswith(title) and "5. What it costs" in t for t in texts["student/book"])

    def flat(outline):
        for entry in outline:
            yield from flat(entry) if isinstance(entry, list) else [entry.title]

    book = pypdf.PdfReader(built / "student/book.pdf")
    assert title in list(flat(book.outline))
    links = [
        a.get_object().get("/A", {}).get("/URI")
        for p in book.pages
        for a in p.get("/Annots", [])
    ]
    assert None in links and f"{P2P}.pdf" not in links  # inside, with its page
    start = next(
        i
        for i, p in enumerate(texts["student/book"])
        if p.startswith(f"{P2P[:2]} Point") and i > 1
    )
    assert f"{P2P[:2]} (p. {start + 1})" in re.sub(
        r"\s+", " ", "".join(texts["student/book"])
    )


def test_nothing_runs_off_a_page_and_fonts_are_embedded(built):
    for path in built.glob("*/*.pdf"):
        for number, page in enumerate(pdfium.PdfDocument(path), 1):
            text, (width, _) = page.get_textpage(), page.get_size()
            for i in range(text.count_chars()):
                left, _, right, _ = text.get_charbox(i)
                inside = left >= MARGIN - 1 and right <= width - MARGIN + 1
                assert inside or not text.get_text_range(i, 1).strip(), (path, number)
            kinds = {"filter": [raw.FPDF_PAGEOBJ_TEXT], "textpage": text}
            fonts = [thing.get_font() for thing in page.get_objects(max_depth=9, **kinds)]
            assert all(font.is_embedded for font in fonts), (path, number)


def test_every_picture_has_alternative_text_and_caption(built, texts, notebook):
    reader = pypdf.PdfReader(built / f"instructor/{notebook.id}.pdf")
    numbers = sorted({*reader.xref.get(0, {}), *reader.xref_objStm})
    things = [reader.get_object(number) for number in numbers]
    figures = [e for e in things if isinstance(e, dict) and e.get("/S") == "/Figure"]
    drawn = [e for p in notebook.pieces for e in elements(p.blocks) if e["t"] == "Figure"]
    pictures = [p for p in notebook.pieces if p.kind == "image"]
    assert pictures and len(figures) == len(pictures) + len(drawn)
    assert all(len(figure["/Alt"]) > 10 for figure in figures)
    text = squeezed("".join(texts[f"instructor/{notebook.id}"]))
    for piece in pictures:
        assert squeezed(piece.caption) in text, piece.caption
    assert f"Figure{int(notebook.number)}.{len(pictures) + bool(drawn)}." in text


def texts_of(path, name):
    """What an edition says, from its beginning to its end, and its kinds."""
    made = list(elements(edition(read(path, path.parent / "media"), name)))
    kinds = [e["c"][0][1][:1] for e in made if e["t"] == "Div"]
    said = [
        e["c"][1] if e["t"] == "CodeBlock" else stringify(e)
        for e in made
        if e["t"] in ("CodeBlock", "Para", "Header")
    ]
    return said, [kind for (kind,) in filter(None, kinds)]


@pytest.mark.parametrize("name", [STUDENT, EPUB])
def test_a_book_answers_at_the_end_of_the_chapter(small, name):
    said, kinds = texts_of(small, name)
    end = said.index("Answers to the predictions")
    assert end < said.index("7") < said.index("so") < said.index(SAID)
    assert "Here is the function:" in said[:end] and "It is rank 1." in said[end:]
    assert kinds.count("room") == kinds.count("answers") == 2
    assert ("x = 3 + 4\ncheck(x, 7)" in said) == (name == EPUB)


def test_instructors_see_an_answer_in_its_place_and_a_web_page_folds_it(small):
    said, _ = texts_of(small, INSTRUCTOR)
    assert said.index("7") < said.index("so") and "Answers to the predictions" not in said
    assert "Ask twice." in said
    folds = [
        e["c"][1]
        for e in elements(edition(read(small, small.parent), HTML))
        if e["t"] == "Div" and e["c"][0][1] == ["answer"]
    ]
    first, second = (stringify(fold) + str(fold) for fold in folds)
    assert "'so'" in first and SAID in first and "Here is the function" not in first
    assert "It is rank 1." in second and "Another paragraph" not in second


def test_the_electronic_book_is_whole(built):
    """Its pages are well-formed, its links lead somewhere, its pictures have words."""
    ids, links, pictures = set(), [], []
    with zipfile.ZipFile(built / "book.epub") as book:
        for name in filter(lambda name: name.endswith(".xhtml"), book.namelist()):
            file = name.rpartition("/")[2]
            for element in ElementTree.fromstring(book.read(name)).iter():
                ids.add(f"{file}#{element.get('id')}")
                if element.tag.endswith("}a") and "#" in element.get("href", ""):
                    target = element.get("href").rpartition("/")[2]
                    links.append(target if target[0] != "#" else file + target)
                if element.tag.endswith("}img"):
                    pictures.append(element.get("alt"))
    inside = [link for link in links if link.partition("#")[0].startswith("ch")]
    assert inside and pictures and all(pictures)
    lost = {link for link in links if link not in ids}  # to chapters that were not built
    assert not any(P2P in link or COLLECTIVES in link for link in lost)


def drawing(width, words="words"):
    text = f"<text x='9' y='20' font-size='13' font-family='Arial'>{words}</text>"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='30'>"
    svg = f"{head}<title>A drawing of a test</title>{text}</svg>"
    return shown(**{"image__svg+xml": svg, "text__plain": "x"})


SUM = "$$" + " + ".join("abcdefghijklmnopqrstuvwxyz" * 3) + "$$"


@pytest.mark.parametrize(
    "cell, says, text, outputs",
    [
        (3, "a picture runs off the page: only 21 %", "Text.", drawing(3000)),
        (2, "a link leads nowhere: 01_gone.ipynb", "See [it](01_gone.ipynb).", []),
        (2, "no such heading: #Two", "See [it](#Two).", []),
        (2, "no such picture: gone.png", "![a picture](gone.png)", []),
        (2, "a formula is", SUM, []),
    ],
)
def test_a_fault_stops_the_build_with_its_place(tmp_path, cell, says, text, outputs):
    head = new_markdown_cell("# Title\n\nAbout 5 minutes.\n\n## 1. One")
    path = write(
        tmp_path, [head, new_markdown_cell(text), new_code_cell("1", outputs=outputs)]
    )
    with pytest.raises(Unprintable) as caught:
        build(tmp_path / "build", folder=path.parent)
    line = next(line for line in str(caught.value).split("\n") if f", cell {cell}:" in line)
    assert line.startswith("notebooks/00_small.ipynb") and says in line


@pytest.mark.parametrize("outputs", [printed("漢\n"), drawing(200, "漢")])
def test_a_sign_that_no_font_has_stops_the_build_and_is_named(tmp_path, outputs):
    cells = [new_markdown_cell("# Title"), new_code_cell("1", outputs=outputs)]
    with pytest.raises(Unprintable, match='student/00_small: .*"漢"` could not be displayed'):
        build(tmp_path / "build", folder=write(tmp_path, cells).parent)


def test_long_lines_wrap_folds_open_and_formulas_have_dots(tmp_path):
    long = "x" * 300 + " " + "word " * 60 + "end"
    fold = "<details><summary>More</summary>\n\nInside *it*.\n\n</details>"
    cells = [new_markdown_cell(f"# Title\n\nFrom $1, \\dots, n$.\n\n{fold}")]
    path = write(tmp_path, [*cells, new_code_cell("1", outputs=printed(long))])
    build(tmp_path / "build", folder=path.parent)
    pages = pdfium.PdfDocument(tmp_path / "build/student/00_small.pdf")
    text = squeezed("".join(page.get_textpage().get_text_bounded() for page in pages))
    assert squeezed(long) in text and "MoreInsideit." in text and "…" in text
