"""What the README and its neighbours say holds, and every picture has words."""

import ast
import io
import re
import tokenize
from pathlib import Path

import nbformat
import pytest

from mgpu_tutorial import __version__
from tools.open_jupyterlab import arguments

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
TEXTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
ROOMS = "mgpu_tutorial", "tests", "tools", "handouts", "benchmarks"
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_picture_has_words_for_who_does_not_see_it(path):
    """Drawings carry them; a PNG has them as its text, which books and web pages take."""
    for cell in nbformat.read(path, 4).cells:
        shown = [output.get("data", {}) for output in cell.get("outputs", [])]
        pages = [cell.source, *(data.get("text/html", "") for data in shown)]
        for image in re.findall(r"<img\b[^>]*>", "".join(pages)):
            assert re.search(r'alt="[^"]{8,}"', image), image[:80]
        for alt in re.findall(r"!\[([^\]]*)\]\(", cell.source):
            assert len(alt) > 10, cell.source
        for data in shown:
            if "image/png" in data and "text/html" not in data:
                assert re.match(r"(?s)[^<\s].{14}", data["text/plain"]), data["text/plain"]
            if "image/svg+xml" in data:
                assert re.search(r"<title>[^<]{10,}</title>", data["image/svg+xml"])


@pytest.mark.parametrize("path", [*NOTEBOOKS, *TEXTS], ids=lambda path: path.stem)
def test_per_cents_are_written_as_the_code_prints_them(path):
    """70%, in prose too, so that a text and the table under it look alike."""
    texts = [path.read_text(encoding="utf-8")]
    if path.suffix == ".ipynb":
        cells = nbformat.read(path, 4).cells
        texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    found = [m[0] for text in texts for m in re.finditer(r".{0,30}\d %", text)]
    assert not found


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_of_the_texts_lead_to_files(path):
    """To files: JupyterLab, where the README is the first page, cannot open a folder."""
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        assert link.startswith("https://") or (path.parent / link).is_file(), link


def test_the_figures_of_the_readme_hold():
    counts = dict.fromkeys(("exercises", "outputs", "predictions"), 0)
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, 4).cells:
            tags = cell.metadata.get("tags", [])
            counts["exercises"] += "exercise" in tags
            counts["predictions"] += "**Predict" in cell.source
            if "nbval-ignore-output" not in tags:  # which are run, but not compared
                counts["outputs"] += len(cell.get("outputs", []))
    said = " ".join(README.split("## What is in it")[1].split("\n## ")[0].split())
    for thing, pattern in {
        "exercises": r"more than (\d+) exercises",
        "outputs": r"more than (\d+) stored outputs",
        "predictions": r"more than (\d+) predictions",
    }.items():
        assert counts[thing] > int(re.search(pattern, said)[1]), thing
    faults = len(list((ROOT / "docs/zoo").glob("*.py")))
    assert f"has {faults} faults" in said
    measured = (ROOT / "benchmarks/README.md").read_text("utf-8")
    for way in "launch", "torchrun":
        seconds = float(re.search(rf"\| `{way}` \| \d+ \| ([\d.]+) \|", measured)[1])
        assert re.search(rf"\b{seconds:.1g} s\b|\b{seconds:.1f} s\b", said), way


NUMBERS = ["six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def test_the_findings_and_the_hours_are_counted():
    """What README and the path say: findings of a chapter in a word, hours rounded."""
    for path in NOTEBOOKS:
        cells = nbformat.read(path, 4).cells
        findings = sum("finding" in cell.metadata.get("tags", []) for cell in cells)
        if findings:
            words = f"{NUMBERS[findings - 6]} findings"
            assert words in re.search(rf"notebooks/{path.name}.*", README)[0]
    assert "nine findings" in (ROOT / "docs/path.md").read_text("utf-8")
    minutes = [int(number) for number in re.findall(r"\.ipynb\) \| (\d+) \|", README)]
    assert len(minutes) == len(NOTEBOOKS)
    hours = f"About {round(sum(minutes) / 60)} hours."
    assert hours in README, f"the README's rows add up to: {hours}"


def test_minutes_beside_a_course_are_the_sum_of_its_chapters():
    """Chapters stand as two digits in the third column; the fourth begins with their sum."""
    rows = re.findall(r"ipynb\) \| (\d+) \|", README)
    minutes = dict(zip(re.findall(r"\| \[(\d\d) ", README), map(int, rows), strict=True))
    page = (ROOT / "docs/courses.md").read_text("utf-8")
    table = page.split("## Alongside three courses")[1].split("\n## ")[0]
    found = re.findall(r"\| ([^|]*\b\d\d\b[^|]*) \| (\d+)[^|]*\|$", table, flags=re.M)
    assert len(found) == len(re.findall(r"^\|", table, flags=re.M)) - 2
    for take, said in found:
        assert int(said) == sum(minutes[n] for n in re.findall(r"\b\d\d\b", take)), take


def test_comments_name_a_chapter_by_its_module():
    """A number in a comment stays behind where a new chapter moves the others."""
    number = re.compile(r".*(?<![\w.\"[])0\d\b(?![.\d]).*")
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        text = path.read_text("utf-8")
        if not number.search(text):
            continue
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        words = [each.string for each in tokens if each.type == tokenize.COMMENT]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                words.append(ast.get_docstring(node) or "")
        found = number.findall("\n".join(words))
        assert not found, f"{path}: {found}"


def test_citation_and_changes_name_this_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {__version__}" in citation
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_a_container_may_name_another_address():
    def addresses(*words):
        line = arguments(list(words))
        return [word.partition("=")[2] for word in line if word.startswith("--ServerApp.ip")]

    assert addresses() == ["127.0.0.1"]
    assert addresses("--ServerApp.ip=0.0.0.0") == ["0.0.0.0"]
