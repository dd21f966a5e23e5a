"""What a reader builds: ours holds, and the solutions make a library that trains."""

import ast
import builtins
import inspect
import io
import re
import subprocess
import sys
import tokenize
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import get_type_hints

import nbformat
import pytest
import torch

from mgpu_tutorial import CHAPTERS, language_model
from mgpu_tutorial.lab import launch
from mgpu_tutorial.lab.teach import mine
from mgpu_tutorial.lab.teach.book import Library
from mgpu_tutorial.lab.teach.build import Builder
from mgpu_tutorial.lab.teach.needs import SLOW, first_line, names_in
from mgpu_tutorial.lab.teach.subjects import COURSE, subject_of
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
        body = statements(cell.source)
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
            yield names, "\n\n\n".join(node.text for node in [*first, *own])


def statements(source):
    """The statements of a source, each with its text."""
    lines, body = source.split("\n"), ast.parse(source).body
    for node in body:
        node.text = "\n".join(lines[first_line(node) - 1 : node.end_lineno])
    return body


def written(node):
    """A statement of a solution; what it imports of the challenges' is written out."""
    if not isinstance(node, ast.ImportFrom) or not node.module.endswith(".solutions"):
        return [node]
    home = import_module(node.module)
    texts = (inspect.getsource(getattr(home, alias.name)) for alias in node.names)
    return [part for text in texts for part in statements(text)]


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
import torch._dynamo  # and what torch itself needs

class Refuse:
    def find_spec(name, path=None, target=None):
        known = name.partition(".")[0] in sys.stdlib_module_names or name.startswith("torch.")
        if not known and name != "mine":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse)
import mine
"""


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


def the_solutions(file):
    """The library as a module; its parts for a job elsewhere, and all others."""
    space = mine.run(file.read_text())
    return space, {name: getattr(space, name) for name in space.__all__}


@pytest.mark.parametrize("options", [[], ["-O"]], ids=["as usual", "without asserts"])
def test_the_library_needs_torch_alone(every_solution, options):
    run = [sys.executable, *options, "-c", ALONE]
    found = subprocess.run(run, cwd=every_solution.parent, capture_output=True, text=True)
    assert not found.stderr


def test_its_imports_bring_no_part_of_torch_that_takes_seconds(every_solution):
    imports = [part.text for part in Library(every_solution.read_text()).imports]
    program = "\n".join([*imports, "print(*sys.modules)"])
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert {*found.stdout.split()} & {*SLOW} == set()


def test_its_import_brings_no_compiler_which_takes_seconds(every_solution):
    """What a use of torch brings by itself, such as an optimizer, is left to torch."""
    program = "import sys, torch, mine; print('torch._dynamo' in sys.modules)"
    run = [sys.executable, "-c", program]
    found = subprocess.run(run, cwd=every_solution.parent, capture_output=True, text=True)
    assert found.stdout.split() == ["False"], found.stderr


def test_ruff_finds_no_undefined_name_and_no_import_in_another_order(every_solution):
    run = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,I"]
    found = subprocess.run([*run, every_solution], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_every_type_in_the_library_is_one(every_solution):
    space, _ = the_solutions(every_solution)
    made = [thing for thing in vars(space).values() if mine.holds(thing)]
    methods = [each for kind in made for each in vars(kind).values() if callable(each)]
    for thing in [*made, *methods]:
        get_type_hints(thing)


def test_every_public_name_of_the_library_has_a_docstring(every_solution):
    _, public = the_solutions(every_solution)
    assert [name for name, thing in public.items() if not thing.__doc__] == []


def test_public_is_each_build_that_a_job_elsewhere_can_use(every_solution):
    _, public = the_solutions(every_solution)
    built = {name: home for home, build in BUILDS.items() for name in build.ours}
    assert public.keys() == {
        name for name, home in built.items() if subject_of(home, name) != COURSE
    }


def test_nothing_for_a_job_elsewhere_uses_what_is_the_course_s_own(every_solution):
    book = Library(every_solution.read_text())
    sections = book.sections()
    own = set().union(*(part.names for part in sections.pop(COURSE)))
    used = {name for parts in sections.values() for p in parts for name in names_in(p.text)}
    assert used & own == set()


def names_of(tree):
    """Every name that a program makes or uses."""
    kinds = "name", "id", "attr", "arg", "asname"
    found = [getattr(node, kind, None) for node in ast.walk(tree) for kind in kinds]
    return {part for name in found if isinstance(name, str) for part in name.split(".")}


def said_in(text):
    """The comments and the texts of a program."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [
        each.string for each in tokens if each.type in (tokenize.COMMENT, tokenize.STRING)
    ]


def test_no_sentence_of_the_library_names_what_the_course_alone_has(every_solution):
    text = every_solution.read_text()
    course = set()
    for file in ROOT.glob("mgpu_tutorial/**/*.py"):
        course |= {getattr(node, "name", "") for node in ast.parse(file.read_text()).body}
    course = {name for name in course if re.search("[a-z]_[a-z]|[a-z][A-Z]", name)}
    words = {word for said in said_in(text) for word in re.findall(r"\w+", said)}
    # the refusal of `save` names what 15 has for shards
    assert (words & course) - names_of(ast.parse(text)) <= {"save_shards"}


def test_a_name_in_backticks_is_in_the_library_or_in_torch(every_solution):
    text = every_solution.read_text()
    known = names_of(ast.parse(text)) | {*dir(builtins), *dir(torch.distributed)}
    known |= {said.strip("\"'") for said in said_in(text)}  # a key
    marked = re.compile(r"`([A-Za-z_]\w*)(?:\([^`]*\))?`")  # no example, as of `root.save()`
    names = {name for said in said_in(text) for name in marked.findall(said)}
    assert names - known == set()


def test_the_library_is_in_order(every_solution):
    text = every_solution.read_text()
    assert str(Library(text)) == text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_solutions_make_one_library_that_trains_as_the_package_s_parts_do(every_solution):
    every = mine.library(*(ours for build in BUILDS.values() for ours in build.ours.values()))
    own = mine.library(*language_model.OURS)
    assert all(thing.__module__ == "mine" for thing in (vars(every) | vars(own)).values())
    how = {"steps": 2, "dtype": "float64"}
    found = launch(language_model.train, 4, "tp=2,pp=2", parts=own, **how).results
    zero = launch(language_model.train, 2, "dp=2,zero=1", parts=own, **how).results
    (one,) = launch(language_model.train, 1, "dp=1", **how).results
    for losses in (*found, *zero):
        assert losses == pytest.approx(one, abs=1e-12)
