"""The handouts hold what the notebooks hold, and a fault in one stops the build.

Two real notebooks and a small book of them are built once; faults are tried on tiny ones.
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import nbformat
import pypdf
import pypdfium2 as pdfium
import pypdfium2.raw as raw
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from handouts import editions
from handouts.answers import answers
from handouts.build import ROOT, build
from handouts.convert import pandoc
from handouts.editions import minutes
from handouts.notebook import Notebook, Unprintable, read, without_hint
from handouts.slides import brief, slides

ALL = [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
P2P, NONBLOCKING, COLLECTIVES = (
    next(stem for stem in ALL if stem.endswith(name))
    for name in ("point_to_point", "nonblocking", "collectives")
)
STEMS = [P2P, COLLECTIVES]
TITLE = f"{COLLECTIVES[:2]} Collectives"
EDITIONS = ["student", "instructor"]
OF_ALL = ("book.pdf", "book.epub", "index.html")
MARGIN = 20 / 25.4 * 72
pytestmark = pytest.mark.fresh  # pandoc and a typesetter
ROOM = r"My prediction (\d+), and why \(answer on page (\d+)\)"


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("handouts")
    return out, build([stem[:2] for stem in STEMS], out, quiet=True)


@pytest.fixture(scope="session")
def texts(built):
    """The text of each PDF, page by page."""
    out, outcome = built
    return {
        name: [
            page.get_textpage().get_text_bounded() for page in pdfium.PdfDocument(out / name)
        ]
        for name in outcome.pages
    }


@pytest.fixture(params=STEMS)
def stem(request):
    return request.param


@pytest.fixture
def notebook(stem, tmp_path):
    return read(ROOT / "notebooks" / f"{stem}.ipynb", tmp_path)


def chapter(name, tmp_path):
    """The notebook of a chapter, whatever its number."""
    (path,) = (ROOT / "notebooks").glob(f"[0-9][0-9]_{name}.ipynb")
    return read(path, tmp_path)


def squeezed(text):
    """Without white space and the marks that let long words break."""
    return re.sub(r"[\s\u200b\u00ad]+", "", text.replace("’", "'").replace("‘", "'"))


def headings(notebook):
    return [re.sub(r"[`*]", "", p.text) for p in notebook.pieces if p.kind == "heading"]


def solution_lines(notebook):
    """The lines of the solutions that stand nowhere else in the notebook."""
    elsewhere = squeezed("\n".join(p.text for p in notebook.pieces if p.role != "solution"))
    solutions = [p.text for p in notebook.pieces if p.role == "solution" and p.kind == "code"]
    lines = {squeezed(line) for text in solutions for line in text.splitlines()}
    return {line for line in lines if len(line) > 8 and line not in elsewhere}


def test_every_form_of_every_notebook_is_there(built):
    out, outcome = built
    for stem in STEMS:
        for file in (
            *(f"{edition}/{stem}.pdf" for edition in EDITIONS),
            *(f"slides/{stem}{end}" for end in (".pdf", "_notes.pdf", ".pdfpc")),
            f"html/{stem}.html",
        ):
            assert (out / file).stat().st_size > 5_000, file
    for name, pages in outcome.pages.items():
        assert len(pdfium.PdfDocument(out / name)) == pages, name


def test_pages_are_of_a_sensible_number(built, stem, notebook):
    pages = built[1].pages
    asked = sum(p.kind == "predict" for p in notebook.pieces)
    assert 4 <= pages[f"instructor/{stem}.pdf"] <= 30
    assert pages[f"student/{stem}.pdf"] <= pages[f"instructor/{stem}.pdf"] + asked
    assert pages["student/book.pdf"] >= sum(pages[f"student/{s}.pdf"] for s in STEMS)
    assert pages[f"slides/{stem}.pdf"] >= len(headings(notebook)) + 2 * asked


def test_every_heading_is_in_every_form(built, texts, stem, notebook):
    out, _ = built
    page = html.unescape(
        re.sub(r"<[^>]+>", "", (out / f"html/{stem}.html").read_text(encoding="utf-8"))
    )
    for heading in headings(notebook):
        for edition in EDITIONS:
            for name in (f"{edition}/{stem}.pdf", f"{edition}/book.pdf"):
                assert squeezed(heading) in squeezed("".join(texts[name])), (name, heading)
        assert squeezed(heading) in squeezed(page), heading
        if heading != notebook.title:
            assert squeezed(heading) in squeezed("".join(texts[f"slides/{stem}.pdf"]))


def test_headings_are_bookmarks_and_the_contents_are_numbered(built, texts):
    def flat(outline):
        for entry in outline:
            yield from flat(entry) if isinstance(entry, list) else [entry.title]

    titles = list(flat(pypdf.PdfReader(built[0] / "student/book.pdf").outline))
    assert TITLE in titles and "2. When the two sides disagree" in titles
    contents = texts["student/book.pdf"][1]
    assert re.search(TITLE + r"[\s.]*\d+", contents)


def test_running_heads_and_page_numbers(texts):
    pages = texts[f"instructor/{COLLECTIVES}.pdf"]
    for number, text in enumerate(pages, 1):
        assert f"Instructor's edition{number}" in squeezed(text).replace(
            "sedition", "s edition"
        )
        assert TITLE in text
    assert any(text.startswith(TITLE) and "5. What it costs" in text for text in pages)


def test_students_see_no_solution_and_instructors_all(texts, stem, notebook):
    lines = solution_lines(notebook)
    assert lines
    for name, pages in texts.items():
        text = squeezed("".join(pages))
        if name.startswith("student/") or name.endswith(f"{stem}.pdf") and "slides" in name:
            assert not [line for line in lines if line in text], name
        elif name in (f"instructor/{stem}.pdf", "instructor/book.pdf"):
            assert not [line for line in lines if line not in text], name


def test_each_prediction_has_room_and_its_answer_comes_pages_later(texts, stem, notebook):
    pages = texts[f"student/{stem}.pdf"]
    count = len(answers(notebook.pieces))
    assert count == sum(p.kind == "predict" for p in notebook.pieces)
    where = {}
    for i, page in enumerate(pages, 1):
        for number, answered in re.findall(ROOM, " ".join(page.split())):
            where[int(number)] = i, int(answered)
    assert sorted(where) == list(range(1, count + 1))
    for number, (asked, answered) in where.items():
        assert answered > asked, number
        assert f"To prediction {number}" in pages[answered - 1]
    assert not any("My prediction" in page for page in texts[f"instructor/{stem}.pdf"])


def test_an_answer_goes_on_where_a_text_only_leads_to_more_cells(tmp_path):
    notebook = chapter("ddp_in_practice", tmp_path)
    late = answers(notebook.pieces)[1]
    found = [notebook.pieces[i] for i in late.pieces]
    assert [piece.kind for piece in found] == ["image", "prose", "html", "prose"]
    assert found[1].text.endswith("order in which they began:")
    assert found[3].text.startswith("The long calls are those of rank 0")
    assert notebook.pieces[late.room] is found[0]


def test_folded_answers_stand_at_the_end_of_the_students_book(tmp_path):
    notebook = chapter("at_scale", tmp_path)
    question, answer, title = "512 H100s at an MFU", "4.8 days", "Answers to the questions"
    pieces = [block["c"][-1] for block in editions.edition(notebook, editions.STUDENT)]
    texts = [text for text in pieces if isinstance(text, str)]
    asked = next(i for i, text in enumerate(texts) if question in text)
    told = [i for i, text in enumerate(texts) if answer in text]
    assert asked < texts.index(title) < told[0] and len(told) == 1
    whole = "".join(
        str(block["c"][-1]) for block in editions.edition(notebook, editions.INSTRUCTOR)
    )
    assert answer in whole and title not in whole


def test_a_slide_has_every_sentence_of_a_task(tmp_path):
    notebook = chapter("ddp_in_practice", tmp_path)
    shown = [text for on, _ in shown_on(slides(notebook)) for text in on]
    assert any("Write the worker `accuracy`" in text for text in shown)


def test_words_that_begin_something_stand_with_its_code(tmp_path):
    """Each mistake is named above the code that makes it, never below another's result."""
    for on, _ in shown_on(slides(chapter("distributed_sgd", tmp_path))):
        named = [i for i, text in enumerate(on) if text.startswith("**Mistake")]
        assert named in ([], [0])


