"""What makes the numbers of a chapter stands on its pages.

A listing shows a function, and so does a cell that defines it. Listings, builds and checks
are no results; a film may be launched unseen, since its frames tell what happened.
"""

import ast
import json
from pathlib import Path

import pytest

from mgpu_tutorial import CHAPTERS

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
HELD = [*CHAPTERS[: CHAPTERS.index("tensor_parallel")], "wrong_gradient"]
LISTS = ("show_source", "edit")
WITHOUT_RESULT = {*LISTS, "build", "check"}
# launched and not listed: the text tells what they do
UNSEEN = {"calls.reduce_with", "laptop.reduce_two"}


def cells_of(chapter):
    path = NOTEBOOKS / f"{CHAPTERS.index(chapter):02d}_{chapter}.ipynb"
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def tree_of(cell):
    return ast.parse("".join(cell["source"]))


def calls(tree, *names):
    """The calls in a piece of code, of these functions or of any."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node for node in found if not names or ast.unparse(node.func) in names]


def shown_in(tree):
    """What a cell shows: the functions and classes that it defines or lists."""
    listed = {ast.unparse(given) for call in calls(tree, *LISTS) for given in call.args}
    kinds = ast.FunctionDef | ast.ClassDef
    return listed | {node.name for node in tree.body if isinstance(node, kinds)}


def imported(trees):
    """What a notebook imports from the package: its module and own name, by its name here."""
    nodes = [node for tree in trees for node in tree.body if isinstance(node, ast.ImportFrom)]
    ours = [node for node in nodes if (node.module or "").startswith("mgpu_tutorial")]
    return {a.asname or a.name: (node.module, a.name) for node in ours for a in node.names}


def hidden_results(cells):
    """For each cell with a result: the functions of `figures` in it that were not shown."""
    trees = [tree_of(cell) for cell in cells]
    home, shown, found = imported(trees), set(), []
    for cell, tree in zip(cells, trees, strict=True):
        shown |= shown_in(tree)
        names = {ast.unparse(call.func) for call in calls(tree)}
        if not cell["outputs"] or names & WITHOUT_RESULT:
            continue
        from_ = {name: home.get(name.split(".")[0], ("", "")) for name in names - shown}
        found.append({n for n, where in from_.items() if "figures" in ".".join(where)})
    return found


@pytest.mark.parametrize("chapter", HELD)
def test_at_most_a_third_of_the_results_come_from_what_was_not_shown(chapter):
    found = hidden_results(cells_of(chapter))
    hidden = [names for names in found if names]
    assert 3 * len(hidden) <= len(found), hidden


def test_what_a_cell_launches_is_shown_here_or_in_an_earlier_chapter():
    shown, unseen = set(), set()
    for chapter in HELD:
        trees = [tree_of(cell) for cell in cells_of(chapter)]
        home = imported(trees)
        for tree in trees:
            shown |= {name.split(".")[-1] for name in shown_in(tree)}
        for tree in trees:
            films = [inner for call in calls(tree, "film") for inner in calls(call)]
            for call in calls(tree, "launch"):
                worker = ast.unparse(call.args[0])
                ours = worker.split(".")[0] in home and call not in films
                if ours and worker.split(".")[-1] not in shown and "film" not in worker:
                    unseen.add(worker)
    assert unseen == UNSEEN


def test_what_a_listing_or_a_cell_has_shown_is_not_hidden():
    sources = {
        "from mgpu_tutorial.x import figures\nfrom mgpu_tutorial.x.figures import draw": "",
        "figures.train()": "x",
        "show_source(figures.train)": "x",
        "figures.train(2)": "x",
        "draw(launch(work, 2))": "x",
        "def work(rank, world_size): ...": "",
        "launch(work, 2)": "x",
        "check(figures.measure(), 1)": "x",
    }
    cells = [{"source": [text], "outputs": list(out)} for text, out in sources.items()]
    assert hidden_results(cells) == [{"figures.train"}, set(), {"draw"}, set()]
