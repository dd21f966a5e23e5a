"""An assignment has what an exercise needs; solutions are right in it and stubs are not."""

import ast

import nbformat
import pytest

from mgpu_tutorial import CHAPTERS
from tools.assignment import ROOT, exercises, nbgrader, otter, write


def chapter(name):
    (path,) = (ROOT / "notebooks").glob(f"[0-9][0-9]_{name}.ipynb")
    return path


@pytest.mark.parametrize("name", CHAPTERS)
def test_every_chapter_can_be_an_assignment(name):
    notebook = nbformat.read(chapter(name), as_version=4)
    setup, found = exercises(notebook)
    tagged = [c for c in notebook.cells if "exercise" in c.metadata.get("tags", [])]
    assert len(found) == len(tagged) >= 2
    for each in found:
        for code in (setup, each.stub, each.solution, each.test):
            ast.parse(code)
        assert "graded(" in each.test and "check(" not in each.test
        assert each.points > 0 and each.text and '"""' not in each.stub


def test_a_stub_does_not_hold_its_solution():
    _, found = exercises(nbformat.read(chapter("point_to_point"), as_version=4))
    assert found[0].stub == "ranks = ..." and found[0].solution == "ranks = 7"
    assert "dist.send" in found[1].solution and "dist.send" not in found[1].stub


def test_the_setup_has_what_is_used_and_nothing_else():
    setup, _ = exercises(nbformat.read(chapter("collectives"), as_version=4))
    assert "SIZE =" in setup and "traffic" in setup
    assert "stepper(report)" not in setup


def test_both_graders_get_notebooks_that_are_valid(tmp_path):
    paths = list(write(chapter("point_to_point"), tmp_path))
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [
        "otter/point_to_point.ipynb",
        "nbgrader/source/point_to_point/point_to_point.ipynb",
    ]
    for path in paths:
        nbformat.validate(nbformat.read(path, as_version=4))
    assert (tmp_path / "nbgrader" / "nbgrader_config.py").exists()


def test_points_and_ids_are_those_of_the_exercises():
    setup, found = exercises(nbformat.read(chapter("ddp_buckets"), as_version=4))
    made = nbgrader("A title", setup, found)
    graded = [c.metadata.nbgrader for c in made.cells if c.cell_type == "code"]
    assert len({cell.grade_id for cell in graded}) == len(graded)
    points = [cell.points for cell in graded if cell.grade]
    assert points == [each.points for each in found]
    raw = "\n".join(c.source for c in otter("A title", setup, found).cells)
    assert raw.count("# BEGIN QUESTION") == raw.count("# HIDDEN") == len(found)


@pytest.mark.fresh
def test_what_is_graded_is_right_for_the_solution_and_wrong_for_the_stub(tmp_path):
    """In a kernel, without the graders: setup, answer, test, for the first exercise."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    setup, found = exercises(nbformat.read(chapter("point_to_point"), as_version=4))
    made = nbgrader("A title", setup, found[:1])
    solved = nbformat.v4.new_notebook(cells=made.cells)
    NotebookClient(solved, timeout=100).execute()
    open_ = nbformat.v4.new_notebook(cells=nbgrader("A title", setup, found[:1]).cells)
    open_.cells[3].source = found[0].stub
    with pytest.raises(CellExecutionError, match="not yet"):
        NotebookClient(open_, timeout=100).execute()