def test_what_a_reader_is_to_change_is_not_on_a_slide(tmp_path):
    found = list(shown_on(slides(chapter("sharding", tmp_path))))
    assert not any("**Change" in text for on, _ in found for text in on)
    assert any("**Change" in said for _, said in found)


def test_a_nearly_empty_slide_has_more_of_its_paragraph(tmp_path):
    shown = slides(chapter("ddp_reducer", tmp_path))
    pieces = [b["c"] for block in shown for b in block["c"][1] if b["t"] == "CodeBlock"]
    told = [(dict(pairs).get("more", ""), text) for (_, _, pairs), text in pieces]
    more = [(longer, text) for longer, text in told if longer]
    assert more and all(len(text) < len(longer) for longer, text in more)
    assert all(len(longer.split()) <= 120 for longer, _ in more)


def test_instructors_get_timing_and_teaching_notes(texts, stem, notebook):
    text = squeezed("".join(texts[f"instructor/{stem}.pdf"]))
    notes = {p.about["note"] for p in notebook.pieces if "note" in p.about}
    assert notes and "PLANOFTHELESSON" in text
    for note in notes:
        assert squeezed(re.sub(r"[`*]", "", note)) in text.replace("-", "") or (
            squeezed(re.sub(r"[`*]", "", note))[:40] in text
        )
    times = minutes(notebook)
    assert sum(time for time, _ in times.values()) == notebook.minutes
    for time, _ in times.values():
        assert not time or f"about{time}min" in text
    student = squeezed("".join(texts[f"student/{stem}.pdf"]))
    assert "FORTHEINSTRUCTOR" not in student and "PLANOFTHELESSON" not in student


