"""The web pages in a real browser: nobody is shut out, and no page scrolls sideways.

axe-core, which comes through npm, looks for violations of WCAG 2.1 AA; AXE names another.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from urllib.parse import unquote

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell
from pypdf import PdfReader

from conftest import ROOT
from handouts.build import Plan
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP
from mgpu_tutorial.instruments.price import explore, price
from mgpu_tutorial.instruments.price.sliders import words
from tests.handouts.conftest import shown, write
from tests.instruments.price.test_sliders import train
from tests.lab.draw import test_sliders as small

AXE = Path(os.environ.get("AXE", ROOT / ".venv" / "axe-core" / "package" / "axe.min.js"))
CONTRAST = (Path(__file__).parent / "contrast.js").read_text("utf-8")
LETTERS = r"""all => all.filter(e => e.width && e.src.startsWith("data:image/svg")).map(e => {
  const [head, data] = e.src.split(/,(.*)/s);
  const svg = head.includes("base64") ? atob(data) : decodeURIComponent(data);
  const sizes = [...svg.matchAll(/font-size=['"]([\d.]+)/g)].map(found => Number(found[1]));
  return Math.min(...sizes, 99) * Math.min(1, e.width / e.naturalWidth);
})"""  # the size of the smallest, as it is seen
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """The folder of the web pages that are looked at, without the other forms."""
    out = tmp_path_factory.mktemp("pages")
    jobs = Plan(out, (), ROOT / "notebooks").pages()
    looked_at = {"index", "readme", *NAMES}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each waits for its pandoc
        for make, given, path in jobs:
            if path.stem in looked_at:
                pool.submit(make, *given, path)
    assert {path.stem for path in out.glob("*.html")} == looked_at
    return out


@pytest.fixture
def page(browser):
    window = browser.new_page()
    window.said = []
    window.on("pageerror", lambda error: window.said.append(str(error)))
    window.on("console", lambda said: said.type == "error" and window.said.append(said.text))
    yield window
    assert not window.said
    window.close()


@pytest.mark.parametrize("name", ["index", "readme", *NAMES])
@pytest.mark.parametrize("width, scheme", [(390, "light"), (1280, "dark")])
def test_a_page_is_for_everybody(page, pages, name, width, scheme):
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto((pages / f"{name}.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate(CONTRAST) == {}
    if AXE.is_file():  # npm pack axe-core
        page.add_script_tag(path=AXE)
        found = page.evaluate("rules => axe.run(document, {runOnly: rules})", RULES)
        assert found["violations"] == []


@pytest.mark.parametrize("name", ["03_collectives", "15_sharding"])
def test_a_film_is_stepped_by_the_keyboard_alone(page, pages, name):
    page.set_viewport_size({"width": 390, "height": 900})
    page.goto((pages / f"{name}.html").as_uri())
    for summary in page.locator("details.answer:has(.film) > summary").all():
        summary.press("Enter")  # a film that answers a prediction is folded away
    film, press = page.locator(".film").first, page.keyboard.press
    last = film.locator("figure").count() - 1

    def tab():
        press("Tab")
        style = page.evaluate("Object.assign({}, getComputedStyle(document.activeElement))")
        return style["outlineStyle"] != "none" and int(style["outlineWidth"][0]) >= 2

    def shows(step):
        alone = film.locator("figure:visible")
        right = alone.bounding_box()["x"] + alone.bounding_box()["width"]
        assert f"Step {step}." in alone.locator("img").get_attribute("alt") and right <= 390
        assert film.locator("span").inner_text() == f"step {step} of {last}"

    while not page.evaluate("Boolean(document.activeElement.closest('.film'))"):
        press("Tab")
    shows(0)
    assert tab()  # to the slider
    press("ArrowRight")
    shows(1)
    press("End")
    shows(last)
    assert tab() and tab()  # over "one step on" to "play"
    press("Enter")  # at the end it begins again
    shows(0)
    page.wait_for_timeout(1700)
    shows(1)
    press("Enter")
    page.wait_for_timeout(1700)
    shows(1)
    assert tab()  # to the picture
    press("ArrowLeft")
    shows(0)
    press("ArrowLeft")
    shows(0)


def test_a_square_travels_along_each_arrow_of_the_next_step(page, pages):
    page.goto((pages / "21_long_sequences.html").as_uri())
    film = page.locator(".film", has_text="of 2")  # tokens for heads
    moving = film.locator(".screen svg rect")
    for motion, squares in ("reduce", 0), ("no-preference", 12):
        page.emulate_media(reduced_motion=motion)
        for _ in range(2):
            film.get_by_label("one step on").click()
            page.wait_for_timeout(200)
            assert moving.count() == squares
            page.wait_for_timeout(800)
            assert moving.count() == 0
        film.get_by_label("one step back").click()
        film.get_by_label("one step back").click()
        page.wait_for_timeout(200)
        assert moving.count() == 0


def test_where_no_script_runs_a_film_stands_still_until_it_is_asked_to_play(browser, pages):
    page = browser.new_page(java_script_enabled=False)
    page.goto((pages / "03_collectives.html").as_uri())
    for summary in page.locator("details.answer:has(.film) > summary").all():
        summary.click()
    film = page.locator(".film").first
    film.scroll_into_view_if_needed()

    def seen(picture):
        shots = set()
        for _ in range(3):
            shots.add(picture.screenshot())
            page.wait_for_timeout(1600)
        return len(shots)

    assert seen(film.locator("> *").first) == 1
    film.locator("summary").first.click()
    assert seen(film.locator("details[open] img")) == 3
    film.locator("summary").first.click()
    film.locator("summary").nth(1).click()
    assert film.locator("figure img:visible").count() == 7
    film.locator("summary").last.click()
    assert "rank 3: chunk 0 {3}" in film.locator("pre:visible").inner_text()
    page.close()


def test_the_keyboard_stops_only_at_what_is_wider_than_its_place(page, pages):
    page.goto((pages / "03_collectives.html").as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    reached = """() => [...document.querySelectorAll("main [tabindex='0']:not(.screen)")]
      .map(e => e.scrollWidth - e.clientWidth)"""
    page.set_viewport_size({"width": 1280, "height": 900})
    page.wait_for_timeout(300)
    assert all(more > 0 for more in page.evaluate(reached))
    few = len(page.evaluate(reached))
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_timeout(300)
    assert len(page.evaluate(reached)) > few


def test_a_card_of_the_index_is_one_link_with_a_picture(page, pages):
    page.goto((pages / "index.html").as_uri())
    cards = page.locator(".text > ol > li")
    assert cards.count() == len(NAMES)
    for card, name in zip(cards.all(), NAMES, strict=True):
        assert [a.get_attribute("href") for a in card.locator("a").all()] == [f"{name}.html"]
    decode = (
        "all => Promise.all(all.map(e => (e.loading = 'eager', e.decode().then(() => 1))))"
    )
    shown = cards.locator("img").evaluate_all(decode)
    assert len(shown) > 20 and page.locator("th:empty").count() == 0


def test_the_search_finds_a_section_and_says_so(page, pages):
    page.goto((pages / "index.html").as_uri())
    page.get_by_label("Search all chapters").fill("(no such [word")
    assert "Nothing was found." in page.locator("#found").inner_text()
    page.get_by_label("Search all chapters").fill("ring all_reduce")
    assert "Collectives" in page.locator("#found").inner_text()
    assert page.locator("#found mark").count() > 0
    titles = {}
    for sought in ("hang", "all_reduce", "allreduce", "fsdp", "out of memory", "aults"):
        page.get_by_label("Search all chapters").fill(sought)
        assert page.locator("#found mark").count() > 0, sought
        titles[sought] = page.locator("#found a").all_inner_texts()
    marks = page.locator("#found mark").all_inner_texts()
    assert {mark.lower() for mark in marks} == {"aults"}  # inside, where no word begins so
    page.get_by_label("Search all chapters").fill("hang")
    for text in page.locator("#found p").all_inner_texts()[1:]:
        assert re.search(r"(?<![a-z])(hang|deadlock)", text, re.I), text  # and not a change
    texts = page.evaluate("sections.map(section => ' ' + section[4] + ' ')")
    for text in page.locator("#found p").all_text_contents()[1:]:  # no word is cut
        assert any(f" {text.strip(' …')} " in whole for whole in texts), text
    assert titles["all_reduce"] == titles["allreduce"]
    assert any("ully" in title for title in titles["fsdp"])
    page.locator("#found a").first.click()
    assert page.locator("nav.toc").count() == 1


TYPED = {  # and one of the first three pages that it should lead to
    "slurm": "machines",
    "bf16": "13_",
    "zero": "15_",
    "ddp": "08_",
    "context parallel": "21_",
    "multi-node": "12_",
    "fsdp": "16_",
    "load balancing": "22_",
    "install": "readme",
    "colab": "gpus",
    "windows": "readme",
    "fp8": "13_",
    "mfu": "24_",
    "kubernetes": "machines",
}


def test_the_words_that_people_type_lead_somewhere(page, pages):
    page.goto((pages / "03_collectives.html").as_uri())
    page.get_by_label("Search all chapters").first.fill("slurm")
    page.keyboard.press("Enter")  # from a chapter to the index, which searches at once
    page.locator("#found a").first.wait_for()
    missed = {}
    for typed, name in TYPED.items():
        page.get_by_label("Search all chapters").fill(typed)
        links = page.locator("#found a").evaluate_all("all => all.map(a => a.pathname)")
        files = list(dict.fromkeys(link.rpartition("/")[2] for link in links))
        if not any(file.startswith(name) for file in files[:3]):
            missed[typed] = files[:3]
    assert not missed
    page.get_by_label("Search all chapters").fill("rank")
    few = page.locator("#found li").count()
    page.get_by_role("button", name="show all").click()
    assert page.locator("#found li").count() > few
    page.get_by_label("Search all chapters").fill("ddp")
    page.keyboard.press("Enter")
    page.wait_for_url("**/08_*.html*")


def test_a_picture_moves_only_when_it_is_asked_to_and_stops(page, pages):
    page.goto((pages / "index.html").as_uri())
    picture, play = page.locator("img.moves").first, page.locator(".moving button").first
    before = picture.get_attribute("src")
    play.click()
    assert picture.get_attribute("src") != before and play.inner_text() == "stop"
    play.click()
    assert picture.get_attribute("src") == before and "play" in play.inner_text()


def test_code_is_copied_and_a_heading_has_a_link(page, pages):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto((pages / "03_collectives.html").as_uri())
    page.locator(".copies").first.hover()
    page.locator(".copies > button").first.click()
    page.locator(".copies > button", has_text="copied").wait_for()
    assert "import launch" in page.evaluate("navigator.clipboard.readText()")
    numbered = page.evaluate(r"bare('9  class A:\n10  \n\n12      x = 1\n')")
    assert numbered == "class A:\n\n\n    x = 1\n"
    heading = page.locator("h2").nth(1)
    heading.hover()
    heading.get_by_label("Link to this section").click()
    assert page.evaluate(
        "decodeURIComponent(location.hash.slice(1))"
    ) == heading.get_attribute("id")
    page.locator("nav.toc [aria-current]").wait_for()


def test_what_a_drawing_says_can_be_read_on_a_phone(page, pages):
    """Nine pixels at least, but where it was drawn smaller; what is wider is scrolled."""
    page.set_viewport_size({"width": 390, "height": 900})
    for name in ("00_processes_and_ranks", "03_collectives", "04_the_machine", "15_sharding"):
        page.goto((pages / f"{name}.html").as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        letters = page.locator(".picture img, .explore .screen img").evaluate_all(LETTERS)
        assert letters and min(letters) > 8.8, name
        film = page.locator(".film .picture").first
        assert film.evaluate("e => getComputedStyle(e).overflowX") == "auto"


def test_on_a_phone_the_sections_go_with_the_reader(page, pages):
    page.set_viewport_size({"width": 390, "height": 900})
    page.goto((pages / "03_collectives.html").as_uri())
    page.evaluate("scrollTo(0, 8000)")
    fold = page.locator("nav.toc summary")
    fold.click()
    link = page.locator("nav.toc a", has_text="What it costs")
    link.click()
    assert not link.is_visible() and fold.bounding_box()["y"] < 20
    page.locator("nav.toc summary", has_text="What it costs").wait_for()
    below = fold.bounding_box()["y"] + fold.bounding_box()["height"]
    assert page.locator("h2", has_text="What it costs").bounding_box()["y"] >= below


@pytest.mark.parametrize("script", [True, False])
def test_on_paper_folds_are_open_and_nothing_asks_to_be_pressed(browser, pages, script):
    page = browser.new_page(java_script_enabled=script)
    page.goto((pages / "03_collectives.html").as_uri())
    pdf = PdfReader(BytesIO(page.pdf(format="A4")))
    text = " ".join(" ".join(each.extract_text() for each in pdf.pages).split())
    assert "Gloo compares the kind of the calls" in text  # an answer, folded away on the page
    assert "sending.wait()" in text and "1.29999995" in text  # a solution, an output
    for word in ("copy", "play", "Search", "Other forms", "On this page"):
        assert not re.search(rf"\b{word}\b(?! the steps)", text), word
    page.emulate_media(media="print", color_scheme="dark")
    assert (
        page.locator("body").evaluate("e => getComputedStyle(e).color") == "rgb(26, 26, 26)"
    )
    if script:
        assert page.locator("main .text details[open]").count() == 0  # as before
        assert all(f"step {i}" in text for i in range(7))  # of a film
    page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_what_is_clicked_is_large_enough(page, pages, width):
    """WCAG 2.2: 24 pixels, but for links in a sentence; and each has a name."""
    page.set_viewport_size({"width": width, "height": 900})
    page.goto((pages / "03_collectives.html").as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    pressed = "button, input, summary, nav a, details.forms a, a.here"
    small = page.locator(pressed).evaluate_all(
        """all => all.map(e => [e.outerHTML.slice(0, 80), e.getBoundingClientRect()])
          .filter(([, box]) => box.width && Math.min(box.width, box.height) < 24)"""
    )
    assert small == []
    names = page.locator(".film .bar :is(button, input), .explore input").evaluate_all(
        "all => all.map(e => e.ariaLabel ?? e.closest('label')?.innerText ?? e.innerText)"
    )
    assert len(names) > 8 and all(re.search("[a-z]", name) for name in names)


@pytest.fixture(params=["light", "dark"])
def moving(page, tmp_path, request):
    """Opens a page with the sliders that a cell has shown, narrow, in light and in dark."""

    def opened(html):
        head = "# Title\n\nA reason. **is it seven?** About 5 minutes."
        cells = [new_markdown_cell(head), new_code_cell("x", outputs=shown(html))]
        folder = write(tmp_path, cells).parent
        for make, given, path in Plan(tmp_path / "out", (), folder).pages():
            make(*given, path)
        page.set_viewport_size({"width": 390, "height": 900})
        page.emulate_media(color_scheme=request.param)
        page.goto((tmp_path / "out" / "00_small.html").as_uri())
        return page.locator(".explore")

    return opened


def test_the_sliders_of_a_price_replay_it_in_the_page(page, moving):
    explored = explore(price(train, 4, BucketedDDP, tokens=2**20))
    place = moving(explored.still())
    assert place.locator("svg text").first.is_visible() and place.locator("img").count() == 0
    names = list(explored.sliders)
    said = page.locator(".explore p").inner_text
    before = said()
    place.locator("input").nth(names.index("inside")).press("Home")
    slow = explored.at(inside=explored.sliders["inside"].values[0])
    assert before == words(explored.at()) and said() == words(slow)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_sliders_show_the_frame_that_was_drawn_for_their_setting(page, moving):
    place = moving(small.moved()._repr_mimebundle_()["text/html"])

    def shows(ranks, link, *labels):
        drawing = small.draw(ranks, link)
        picture = place.locator("img")
        assert picture.count() == 1 and picture.is_visible()
        _, svg = picture.get_attribute("src").split(",", 1)
        assert unquote(svg) == small.without_title(drawing)
        assert picture.get_attribute("alt") == drawing.alt == place.locator("p").inner_text()
        assert place.locator("output").all_inner_texts() == [*labels]

    shows(2, 7, "2", "fast < 10")
    page.get_by_label("ranks").press("End")
    shows(1000, 7, "1,000", "fast < 10")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowLeft")  # the link
    shows(1000, 2, "1,000", "slow")
    assert page.get_by_label("the link").get_attribute("aria-valuetext") == "slow"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "screen"
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
