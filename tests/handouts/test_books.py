"""Books hold what their edition promises, and a fault stops the build with its place."""

import re
import zipfile
from xml.etree import ElementTree

import pypdfium2 as pdfium
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

from handouts import convert
from handouts.build import _cover, build
from handouts.convert import Unprintable
from handouts.editions import edition
from handouts.forms import EPUB, HTML, INSTRUCTOR, STUDENT, Book
from handouts.notebook import ROOT, elements, read, stringify
from tests.handouts.conftest import SAID, printed, shown, small_chapter, write

STEM = "00_small"
ROOM = r"My prediction (\d+), and why \(answer on page (\d+)\)"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # pandoc and a typesetter


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    """The small one, with a page between the questions and their answers."""
    cells = small_chapter()
    cells.insert(-1, new_markdown_cell("A line.\n\n" * 60))
    return write(tmp_path_factory.mktemp("handouts"), cells)


@pytest.fixture(scope="module")
def built(chapter):
    out = chapter.parents[1] / "build"
    build(out, folder=chapter.parent)
    return out


def pages(path):
    """The text of each page of a PDF."""
    return [page.get_textpage().get_text_bounded() for page in pdfium.PdfDocument(path)]


def test_each_prediction_has_room_and_its_answer_comes_pages_later(built):
    text, where = pages(built / "student" / f"{STEM}.pdf"), {}
    for page, words in enumerate(text, 1):
        for number, answered in re.findall(ROOM, " ".join(words.split())):
            where[int(number)] = page, int(answered)
    assert sorted(where) == [1, 2]  # the prediction and the finding
    for number, (page, answered) in where.items():
        assert answered > page and f"To prediction {number}" in text[answered - 1]
    assert "My prediction" not in "".join(pages(built / "instructor" / f"{STEM}.pdf"))


def made_of(path, name):
    """All elements of an edition."""
    media = path.parent / "media"
    return list(elements(edition(read(path, media), name, Book(path.parents[1], media))))


def texts_of(path, name):
    """What an edition says, from its beginning to its end; pieces of its own have marks."""
    made = made_of(path, name)
    said = [e for e in made if e["t"] in ("CodeBlock", "Para", "Header", "RawBlock")]
    bare = ("CodeBlock", "RawBlock")
    return [e["c"][1] if e["t"] in bare else stringify(e) for e in said]


@pytest.mark.parametrize("name, seven", [(STUDENT, '#shown("7")'), (EPUB, "7")])
def test_a_book_answers_at_the_end_of_the_chapter_and_has_no_teaching_note(
    small, name, seven
):
    said = texts_of(small, name)
    assert "Ask twice." not in said
    end = said.index("Answers to the predictions")
    assert end < said.index(seven) < said.index(seven.replace("7", "so")) < said.index(SAID)
    assert "Here is the function:" in said[:end] and "It is rank 1." in said[end:]
    assert ("x = 3 + 4\ncheck(x, 7)" in said) == (name == EPUB)


def test_the_room_for_a_prediction_is_behind_all_cells_whose_output_answers_it(small):
    said = texts_of(small, STUDENT)
    last = said.index("#source(\"print('so')\", apart: false)")
    assert said[last + 1] == '#room("00_small--answer-1", 1)'


@pytest.mark.parametrize("name", [STUDENT, INSTRUCTOR, HTML, EPUB])
def test_what_a_build_tries_is_said_where_its_solution_is_not_open(small, name):
    made = made_of(small, name)
    said = [stringify(e) for e in made if e["t"] in ("Para", "Plain")]
    assert ("It must" in said) == (name != INSTRUCTOR)


@pytest.mark.parametrize("name", [STUDENT, INSTRUCTOR, HTML, EPUB])
def test_a_solution_shows_its_verdict_and_its_picture(small, name):
    made = made_of(small, name)
    with_solution = name != STUDENT
    assert any("✓ yes" in stringify(e) for e in made) == with_solution
    assert ("Ours in a picture." in str(made) + stringify(made)) == with_solution
    assert "Not kept" not in str(made) and "as text" not in str(made)


def test_instructors_see_an_answer_in_its_place_and_a_web_page_folds_it(small):
    said = texts_of(small, INSTRUCTOR)
    assert said.index('#shown("7")') < said.index('#shown("so")') and "Ask twice." in said
    assert "Answers to the predictions" not in said
    plan = next(text for text in said if text.startswith("#plan"))
    assert '(("1. One", 2, 1, ), ("Exercises", 3, 0, )' in plan  # minutes, predictions
    web = "\n".join(texts_of(small, HTML))
    first, second = re.findall(r'<details class="answer">(.*?)</details>', web, re.S)
    assert "so\n" in first and SAID in first and "Here is the function" not in first
    assert "It is rank 1." in second and "Another paragraph" not in second


def test_the_electronic_book_is_well_formed_and_its_links_lead_somewhere(built):
    ids, links, folded = set(), [], []
    with zipfile.ZipFile(built / "book.epub") as book:
        for name in filter(lambda name: name.endswith(".xhtml"), book.namelist()):
            file = name.rpartition("/")[2]
            for element in ElementTree.fromstring(book.read(name)).iter():
                ids.add(f"{file}#{element.get('id')}")
                if element.tag.endswith("}details"):
                    folded.append(element.get("class"))
                if element.tag.endswith("}a") and "#" in element.get("href", ""):
                    target = element.get("href").rpartition("/")[2]
                    links.append(target if target[0] != "#" else file + target)
    assert links and set(links) <= ids
    assert set(folded) == {"solution"}