def ink_outside(page, left):
    """The characters of a page that stand in its margins; white space has no ink."""
    width, height = page.get_size()
    text = page.get_textpage()
    lines = [text.get_rect(i) for i in range(text.count_rects())]
    if all(left - 1 <= x0 and x1 <= width - left + 1 for x0, _, x1, _ in lines):
        return [y for _, y, _, top in lines if y < 0 or top > height]
    boxes = [
        (text.get_text_range(i, 1), text.get_charbox(i)) for i in range(text.count_chars())
    ]
    return [
        (mark, box)
        for mark, box in boxes
        if mark.strip() and not (left - 1 <= box[0] and box[2] <= width - left + 1)
    ]


def test_nothing_runs_off_a_page(built):
    out, outcome = built
    for name in outcome.pages:
        slide = name.startswith("slides/") and not name.endswith("_notes.pdf")
        for number, page in enumerate(pdfium.PdfDocument(out / name), 1):
            assert not ink_outside(page, 36 if slide else MARGIN), (name, number)


def words_of_fonts(out, name):
    """Each text object of a PDF: its words, its font, and its size on the page."""
    for page in pdfium.PdfDocument(out / name):
        kinds = {"filter": [raw.FPDF_PAGEOBJ_TEXT], "textpage": page.get_textpage()}
        for thing in page.get_objects(max_depth=9, **kinds):
            yield (
                thing.extract(),
                thing.get_font(),
                thing.get_font_size() * thing.get_matrix().d,
            )


def test_fonts_are_embedded(built):
    out, outcome = built
    for name in outcome.pages:
        fonts = {
            font.get_base_name(): font.is_embedded for _, font, _ in words_of_fonts(out, name)
        }
        assert len(fonts) >= 2 and all(fonts.values()), (name, fonts)
        assert not [font for font in fonts if "LastResort" in font]


def objects(reader, kind):
    for number in sorted({*reader.xref.get(0, {}), *reader.xref_objStm}):
        thing = reader.get_object(number)
        if isinstance(thing, dict) and thing.get("/Type") == kind:
            yield thing


