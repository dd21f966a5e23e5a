"""The measurable part of how a notebook reads, and the mapping notebook, module, test."""

import ast
import re
import socket
import tempfile
from pathlib import Path
from types import FunctionType, ModuleType

import nbformat
import pytest

from mgpu_tutorial import CHAPTERS
from mgpu_tutorial.__main__ import workers_of
from mgpu_tutorial.lab.teach.verdict import MARK

FRONT_DOORS = "mgpu_tutorial", "mgpu_tutorial.lab"  # which pass on what lives elsewhere
ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mgpu_tutorial"
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TAGS = {"raises-exception", "nbval-ignore-output", "pinned-torch"}
TAGS |= {"exercise", "solution", "finding"}
CLOSING = ["Same answer as one process?", "Exercises", "Summary", "Next"]
OPEN = "Open problems"  # at the end of a part, above the summary


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]


def tags(cell):
    return set(cell.metadata.get("tags", []))


def verdicts(cell):
    shown = [out.data for out in cell.outputs if out.output_type == "display_data"]
    return [data["text/plain"] for data in shown if MARK in data.get("text/html", "")]


# Two run no ranks; what the others run is the reader's, PyTorch's, or in cells and figures.
WITHOUT_WORKERS = ("data_parallel", "sharding", "step_time")
WITHOUT_WORKERS += ("tensor_parallel", "tensor_parallel_in_practice")


def test_every_chapter_has_notebook_module_and_test():
    assert [path.stem for path in PATHS] == [
        f"{number:02d}_{chapter}" for number, chapter in enumerate(CHAPTERS)
    ]
    for chapter in CHAPTERS:
        tests = ROOT / "tests" / f"test_{chapter}.py", ROOT / "tests" / chapter
        assert any(place.exists() for place in tests), chapter
        assert bool(workers_of(chapter)) != (chapter in WITHOUT_WORKERS), chapter


def rooms_of(file):
    """The chapters, shared and lab: whatever below the package a file imports or names."""
    text = file.read_text("utf-8")
    text = re.sub(r"from mgpu_tutorial import (\w+)", r"mgpu_tutorial.\1", text)
    return set(re.findall(r"\bmgpu_tutorial\.([a-z]\w*)", text))


@pytest.mark.parametrize("room", ["lab", "shared", "instruments", *CHAPTERS])
def test_a_room_imports_only_what_is_before_it(room):
    order = ["lab", "instruments", "shared", *CHAPTERS]
    allowed = (
        {"shared"} - {room} if room == "instruments" else set()
    )  # two that share a floor
    allowed |= set(order[: order.index(room) + 1])
    if room != "lab":
        allowed |= {"launch", "price", "prove", "watched"}  # the front door
    for file in [*PACKAGE.glob(f"{room}.py"), *PACKAGE.glob(f"{room}/**/*.py")]:
        assert rooms_of(file) <= allowed, file


def test_head_sections_and_closing(notebook):
    text = "\n".join(prose(notebook))
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    assert prose(notebook)[0].startswith("# ")
    for words in ("**You will be able to**", "**You need**", " minutes."):
        assert words in prose(notebook)[0]
    assert "**Predict" in text
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    if OPEN in headings:
        assert headings.index(OPEN) == len(headings) - 3
        headings.remove(OPEN)
    assert headings[-4:] == CLOSING
    numbered = [heading for heading in headings if re.match(r"\d\. ", heading)]
    assert numbered == headings[:-4] and 3 <= len(numbered) <= 5
    assert [int(heading[0]) for heading in numbered] == list(range(1, len(numbered) + 1))


def test_a_cell_fits_on_a_screen_and_on_a_page(notebook):
    for cell in code(notebook):
        lines = cell.source.split("\n")
        assert len(lines) <= (40 if "solution" in tags(cell) else 25)  # a solution is folded
        assert max(map(len, lines)) < 80


