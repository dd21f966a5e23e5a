"""The notebooks for a reader who has passed every build: theirs runs as ours does.

Outputs are stored without a library, so the notebooks' own runs never meet one. Here earlier
chapters' solutions are in the library, and each build is answered by its own. Only cells that
see something of the reader's are run, and those that these need: all others do what they do
in the notebook's own run. Left out are also solutions, which the reader has no need to open,
and measurements of time. What each row of a build asks is tried in `test_builds`.
"""

import ast
import sys
from pathlib import Path

import nbformat
import pytest

from mgpu_tutorial import CHAPTERS
from mgpu_tutorial.lab.teach import mine
from tests.test_builds import BUILDS, keep_solutions, written
from tools.assignment import binds, reads

ROOT = Path(__file__).parent.parent
LEFT_OUT = {"solution", "nbval-ignore-output"}


@pytest.fixture(scope="module")
def libraries():
    """The library before each chapter, as far as it was asked for."""
    return {CHAPTERS[0]: ""}


def library_before(chapter, cell, libraries):
    """The library of somebody who has passed every build of the chapters before this one."""
    for before, after in zip(CHAPTERS, CHAPTERS[1:], strict=False):
        if chapter in libraries:
            break
        if after not in libraries:
            mine.FILE.write_text(libraries[before])
            keep_solutions(cell, before)
            libraries[after] = mine.FILE.read_text()
    return libraries[chapter]


def cells_of(chapter):
    """The code cells in order, as tags and a tree; a build is answered by its solution."""
    (path,) = ROOT.glob(f"notebooks/[0-9]*_{chapter}.ipynb")
    code = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    for cell, after in zip(code, [*code[1:], None], strict=True):
        tags, body = {*cell.metadata.get("tags", [])}, ast.parse(cell.source).body
        if "exercise" in tags and "\nbuild(" in cell.source:
            imports = [n for n in body if isinstance(n, ast.Import | ast.ImportFrom)]
            answer = [part for n in ast.parse(after.source).body for part in written(n)]
            yield {*tags, "build"}, ast.Module([*imports, *answer], [])
        elif not tags & {"solution"}:
            yield tags, ast.Module(body, [])


def seen(cells):
    """Those that see something of the reader's, and whatever makes a name that these need."""
    theirs, kept, needed = {"library", "logbook"}, set(), set()
    for i, (tags, tree) in enumerate(cells):
        if "build" in tags or (reads(tree) & theirs and not tags & LEFT_OUT):
            theirs |= binds(tree)
            kept.add(i)
            needed |= reads(tree)
    while more := [
        i for i, (_, tree) in enumerate(cells) if i not in kept and binds(tree) & needed
    ]:
        kept |= {*more}
        needed |= set().union(*(reads(cells[i][1]) for i in more))
    return [cells[i] for i in sorted(kept)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_cell_runs_with_what_the_reader_has_built(
    cell, capsys, tmp_path, monkeypatch, chapter, libraries
):
    for notebook in ROOT.glob("notebooks/[0-9]*.ipynb"):  # 26 reads their prose
        (tmp_path / notebook.name).symlink_to(notebook)
    monkeypatch.chdir(tmp_path)
    space = vars(sys.modules["__main__"])
    empty = dict(space)
    mine.FILE.write_text(library_before(chapter, cell, libraries))
    space.clear()  # of the library's cells
    space.update(empty)
    rows = BUILDS[chapter].behaviours if chapter in BUILDS else {}  # comparison
    for name, behaviours in rows.items():
        monkeypatch.setitem(rows, name, behaviours[:1])
    for tags, tree in seen([*cells_of(chapter)]):
        capsys.readouterr()
        try:
            cell(ast.unparse(tree))
        except Exception:
            if "raises-exception" not in tags:
                raise
        said = capsys.readouterr().out
        assert "build" not in tags or "now in " in said, said