def test_every_picture_has_alternative_text_and_caption(built, texts, stem, notebook):
    reader = pypdf.PdfReader(built[0] / f"instructor/{stem}.pdf")
    figures = [e for e in objects(reader, "/StructElem") if e.get("/S") == "/Figure"]
    pictures = [p for p in notebook.pieces if p.kind == "image"]
    frames = sum(p.text.count("<figure") for p in notebook.pieces if p.kind == "html")
    assert pictures and len(figures) == len(pictures) + frames
    assert all(len(figure["/Alt"]) > 10 for figure in figures)
    text = squeezed("".join(texts[f"instructor/{stem}.pdf"]))
    number = int(stem[:2])
    for piece in pictures:
        assert squeezed(piece.caption) in text, piece.caption
    strips = sum("<figure" in p.text for p in notebook.pieces if p.kind == "html")
    for i in range(1, len(pictures) + strips + 1):
        assert f"Figure{number}.{i}." in text


def test_drawings_and_tables_are_vector(built, notebook, stem):
    plots = [p for p in notebook.pieces if p.kind == "image" and p.text.endswith("png")]
    pages = pdfium.PdfDocument(built[0] / f"instructor/{stem}.pdf")
    bitmaps = [
        thing
        for page in pages
        for thing in page.get_objects(filter=[raw.FPDF_PAGEOBJ_IMAGE], max_depth=9)
    ]
    assert len(bitmaps) == len(plots)


def test_links_to_other_notebooks_lead_inside_the_book(built):
    out, _ = built

    def targets(name):
        for page in pypdf.PdfReader(out / name).pages:
            for annotation in page.get("/Annots", []):
                action = annotation.get_object()
                yield action.get("/A", {}).get("/URI") or "inside"

    book, alone = (
        list(targets("student/book.pdf")),
        list(targets(f"student/{COLLECTIVES}.pdf")),
    )
    assert "inside" in book and f"{P2P}.pdf" not in book
    assert f"{P2P}.pdf" in alone and f"{NONBLOCKING}.pdf" in book
    assert "../html/benchmarks.html" not in book
    assert any(uri.startswith("https://docs.pytorch.org") for uri in alone)


def test_references_in_print_name_their_page(texts):
    pages = texts["student/book.pdf"]
    start = next(
        i
        for i, page in enumerate(pages)
        if page.startswith(f"{P2P[:2]} Point to point") and i > 1
    )
    assert f"{P2P[:2]} (p. {start + 1})" in re.sub(r"\s+", " ", "".join(pages))


def test_poppler_agrees_that_fonts_are_embedded(built):
    if not shutil.which("pdffonts"):
        pytest.skip("needs poppler's pdffonts")
    out, outcome = built
    for name in outcome.pages:
        command = ["pdffonts", out / name]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[
            2:
        ]
        assert lines and all(line.split()[-5] == "yes" for line in lines), name


def test_slides_show_code_large_and_the_steps_one_by_one(built, texts):
    out = built[0]
    sizes = {
        round(size, 1)
        for text, font, size in words_of_fonts(out, f"slides/{COLLECTIVES}.pdf")
        if "Mono" in font.get_base_name() and text.strip()
    }
    assert min(sizes) >= 15 and max(sizes) >= 18  # of a height of 540
    for page in pdfium.PdfDocument(out / f"slides/{COLLECTIVES}.pdf"):
        assert page.get_size() == (960, 540)
    steps = [re.search(r"\bstep (\d)\b", text) for text in texts[f"slides/{COLLECTIVES}.pdf"]]
    found = [(i, int(step[1])) for i, step in enumerate(steps) if step]
    assert [step for _, step in found] == list(range(7))
    assert [i for i, _ in found] == list(range(found[0][0], found[0][0] + 7))


def test_a_prediction_is_asked_before_its_answer_is_shown(texts):
    pages = texts[f"slides/{P2P}.pdf"]
    asked = next(i for i, page in enumerate(pages) if "what an int32 buffer holds" in page)
    assert "1065353216" not in pages[asked] and "1065353216" in pages[asked + 1]


