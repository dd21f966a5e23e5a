"""What a reader builds: ours holds, and the solutions make a library that trains."""

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest

from mgpu_tutorial import CHAPTERS, language_model
from mgpu_tutorial.lab import launch
from mgpu_tutorial.lab.teach import mine
from mgpu_tutorial.lab.teach.build import Builder
from tests.conftest import cell_in
from tools.assignment import binds, needed, reads

ROOT = Path(__file__).parent.parent


def has_builds(chapter):
    package = find_spec(f"mgpu_tutorial.{chapter}")
    return package.submodule_search_locations and find_spec(f"{package.name}.builds")


BUILDS = {
    chapter: import_module(f"mgpu_tutorial.{chapter}.builds").build
    for chapter in CHAPTERS
    if has_builds(chapter)
}


def solutions(chapter):
    """The builds of a notebook: their names, and the solution with what it needs.

    Some open problems close a part: there the challenges' judge is called `judge`.
    """
    if chapter == "challenges":
        for path in sorted(ROOT.glob("notebooks/[0-9]*.ipynb")):
            yield from solutions_in(path, "judge(")
    (path,) = ROOT.glob(f"notebooks/[0-9]*_{chapter}.ipynb")
    yield from solutions_in(path, "build(")


def solutions_in(path, judge):
    earlier = []
    for cell in nbformat.read(path, as_version=4).cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type != "code":  # what answers a Change stands in the text
            for source in re.findall(r"```python\n(def .*?)```", cell.source, re.DOTALL):
                if judge == "build(":
                    yield [node.name for node in ast.parse(source).body], source
            continue
        body = ast.parse(cell.source).body
        if "exercise" in tags:  # its imports stay when the solution runs
            earlier += [n for n in body if isinstance(n, ast.Import | ast.ImportFrom)]
            continue
        calls = [node for node in body if ast.unparse(node).startswith(judge)]
        if "solution" not in tags:
            earlier += body
        elif calls:
            own = [part for node in body if node not in calls for part in written(node)]
            names = set().union(*map(reads, [*own, *calls])) - {judge[:-1]}
            first = needed(earlier, names - binds(ast.Module(own, [])))
            names = [argument.id for argument in calls[0].value.args]
            yield names, "\n".join(map(ast.unparse, [*first, *own]))


def written(node):
    """A statement of a solution; what it imports of the challenges' is written out."""
    if not isinstance(node, ast.ImportFrom) or not node.module.endswith(".solutions"):
        return [node]
    home = import_module(node.module)
    texts = (inspect.getsource(getattr(home, alias.name)) for alias in node.names)
    return [part for text in texts for part in ast.parse(text).body]


def keep_solutions(cell, *chapters):
    """Write the solutions of chapters into the reader's library, one after another."""
    for chapter in chapters:
        for names, source in solutions(chapter):
            made = {function.__name__: function for function in cell(source)}
            mine.keep(chapter, [made[name] for name in names], BUILDS[chapter].ours)


@pytest.mark.parametrize("chapter", BUILDS)
def test_each_build_has_a_solution(chapter):
    """Those in cells are tried when the notebook runs."""
    found = [name for names, _ in solutions(chapter) for name in names]
    assert found == list(BUILDS[chapter].behaviours)


@pytest.mark.slow
def test_a_solution_in_the_text_passes(cell):
    owners = next(source for names, source in solutions("sharding") if names == ["owners"])
    BUILDS["sharding"].require(*cell(owners))


ALONE = """
import sys
import torch.distributed.fsdp  # and with it what torch itself needs

class Refuse:
    def find_spec(name, path=None, target=None):
        known = name.partition(".")[0] in sys.stdlib_module_names or name.startswith("torch.")
        if not known and name != "mine":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse)
import mine
"""


def imported_with_torch_alone(file):
    """What stops the import of a file where there are torch and Python, and no more."""
    run = [sys.executable, "-c", ALONE]
    return subprocess.run(run, cwd=file.parent, capture_output=True, text=True).stderr


@pytest.fixture(scope="module")
def every_solution(tmp_path_factory):
    """The library of a reader who has passed all builds, one after another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mine, "FILE", tmp_path_factory.mktemp("library") / "mine.py")
        keep_solutions(cell_in(patch), *BUILDS)
        yield mine.FILE


@pytest.mark.slow
@pytest.mark.parametrize("chapter", BUILDS)
def test_what_library_returns_of_the_solutions_does_what_is_asked_first(
    every_solution, chapter
):
    """The text in the library is that of the notebook, which tries all that is asked."""
    build = BUILDS[chapter]
    own = mine.library(*build.ours.values())
    for name, (first, *_) in build.behaviours.items():
        Builder(chapter, {build.ours[name]: [first]}).require(getattr(own, name))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_solutions_make_one_library_that_trains_as_the_package_s_parts_do(every_solution):
    text = every_solution.read_text()
    chapters = re.findall(r"^# (\w+): \w", text, re.M)
    assert chapters == ["lab", "shared", *BUILDS]
    assert "mgpu_tutorial" not in text
    assert not imported_with_torch_alone(every_solution)
    every = mine.library(*(ours for build in BUILDS.values() for ours in build.ours.values()))
    own = mine.library(*language_model.OURS)
    assert all(thing.__module__ == "mine" for thing in (vars(every) | vars(own)).values())
    how = {"steps": 2, "dtype": "float64"}
    found = launch(language_model.train, 4, "tp=2,pp=2", parts=own, **how).results
    zero = launch(language_model.train, 2, "dp=2,zero=1", parts=own, **how).results
    (one,) = launch(language_model.train, 1, "dp=1", **how).results
    for losses in (*found, *zero):
        assert losses == pytest.approx(one, abs=1e-12)
