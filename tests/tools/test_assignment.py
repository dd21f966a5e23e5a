"""An assignment has what an exercise needs; solutions are right in it and stubs are not.

A variant asks the same with other numbers: its solution is right in it, another's is not.
"""

import ast
import itertools

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from mgpu_tutorial import CHAPTERS
from tools import assignment
from tools.assignment import ROOT, exercises, main, nbgrader, read, variants_of

ARITHMETIC = ("data_partitioning", "when_it_breaks", "sharding", "at_scale")


def chapter(name):
    (path,) = (ROOT / "notebooks").glob(f"[0-9][0-9]_{name}.ipynb")
    return path


@pytest.mark.parametrize("name", CHAPTERS)
def test_every_chapter_can_be_an_assignment(name):
    notebook = read(chapter(name))
    setup, found = exercises(notebook)
    tagged = [c for c in notebook.cells if "exercise" in c.metadata.get("tags", [])]
    assert len(found) == len(tagged) >= 2
    for each in found:
        for code in (setup, each.stub, each.solution, each.test, each.hidden):
            ast.parse(code)
        assert "check(" in each.test and "check(" not in each.stub + each.solution
        assert "graded(" in each.hidden and "check(" not in each.hidden.replace("_check(", "")
        assert each.points > 0 and '"""' not in each.stub + each.test
        assert each.words[0].source.startswith(f"**{each.number}.** ")


def test_the_solution_starts_from_the_stub_and_the_setup_and_nothing_else():
    setup, found = exercises(read(chapter("collectives")))
    assert "SIZE =" in setup and "stepper(report)" not in setup
    assert found[0].stub == "bytes_sent = ..." and "counted" in found[0].test
    _, found = exercises(read(chapter("tensor_parallel")))
    for each, start in zip(found, ("first, second =", "x = torch.arange"), strict=True):
        assert start in each.stub and start not in each.solution + each.test


def test_code_between_the_words_and_the_stub_comes_along():
    _, found = exercises(read(chapter("data_parallel")))
    assert [cell.cell_type for cell in found[1].words] == ["markdown", "code", "markdown"]
    assert "def on_four" in found[1].words[1].source
    assert found[1].stub == "reduction, divisor = ..., ..."
    assert found[1].solution == 'reduction, divisor = "sum", 10'


def test_both_graders_get_valid_notebooks_with_the_points_of_the_exercises(tmp_path):
    paths = list(assignment.write(chapter("ddp_buckets"), tmp_path, 2))
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [
        "ddp_buckets_2/otter/ddp_buckets_2.ipynb",
        "ddp_buckets_2/nbgrader/source/ddp_buckets_2/ddp_buckets_2.ipynb",
    ]
    assert (tmp_path / "ddp_buckets_2" / "nbgrader" / "nbgrader_config.py").exists()
    _, found = exercises(read(chapter("ddp_buckets")))
    for_otter, for_nbgrader = map(read, paths)
    for made in (for_otter, for_nbgrader):
        nbformat.validate(made)
    graded = [c.metadata.nbgrader for c in for_nbgrader.cells if c.cell_type == "code"]
    assert len({cell.grade_id for cell in graded}) == len(graded)
    assert [cell.points for cell in graded if cell.grade] == [each.points for each in found]
    raw = "\n".join(cell.source for cell in for_otter.cells)
    assert raw.count("# BEGIN QUESTION") == raw.count("# HIDDEN") == len(found)


def code(exercise):
    return exercise.stub, exercise.solution, exercise.test


def test_the_first_variant_is_the_notebook_and_the_others_differ():
    varied = [name for name in CHAPTERS if variants_of(read(chapter(name))) > 1]
    page = (ROOT / "docs" / "courses.md").read_text("utf-8")
    listed = page.partition("### Variants")[2].partition(" stay as they are")[0]
    assert [name for name in CHAPTERS if f"`{name}`" in listed] == varied
    for name in varied:
        notebook = read(chapter(name))
        for cell in notebook.cells:
            table = cell.metadata.get("handout", {}).get("variants", [])
            assert all(len(set(line)) > 1 for line in table), table
            assert len({line[0] for line in table}) == len(table)
            assert not table or "exercise" in cell.metadata.tags
        made = [exercises(notebook, i + 1)[1] for i in range(variants_of(notebook))]
        for one, other in itertools.combinations(made, 2):
            pairs = [(a, b) for a, b in zip(one, other, strict=True) if code(a) != code(b)]
            assert pairs, name
            for a, b in pairs:
                assert a.solution != b.solution and a.test != b.test
                assert [cell.source for cell in a.words] != [cell.source for cell in b.words]