def test_speakers_have_notes(built, stem, notebook, texts):
    said = json.loads((built[0] / f"slides/{stem}.pdfpc").read_text(encoding="utf-8"))[
        "pages"
    ]
    assert len(said) == built[1].pages[f"slides/{stem}.pdf"]
    spoken = "\n".join(page["note"] for page in said)
    notes = "".join(texts[f"slides/{stem}_notes.pdf"])
    for piece in notebook.pieces:
        if piece.kind == "prose" and brief(piece.text) != piece.text:
            assert piece.text in spoken
        if piece.role == "solution" and piece.kind == "code":
            assert piece.text in spoken
    assert "For the instructor" in spoken and squeezed("Solution:") in squeezed(notes)


def test_web_pages_need_nothing_else(built, stem, notebook):
    out, _ = built
    text = (out / f"html/{stem}.html").read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|srcset)="(?!data:)[^"]*"', text)
    assert not re.findall(r"<link\b|@import|<script\b", text)
    assert text.count('src="data:image/svg+xml') >= sum(
        p.text.endswith("svg") for p in notebook.pieces if p.kind == "image"
    )
    solutions = re.findall(r"<details><summary>Solution</summary>.*?</details>", text, re.S)
    assert len(solutions) == len({p.cell for p in notebook.pieces if p.role == "solution"})
    assert "<details><summary>Hint</summary>" in text
    assert ("<math" in text) == any(
        "$" in p.text for p in notebook.pieces if p.kind == "prose"
    )
    for link in re.findall(
        r'href="([^"#:]+)', (out / "html/index.html").read_text(encoding="utf-8")
    ):
        assert (out / "html" / link).resolve().exists(), link


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("file", ["paper.tmTheme", "html.theme", "common.typ"])
def test_colours_hold_in_grey(file):
    """Each stands out from the darkest ground that it is printed on as text must."""
    text = (ROOT / "handouts" / file).read_text(encoding="utf-8")
    ground = luminance("#f4f4f2")
    colours = set(re.findall(r"#[0-9a-f]{6}\b", text)) - {"#ffffff", "#f4f4f2"}
    assert len(colours) >= 3
    for colour in colours:
        assert (ground + 0.05) / (luminance(colour) + 0.05) >= 4.5, colour


# Faults, on a tiny notebook -------------------------------------------------------------


def tiny(folder, text="Text.", outputs=(), name="00_tiny", **metadata):
    (folder / "notebooks").mkdir(exist_ok=True, parents=True)
    first = new_markdown_cell("# Title\n\nAbout 5 minutes.\n\n## 1. One")
    cells = [first, new_markdown_cell(text, metadata=metadata)]
    cells.append(new_code_cell("1 + 1", outputs=list(outputs)))
    nbformat.write(new_notebook(cells=cells), folder / "notebooks" / f"{name}.ipynb")
    return folder / "notebooks"


def drawing(width, words="words"):
    text = f"<text x='9' y='20' font-size='13' font-family='Arial'>{words}</text>"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='30'>"
    svg = f"{head}<title>A drawing of a test</title>{text}</svg>"
    return new_output("display_data", data={"image/svg+xml": svg, "text/plain": "x"})


def shown(**forms):
    return new_output(
        "display_data", data={k.replace("__", "/"): v for k, v in forms.items()}
    )


LIVE = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "Box()"}
SUM = "$$" + " + ".join("abcdefghijklmnopqrstuvwxyz" * 3) + "$$"


def test_what_belongs_to_the_lab_stays_out_of_a_handout(tmp_path):
    """The links below a listing, the plate of a verdict, the first line of a solution."""
    verdict = {"text/html": ' \n<div class="verdict"><b>x</b></div>', "text/plain": "correct"}
    listing = {"text/markdown": "```python\na = [1](2)\n```\n\n[a/b.py](../a/b.py)"}
    listing |= {"text/html": "<pre>for JupyterLab</pre>"}
    cell = new_code_cell(
        "%%solution (click to open)\na = 1",
        outputs=[new_output("display_data", data=data) for data in (verdict, listing)],
        metadata={"tags": ["solution"]},
    )
    nbformat.write(new_notebook(cells=[cell]), tmp_path / "00_lab.ipynb")
    pieces = read(tmp_path / "00_lab.ipynb", tmp_path / "media").pieces
    assert [(piece.kind, piece.text) for piece in pieces] == [
        ("code", "a = 1"),
        ("text", "correct"),
        ("listing", "```python\na = [1](2)\n```"),
    ]


