"""The measurable part of how a notebook reads, and the mapping notebook, module, test."""

import ast
import getpass
import json
import re
import socket
import statistics
import tempfile
from pathlib import Path

import nbformat
import pytest

from mgpu_tutorial.__main__ import chapters, workers

ROOT = Path(__file__).parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TAGS = {"raises-exception", "nbval-ignore-output", "exercise", "solution"}
CLOSING = ["Same answer as one process?", "Exercises", "Summary", "Next"]


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


def printed(cell):
    return "".join(out.text for out in cell.outputs if out.output_type == "stream")


def torch_version():
    """Of the PyTorch that the outputs were made with, as in the addresses of its pages."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return re.search(r"^torch==(\d+\.\d+)", pins, re.MULTILINE)[1]


def test_every_chapter_has_notebook_module_and_test():
    stems = {int(path.stem[:2]): path.stem[3:] for path in PATHS}
    assert stems == {m.CHAPTER: m.__name__.rpartition(".")[2] for m in chapters()}
    assert sorted(stems) == list(range(len(stems)))
    for stem in stems.values():
        assert (ROOT / "tests" / f"test_{stem}.py").exists()


def test_workers_fit_a_handout_page():
    for module in chapters():
        text = Path(module.__file__).read_text(encoding="utf-8")
        assert 40 <= len(text.splitlines()) <= 300, module.__name__
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 30, node.name
                assert node.name.startswith("_") or ast.get_docstring(node), node.name
        assert workers(module)


def test_the_lab_knows_no_chapter():
    stems = "|".join(path.stem[3:] for path in PATHS)
    for module in (ROOT / "mgpu_tutorial" / "lab").glob("*.py"):
        imports = re.findall(r"^\s*(?:from|import) .*", module.read_text(), re.MULTILINE)
        assert not [
            line for line in imports if re.search(rf"\b({stems}|data|models)\b", line)
        ]


def test_a_chapter_imports_only_earlier_chapters():
    numbers = {m.__name__: m.CHAPTER for m in chapters()}
    for module in chapters():
        text = Path(module.__file__).read_text(encoding="utf-8")
        for name, number in numbers.items():
            if re.search(rf"\b{name.replace('.', '(?:.| import )')}\b", text):
                assert number < module.CHAPTER


def test_head_sections_and_closing(notebook):
    text = "\n".join(prose(notebook))
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    assert prose(notebook)[0].startswith("# ")
    for words in ("**You will be able to**", "**You need**", " minutes."):
        assert words in prose(notebook)[0]
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[-4:] == CLOSING
    numbered = [heading for heading in headings if re.match(r"\d\. ", heading)]
    assert numbered == headings[:-4] and 3 <= len(numbered) <= 5
    assert [int(heading[0]) for heading in numbered] == list(range(1, len(numbered) + 1))


def test_predictions_are_asked_for(notebook):
    text = "\n".join(prose(notebook))
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:-4]:
        assert "**Predict" in section, section.splitlines()[0]


def test_cells_are_small_and_prose_stands_between(notebook):
    lengths = [cell.source.count("\n") + 1 for cell in code(notebook)]
    assert statistics.median(lengths) <= 6 and max(lengths) <= 25
    assert max(len(line) for cell in code(notebook) for line in cell.source.split("\n")) < 80
    assert "ccc" not in "".join(cell.cell_type[0] for cell in notebook.cells)


def test_prose_and_code_keep_their_proportion(notebook):
    words = sum(len(text.split()) for text in prose(notebook))
    lines = sum(cell.source.count("\n") + 1 for cell in code(notebook))
    for cell in code(notebook):
        for output in cell.outputs:
            lines += output.get("data", {}).get("text/markdown", "").count("\n")
    assert 3 <= words / lines <= 12


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


def test_after_a_measured_output_something_is_asserted(notebook):
    cells = code(notebook)
    for i, cell in enumerate(cells):
        pictures = any("image/png" in out.get("data", {}) for out in cell.outputs)
        if pictures or "nbval-ignore-output" in tags(cell):
            assert any("assert" in c.source for c in cells[i + 1 : i + 4]), cell.source


def test_nothing_of_the_machine_is_stored(notebook, path):
    text = path.read_text(encoding="utf-8")
    places = [str(Path.home()) + "/", tempfile.gettempdir() + "/", str(ROOT), "site-packages"]
    names = [name for name in (socket.gethostname(), getpass.getuser()) if len(name) > 4]
    assert not [word for word in places + names if word in text]
    assert not re.search(r"\b0x[0-9a-f]{9,}\b|\b\d{4}-\d\d-\d\d\b", text)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert "application/vnd.jupyter.widget" not in text


def test_links_lead_somewhere(notebook, path):
    for link in re.findall(r"\]\(([^)]+)\)", "\n".join(prose(notebook))):
        if not link.startswith("http"):
            assert (path.parent / link).exists(), link
        elif "docs.pytorch.org" in link:
            assert f"/docs/{torch_version()}/" in link, link


def test_each_notebook_leads_to_its_neighbours(notebook, path):
    place = PATHS.index(path)
    navigation = prose(notebook)[0].split("\n")[2]
    linked = re.findall(r"\]\(([^)]+)\)", navigation)
    before, after = PATHS[:place][-1:], PATHS[place + 1 : place + 2]
    assert linked == [p.name for p in before] + ["../README.md"] + [p.name for p in after]


def test_nothing_of_the_package_is_written_again(notebook, path):
    module = next(m for m in chapters() if m.__name__.endswith(path.stem[3:]))
    defined = {
        node.name
        for cell in code(notebook)
        for node in ast.walk(ast.parse(cell.source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert not defined & set(vars(module))


def test_exercises_begin_not_yet_and_end_correct(notebook):
    cells = code(notebook)
    exercises = [i for i, cell in enumerate(cells) if "exercise" in tags(cell)]
    assert len(exercises) >= 2
    for i in exercises:
        assert printed(cells[i]).startswith("not yet"), cells[i].source
        assert "solution" in tags(cells[i + 1])
        assert cells[i + 1].metadata.jupyter.source_hidden
        assert set(printed(cells[i + 1]).splitlines()) == {"correct"}
    assert len(exercises) == sum("solution" in tags(cell) for cell in cells)
    writes = [i for i in exercises if "def " in cells[i].source]
    assert writes and len(writes) < len(exercises)


def test_the_readme_lists_every_notebook_and_links_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert all((ROOT / link).exists() for link in links)
    assert [link for link in links if link.endswith(".ipynb")] == [
        f"notebooks/{path.name}" for path in PATHS
    ]


def test_the_readme_says_how_long_each_takes():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in PATHS:
        head = nbformat.read(path, as_version=4).cells[0].source
        row = next(line for line in text.split("\n") if f"](notebooks/{path.name})" in line)
        minutes = re.search(r"(\d+) minutes", head)[1]
        assert f"| {minutes} min |" in row, row


def test_drawings_are_alive_in_the_stored_notebook(path):
    """Each drawing is stored in the form that an untrusting JupyterLab shows."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/svg+xml" in data:
                assert "data:image/svg+xml;base64," in "".join(data["text/html"])