def test_the_electronic_book_keeps_the_rules_that_epubcheck_looks_for(built):
    """Also epubcheck itself said nothing of the whole book, in its version 5.3."""
    with zipfile.ZipFile(built / "book.epub") as book:
        names = book.namelist()
        assert names[0] == "mimetype" and book.getinfo("mimetype").compress_type == 0
        package = ElementTree.fromstring(book.read("EPUB/content.opf"))
        files = {n: book.read(n) for n in names if n.endswith(".xhtml")}
    dc = "{http://purl.org/dc/elements/1.1/}"
    said = {each.tag.removeprefix(dc): each.text for each in package.iter() if dc in each.tag}
    assert said["creator"] == "Two people" and said["date"].startswith("2026-01-02")
    assert "CC BY" in said["rights"] and said["title"] and said["language"] == "en"
    items = {i.get("href"): i for i in package.iter() if i.tag.endswith("}item")}
    held = {name.removeprefix("EPUB/") for name in names if name.startswith("EPUB/")}
    assert held == set(items) | {"content.opf"}
    covers = [i for i in items.values() if "cover-image" in i.get("properties", "")]
    assert [i.get("media-type") for i in covers] == ["image/png"]
    for name, text in files.items():
        every = list(ElementTree.fromstring(text).iter())
        ids = [e.get("id") for e in every if e.get("id")]
        assert len(ids) == len(set(ids)), name
        for picture in (e for e in every if e.tag.endswith("}img")):
            assert picture.get("alt") is not None
            assert f"EPUB/{picture.get('src').removeprefix('../')}" in names
        assert not [e for e in every if e.tag.endswith(("}script", "}input"))], name


def test_books_have_the_parts_of_the_readme_and_name_them_in_their_contents(tmp_path):
    path = write(tmp_path, small_chapter())
    table = (
        "\n\n| chapter |\n|---|\n| **I One** |\n| [00 Title](notebooks/00_small.ipynb) |\n"
    )
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text() + table)
    build(tmp_path / "build", folder=path.parent)
    _, contents, first, chapter, *others = pages(tmp_path / "build" / STUDENT / "book.pdf")
    assert "I One" in contents and "Appendix" in contents and "About this" in contents
    assert "Answers to the predictions" not in contents  # every chapter ends alike
    assert first.startswith("I One") and chapter.startswith("00 Title")
    assert any(page.startswith("Appendix") for page in others)
    with zipfile.ZipFile(tmp_path / "build" / "book.epub") as book:
        nav = ElementTree.fromstring(book.read("EPUB/nav.xhtml"))
    items = [e for e in nav.iter() if e.tag.endswith("}li")]
    inside = {
        item[0].text: ["".join(e.itertext()) for e in item.iter()][1:] for item in items
    }
    assert "00 Title" in inside["I One"] and "00 Title" not in inside["Appendix"]


def test_the_cover_has_room_for_the_title_and_its_picture(tmp_path):
    work, media = tmp_path / "work", tmp_path / "work" / "media"
    convert.prepare(work)
    readme = read(ROOT / "README.md", media, "readme")
    drawn = [e["c"] for p in readme.pieces for e in elements(p.blocks) if e["t"] == "Image"]
    book = Book(ROOT, media, series=readme.title, author="Two people")
    book.picture = drawn[-1][2][0], "A ring."
    page = work / "cover.typ"
    page.write_text(f'#import "/paper.typ": *\n#show: cover\n{_cover(book, "Edition", "()")}')
    assert convert.png(page, work).read_bytes().startswith(b"\x89PNG")


def test_a_heading_that_ends_its_cell_has_its_name(tmp_path):
    path = write(tmp_path, [new_markdown_cell("# Title\n\n## 1. One\n\n### Last")])
    assert read(path, tmp_path / "media").anchors() == {"title", "1-one", "last"}


SVG = "<svg xmlns='http://www.w3.org/2000/svg' width='3000' height='9'><title>T</title></svg>"
WIDE = shown("", **{"image/svg+xml": SVG})
WIDGET = shown("", "B", **{"application/vnd.jupyter.widget-view+json": {"a": 1}})
SUM = "$$" + " + ".join("abcdefghijklmnopqrstuvwxyz" * 3) + "$$"


@pytest.mark.parametrize(
    "place, says, text, outputs",
    [
        ("cell 3", "a picture runs off the page", "Text.", WIDE),
        ("cell 2", "a link leads nowhere: 01_gone.ipynb", "See [it](01_gone.ipynb).", []),
        ("cell 2", "no such heading: #Two", "See [it](#Two).", []),
        ("cell 2", "a formula is", SUM, []),
        ("cell 3", "an output of", "Text.", WIDGET),
        ("cell 3", "an output of", "Text.", shown("<script>1</script>")),
        ("cell 3", "an output of", "Text.", shown("", "<a.B at 0x7f00>")),
        ("student/00_small", '"漢"` could not be displayed', "Text.", printed("漢\n")),
    ],
)
def test_a_fault_stops_the_build_with_its_place(tmp_path, place, says, text, outputs):
    head = new_markdown_cell("# Title\n\nAbout 5 minutes.\n\n## 1. One")
    code = new_code_cell("1", outputs=outputs)
    path = write(tmp_path, [head, new_markdown_cell(text), code])
    with pytest.raises(Unprintable) as caught:
        build(tmp_path / "build", folder=path.parent)
    lines = str(caught.value).split("\n")
    assert any(f"{place}:" in line and says in line for line in lines)