@pytest.mark.parametrize(
    "cell, says, text, outputs",
    [
        (2, '`"漢"` could not be displayed', "The sign 漢.", []),
        (3, '`"漢"` could not', "Text.", [new_output("stream", name="stdout", text="漢\n")]),
        (3, '`"漢"` could not be displayed', "Text.", [drawing(200, "漢")]),
        (3, "a picture runs off the page: only 21 %", "Text.", [drawing(3000)]),
        (3, "has no printable form", "Text.", [new_output("display_data", data=LIVE)]),
        (3, "has no printable form", "Text.", [shown(text__html="<script>1</script>")]),
        (3, "has no printable form", "Text.", [shown(text__html="<div></div>")]),
        (3, "has no printable form", "Text.", [shown(text__plain="<a.B at 0x7f00>")]),
        (2, "a link leads nowhere: 01_gone.ipynb", "See [it](01_gone.ipynb).", []),
        (2, "no such heading: #Two", "See [it](#Two).", []),
        (2, "no such picture: gone.png", "![a picture](gone.png)", []),
        (2, "a formula is", SUM, []),
    ],
)
def test_a_fault_stops_the_build_with_its_place(tmp_path, cell, says, text, outputs):
    notebooks = tiny(tmp_path, text, outputs)
    with pytest.raises(Unprintable) as caught:
        build([], tmp_path / "build", notebooks, quiet=True)
    line = next(line for line in str(caught.value).split("\n") if f", cell {cell}:" in line)
    assert line.startswith("notebooks/00_tiny.ipynb") and says in line


def test_only_what_changed_is_built_again(tmp_path):
    notebooks = tiny(tmp_path)
    tiny(tmp_path, "See [the first](00_tiny.ipynb#1.-One).", name="01_other")
    first = build([], tmp_path / "build", notebooks, quiet=True)
    again = build([], tmp_path / "build", notebooks, quiet=True)
    assert len(first.built) == len(again.kept) and again.built == []
    assert again.pages == first.pages
    tiny(tmp_path, "Another text.", name="01_other")
    third = build([], tmp_path / "build", notebooks, quiet=True)
    names = {path.name for path in third.built}
    assert names and all("01_other" in name or name in OF_ALL for name in names)
    (notebooks / "01_other.ipynb").unlink()
    build([], tmp_path / "build", notebooks, quiet=True)
    assert not list((tmp_path / "build").rglob("01_other*.pdf*"))


def test_long_lines_wrap_and_hints_fold(tmp_path):
    long = "x" * 300 + " " + "word " * 60 + "end"
    notebooks = tiny(
        tmp_path,
        "<details><summary>Hint</summary>\n\nInside *it*.\n\n</details>",
        [new_output("stream", name="stdout", text=long)],
    )
    build([], tmp_path / "build", notebooks, quiet=True)
    for edition in EDITIONS:
        pages = pdfium.PdfDocument(tmp_path / f"build/{edition}/00_tiny.pdf")
        text = squeezed("".join(p.get_textpage().get_text_bounded() for p in pages))
        assert squeezed(long) in text and "HintInsideit." in text
    page = (tmp_path / "build/html/00_tiny.html").read_text(encoding="utf-8")
    assert re.search(r"<details>\s*<summary>Hint</summary>\s*<p>Inside", page)


def test_a_formula_may_have_dots(tmp_path):
    """A name of the template that is also one of Typst's in formulas would hide it."""
    build([], tmp_path / "build", tiny(tmp_path, r"From $1, \dots, n$."), quiet=True)
    for edition in EDITIONS:
        pages = pdfium.PdfDocument(tmp_path / f"build/{edition}/00_tiny.pdf")
        assert "…" in "".join(p.get_textpage().get_text_bounded() for p in pages)