def is_right(space, exercise, answer):
    """Whether an answer passes the test of an exercise, in a space of its own."""
    try:
        exec("\n".join([exercise.stub, answer, exercise.hidden]), dict(space))
    except AssertionError as said:
        assert "not yet" in str(said)
        return False
    return True


@pytest.mark.parametrize("name", ARITHMETIC)
def test_a_solution_is_right_in_its_own_variant_only(monkeypatch, name):
    """The first exercise of chapters where it takes no launch."""
    notebook = read(chapter(name))
    found = [exercises(notebook, i + 1)[1][0] for i in range(variants_of(notebook))]
    space = {"__name__": "__main__"}
    monkeypatch.setenv("MGPU_DEVICE", "cpu")  # which one of them sets
    exec("\n".join([exercises(notebook)[0], assignment.GRADER]), space)
    for mine, other in itertools.product(found, found):
        assert is_right(space, mine, other.solution) == (mine is other)
        assert not is_right(space, mine, mine.stub)


def test_what_is_replaced_stands_for_itself():
    sources = ["21, 21.0 and 2,121 of 210; x21 = f(21)", "7e21 ** 21"]
    new = assignment._replaced(sources, [["21", "15"], ["f(21)", "g(21)"]], 2)
    assert new == ["15, 21.0 and 2,121 of 210; x21 = g(21)", "7e21 ** 15"]
    assert assignment._replaced(["4 of 8"], [["4", "8"], ["8", "4"]], 2) == ["8 of 4"]
    assert assignment._replaced(sources, [["21", "15"]], 1) == sources


def test_a_table_that_does_not_fit_is_named():
    notebook = read(chapter("point_to_point"))
    tables = [c.metadata.handout for c in notebook.cells if "handout" in c.metadata]
    table = next(about.variants for about in tables if "variants" in about)
    table.append(["no such words", "a", "b"])
    with pytest.raises(ValueError, match=r"cell \d+: .*no such words"):
        exercises(notebook, 2)
    table[-1] = ["21", "15"]
    with pytest.raises(ValueError, match="the same number"):
        variants_of(notebook)


@pytest.mark.parametrize("variant", ["0", "4", "-1", "two", "1.5", "²", ""])
def test_a_variant_or_a_chapter_that_is_not_there_is_one_line(capsys, variant):
    for name, said in {
        "point_to_point": f"VARIANT={variant!r}: point_to_point has the variants 1 to 3\n",
        "ddp_buckets": f"VARIANT={variant!r}: ddp_buckets has no variants; leave it out\n",
        "point": f"NAME='point': no such chapter; there are {', '.join(CHAPTERS)}\n",
    }.items():
        assert main([name, variant]) == 2
        assert capsys.readouterr() == ("", said)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [1, 2])
def test_what_is_graded_is_right_for_the_solution_and_wrong_for_others(variant):
    """In a kernel, without the graders: setup, answer, test, for the first exercise."""
    notebook = read(chapter("point_to_point"))
    setup, found = exercises(notebook, variant)
    other = exercises(notebook, 3)[1][0]
    made = nbgrader("A title", setup, found[:1])
    NotebookClient(made, timeout=100).execute()
    assert "correct" in str(made.cells[3].outputs)  # what the student sees
    wrong = {found[0].stub: "nothing is filled in", other.solution: "the token is 28.0"}
    for answer, said in wrong.items():
        made.cells[3].source = answer
        with pytest.raises(CellExecutionError, match=f"not yet: {said}"):
            NotebookClient(made, timeout=100).execute()