def test_stored_outputs_are_those_of_one_run_from_top_to_bottom(notebook):
    counts = [cell.execution_count for cell in code(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    for cell in code(notebook):
        errors = [out for out in cell.outputs if out.output_type == "error"]
        assert bool(errors) == ("raises-exception" in tags(cell)), cell.source
        streams = [out.name for out in cell.outputs if out.output_type == "stream"]
        assert "stderr" not in streams, cell.source


def test_almost_every_output_is_compared(notebook):
    cells = code(notebook)
    free = [cell for cell in cells if "nbval-ignore-output" in tags(cell)]
    assert 10 * len(free) <= len(cells)
    assert not any("NBVAL" in cell.source for cell in cells)
    assert all(tags(cell) <= TAGS for cell in cells)


def test_of_a_measured_output_something_is_asserted(notebook):
    cells = [cell for cell in code(notebook) if not tags(cell) & {"exercise", "solution"}]
    for i, cell in enumerate(cells):
        pictures = any("image/png" in out.get("data", {}) for out in cell.outputs)
        if pictures or "nbval-ignore-output" in tags(cell):
            assert any("assert" in c.source for c in cells[i : i + 4]), cell.source


def test_nothing_of_the_machine_is_stored(notebook, path):
    text = path.read_text("utf-8")
    folders = [str(Path.home()), tempfile.gettempdir()]
    places = [folder + "/" for folder in folders if folder != "/"] + [str(ROOT)]
    host = socket.gethostname()  # it may have the name of something the course is about
    readme = (ROOT / "README.md").read_text("utf-8")
    names = [host] if len(host) > 4 and host not in readme else []
    assert not [word for word in [*places, *names, "site-packages"] if word in text]
    assert not re.search(r"\b0x[0-9a-f]{9,}\b|\b\d{4}-\d\d-\d\d\b", text)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert "application/vnd.jupyter.widget" not in text


def test_a_line_of_ours_that_an_output_quotes_stands_there(notebook):
    """Where a file has changed since, its notebooks are to be stored again."""
    outputs = [out for cell in code(notebook) for out in cell.outputs]
    texts = ["\n".join(out.get("traceback", [])) + out.get("text", "") for out in outputs]
    for name, number, words in re.findall(r"(\w+\.py):(\d+)  (\S.*)", "\n".join(texts)):
        files = [file.read_text("utf-8").splitlines() for file in PACKAGE.rglob(name)]
        lines = [
            lines[int(number) - 1].strip() for lines in files if len(lines) >= int(number)
        ]
        assert any(line.startswith(words) for line in lines), f"{name}:{number} is {lines}"


def test_links_lead_somewhere(notebook, path):
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    torch = re.search(r"^torch==(\d+\.\d+)", pins, re.MULTILINE)[1]
    for link in re.findall(r"\]\(([^)]+)\)", "\n".join(prose(notebook))):
        if not link.startswith("http"):
            assert (path.parent / link).exists(), link
        elif "docs.pytorch.org" in link and "/tutorials/" not in link:  # of no version
            assert f"/docs/{torch}/" in link, link


def test_each_notebook_leads_to_its_neighbours(notebook, path):
    place = PATHS.index(path)
    navigation = prose(notebook)[0].split("\n")[2]
    linked = re.findall(r"\]\(([^)]+)\)", navigation)
    before, after = PATHS[:place][-1:], PATHS[place + 1 : place + 2]
    assert linked == [p.name for p in before] + ["../README.md"] + [p.name for p in after]


def test_every_name_is_in_the_file_that_its_import_names(notebook):
    """Who wants to read what a cell calls finds it at first; the face of lab is a list."""
    nodes = [node for cell in code(notebook) for node in ast.walk(ast.parse(cell.source))]
    space = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("mgpu_tutorial"):
            exec(ast.unparse(node), space)
            found = [space[alias.asname or alias.name] for alias in node.names]
            for thing in found if node.module not in FRONT_DOORS else []:
                if isinstance(thing, FunctionType | type):
                    assert thing.__module__ == node.module, thing
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = space.get(node.value.id)
            thing = getattr(module, node.attr, None)
            if isinstance(module, ModuleType) and isinstance(thing, FunctionType | type):
                assert thing.__module__ == module.__name__, thing


def test_a_chapter_is_named_by_its_number_only_in_a_link(notebook):
    """Else the number stays behind when a chapter is inserted before it."""
    for text in prose(notebook):
        words = re.sub(r"\[[^\]]*\]\([^)]*\)|`[^`]*`", "", text)
        assert not re.search(r"([Cc]hapters?|[Nn]otebooks?) \d", words), words
        assert not re.search(r"(?<![\w.,-])0\d(?![\w.,])", words), words


def test_exercises_begin_not_yet_and_end_correct(notebook):
    cells = code(notebook)
    exercises = [i for i, cell in enumerate(cells) if "exercise" in tags(cell)]
    assert exercises
    for i in exercises:
        said = verdicts(cells[i])
        assert said and all(text.startswith("not yet") for text in said), cells[i].source
        solution = cells[i + 1]
        assert "solution" in tags(solution)
        assert solution.source.startswith("# Solution (click to open)\n"), solution.source
        assert solution.metadata.jupyter == {"source_hidden": True, "outputs_hidden": True}
        said = verdicts(solution)
        assert said and all(text.startswith("correct") for text in said), solution.source
    assert len(exercises) == sum("solution" in tags(cell) for cell in cells)
    assert any("def " in cells[i].source for i in exercises)


def test_a_hint_stands_before_what_it_helps_with(notebook):
    for i, cell in enumerate(notebook.cells):
        if "<summary>Hint" in cell.source:
            below = next(c for c in notebook.cells[i + 1 :] if c.cell_type == "code")
            assert "exercise" in tags(below), cell.source


def test_the_readme_lists_every_notebook():
    text = (ROOT / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| \[\d\d [^\]]*\]\(([^)]+)\)", text, flags=re.M)
    assert rows == [f"notebooks/{path.name}" for path in PATHS]


def test_a_listing_ends_its_cell(notebook):
    for cell in code(notebook):
        for part in ast.parse(cell.source).body[:-1]:  # of which nothing is shown
            assert not ast.unparse(part).startswith("show_source(")


def minutes_of(notebook):
    """The least of a first reader: 150 words or 10 lines in one, and what there is to do."""
    words = len(re.findall(r"\w+", re.sub(r"\]\([^)]*\)", "]", "\n".join(prose(notebook)))))
    outputs = [out.get("data", {}) for cell in code(notebook) for out in cell.outputs]
    listings = [data.get("text/markdown", "") for data in outputs]
    lines = sum(text.count("\n") for text in listings if "```" in text)
    lines += sum(bool(s.strip()) for cell in code(notebook) for s in cell.source.split("\n"))
    predictions = "\n".join(prose(notebook)).count("**Predict")
    changes = sum("**Change" in text for text in prose(notebook))
    exercises = sum("exercise" in tags(cell) for cell in code(notebook))
    return words / 150 + lines / 10 + 1.5 * predictions + 4 * changes + 8 * exercises


def test_the_head_and_the_readme_say_how_long_it_takes(notebook, path):
    said = int(re.search(r"(\d+) minutes\.", prose(notebook)[0])[1])
    least = minutes_of(notebook)  # readers who build take longer, where a build is hard
    says = f"reckoned {least:.0f}: write what readers take into the head and the README's row"
    assert least - 5 <= said <= 1.5 * least, says
    readme = (ROOT / "README.md").read_text("utf-8")
    row = re.search(rf"^\| \[\d\d .*\]\(notebooks/{path.name}\).*$", readme, flags=re.M)[0]
    assert f"| {said} |" in row, row