def shown_on(blocks):
    """Of each slide the pieces that stand on it, and what is said."""
    for block in blocks:
        (_, _, attributes), inside = block["c"]
        texts = [b["c"][1] for b in inside if b["t"] == "CodeBlock"]
        yield texts, dict(attributes)["plain"]


@pytest.mark.parametrize(
    "metadata, on_slide, said",
    [
        ({}, ["First. ", "1 + 1"], ""),
        ({"slideshow": {"slide_type": "skip"}}, ["1 + 1"], ""),
        ({"slideshow": {"slide_type": "notes"}}, ["1 + 1"], "First."),
        ({"handout": {"slide": "*Short*"}}, ["*Short*", "1 + 1"], "First."),
        ({"handout": {"note": "Ask."}}, ["First.", "1 + 1"], "Ask."),
    ],
)
def test_metadata_overrides_the_rules_of_slides(tmp_path, metadata, on_slide, said):
    output = new_output("stream", name="stdout", text="2")
    notebooks = tiny(tmp_path, "First.", [output], **metadata)
    found = list(shown_on(slides(read(notebooks / "00_tiny.ipynb", tmp_path))))
    assert [text.strip() for text in found[-1][0][:-1]] == [t.strip() for t in on_slide]
    assert said in "".join(notes for _, notes in found)


def test_a_slide_shows_the_first_sentences_of_a_paragraph():
    text = "It hangs, see `a. B`. " + "Each word of the message is long and matters. " * 4
    assert brief(text) == " ".join(text.split()[: 5 + 2 * 9])
    assert brief("- a list\n- of items " + "word " * 40).endswith("word ")
    assert brief("Short. Whole.") == "Short. Whole."
    long = "Word " * 90
    items = f"- **What it is.** {long}\n- First words, which {'are ' * 15}few. {long}\n"
    assert brief(items) == f"- **What it is.**\n- First words, which {'are ' * 15}few."


def test_normalising_a_notebook_keeps_what_the_handouts_need(tmp_path):
    from tools.store import normalise

    notebooks = tiny(
        tmp_path, slideshow={"slide_type": "skip"}, handout={"note": "n", "caption": "c"}
    )
    path = notebooks / "00_tiny.ipynb"
    before = nbformat.read(path, 4).cells[1].metadata
    normalise(path)
    assert nbformat.read(path, 4).cells[1].metadata == before != {}


def test_the_filter_refuses_what_it_does_not_know():
    unknown = {"t": "CodeBlock", "c": [["", ["surprise"], [["where", "here"]]], "text"]}
    meta = {"file": "x", "folder": "", "id": "x", "chapter": "", "root": "", "links": []}
    with pytest.raises(Unprintable, match="surprise|nil"):
        pandoc([unknown], meta, "-t", "typst")


def test_a_notebook_has_one_title_and_its_minutes(notebook):
    assert isinstance(notebook, Notebook) and notebook.minutes >= 10
    assert Path(notebook.path).stem == notebook.id


@pytest.mark.parametrize(
    "source, shown",
    [
        ('check(\n    f,\n    1,\n    hint="so",\n)', "check(\n    f,\n    1,\n)"),
        ('x = ...\ncheck(x, [1], hint="so")', "x = ...\ncheck(x, [1])"),
        ('check(x, [1], hint="s" "o")', "check(x, [1])"),
        ('check("é", hint="so")', 'check("é")'),
        ('check(x, hint="so", name="x")', 'check(x, name="x")'),
        ('check(\n    x, hint="so", name="x"\n)', 'check(\n    x, name="x"\n)'),
    ],
)
def test_a_hint_does_not_stand_in_the_exercise(source, shown):
    assert without_hint(source) == (shown, "so")


def test_an_exercise_without_a_hint_stays_as_it_is():
    for source in ('hint = "so"\ncheck(x, 1, hint=hint)', "check(x, 1)", "x = 1"):
        assert without_hint(source) == (source, "")
