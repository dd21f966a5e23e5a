"""An assignment has what an exercise needs: its solution is right in it, a stub is not."""

import ast
import itertools
import re

import nbformat
import pytest

from mgpu_tutorial import CHAPTERS
from mgpu_tutorial.wrong_gradient.seeds import judge
from tools import assignment
from tools.assignment import ROOT, exercises, main, variants_of


def read(path):
    return nbformat.read(path, 4)


def chapter(name):
    (path,) = (ROOT / "notebooks").glob(f"[0-9][0-9]_{name}.ipynb")
    return path


@pytest.mark.parametrize("name", CHAPTERS)
def test_every_variant_of_a_chapter_is_an_assignment_of_its_own(name):
    notebook = read(chapter(name))
    count = variants_of(notebook)
    made = [exercises(notebook, i + 1) for i in range(count)]
    tagged = [c for c in notebook.cells if "exercise" in c.metadata.get("tags", [])]
    tagged += [c for c in notebook.cells if assignment.FINDING.search(c.source)]
    for setup, found in made:
        assert len(found) == len(tagged) >= 1
        for each in found:
            for code in (setup, each.stub, each.solution, each.test, each.graded):
                ast.parse(code)
            asks, grades = ("check(", "graded(")
            if name_of := re.match(r"build|judge", each.test):
                asks, grades = f"{name_of[0]}(", f"{name_of[0]}.require("
                begins = re.compile(r"\*\*(Build|Find it\.)\*\*")
                assert any(begins.search(word.source) for word in each.words)
            else:
                assert re.match(r"\*\*\d+\.\*\* ", each.words[0].source)
            assert asks in each.test and asks not in each.stub + each.solution
            assert grades in each.graded and each.points > 0
    page = (ROOT / "docs" / "courses.md").read_text("utf-8")
    listed = page.partition("### Variants")[2].partition(" stay as they are")[0]
    assert (count > 1) == (f"`{name}`" in listed)
    for (_, one), (_, other) in itertools.combinations(made, 2):
        pairs = [(a, b) for a, b in zip(one, other, strict=True) if a.test != b.test]
        assert pairs and all(a.solution != b.solution for a, b in pairs)


def test_both_graders_get_valid_notebooks_with_the_points_of_the_exercises(tmp_path):
    for_otter, for_nbgrader = assignment.write(chapter("ddp_buckets"), tmp_path, 2)
    _, found = exercises(read(chapter("ddp_buckets")))
    raw = "\n".join(cell.source for cell in read(for_otter).cells)
    assert raw.count("# BEGIN TESTS") == raw.count("manual: true") == len(found)
    assert "HIDDEN" not in raw
    nbformat.validate(read(for_nbgrader))
    cells = [
        c for c in read(for_nbgrader).cells if c.metadata.get("nbgrader", {}).get("grade")
    ]
    by_test = [c.metadata.nbgrader.points for c in cells if c.cell_type == "code"]
    assert by_test == [each.points for each in found]
    assert sum(c.cell_type == "markdown" for c in cells) == len(found)


def test_the_findings_are_graded_by_function_and_line():
    setup, found = exercises(read(chapter("wrong_gradient")))
    findings = [each for each in found if each.test.startswith("judge(")]
    assert len(findings) == 8 and "def look(" in setup
    space = {"judge": judge}
    for each in findings:
        assert is_right(space, each, each.solution) and not is_right(space, each, "")
        assert not is_right(space, each, "finding = ['step', 1]")


@pytest.mark.parametrize("variant", ["0", "4", "²"])
def test_a_variant_or_a_chapter_that_is_not_there_is_one_line(capsys, variant):
    for name, said in {
        "point_to_point": f"VARIANT={variant!r}: point_to_point has the variants 1 to 3\n",
        "point": f"NAME='point': no such chapter; there are {', '.join(CHAPTERS)}\n",
    }.items():
        assert main([name, variant]) == 2
        assert capsys.readouterr() == ("", said)


def is_right(space, exercise, answer):
    """True if an answer passes the test of an exercise, in a space of its own."""
    try:
        exec("\n".join([exercise.stub, answer, exercise.graded]), dict(space))
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", ["data_partitioning", "step_time"])
def test_a_solution_is_right_in_its_own_variant_only(monkeypatch, name):
    """The first exercise with a `check`, of chapters where it takes no launch."""
    notebook = read(chapter(name))
    every = [exercises(notebook, i + 1)[1] for i in range(variants_of(notebook))]
    found = [next(e for e in each if not e.test.startswith("build(")) for each in every]
    space = {"__name__": "__main__"}
    monkeypatch.setenv("MGPU_DEVICE", "cpu")  # which one of them sets
    exec("\n".join([exercises(notebook)[0], assignment.GRADER]), space)
    for mine, other in itertools.product(found, found):
        assert is_right(space, mine, other.solution) == (mine is other)
        assert not is_right(space, mine, mine.stub)
