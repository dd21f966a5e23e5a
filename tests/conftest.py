"""The fork server of the tests imports what their ranks import, once for all of them.

A worker that stands in a test module brings pytest into its rank, a tenth of a second for
each, and its chapter with it; the tests of `lab` say what the ranks of a notebook are born
with.
"""

import ast
import gc
import linecache
import sys
import types

import cloudpickle
import pytest
from hypothesis import settings

settings.register_profile("same in every run", derandomize=True, deadline=None)
settings.register_profile("few", settings.get_profile("same in every run"), max_examples=20)


pytest.register_assert_rewrite("tests.builds")  # no test module, and asserts in their words


def pytest_addoption(parser):
    parser.addoption("--once", action="store_true", help="one case of each test")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """`make quick` tries each test once: the case `id="once"`, else that in the middle."""
    if config.getoption("once"):
        cases = {}
        for item in items:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        chosen = [_chosen(case) for case in cases.values()]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def _chosen(items):
    """The case that its test marks with `pytest.param(…, id="once")`, else the middle one."""
    ids = [item.nodeid.partition("[")[2].rstrip("]").split("-") for item in items]
    marked = [item for item, parts in zip(items, ids, strict=True) if "once" in parts]
    return marked[0] if marked else items[len(items) // 2]


def pytest_configure(config):
    """Before the first test; a process that only hands tests to others needs none of it."""
    settings.load_profile("few" if config.getoption("once") else "same in every run")
    if config.getoption("numprocesses", None):
        return
    gc.disable()  # until all is imported: it would look at each module again and again
    import torch

    torch.set_num_threads(1)  # as the ranks have; on a busy machine more only wait


def pytest_collection_finish():
    """All is imported, and stays; Python need not look for garbage in it."""
    from mgpu_tutorial import CHAPTERS
    from mgpu_tutorial.lab.run import server

    server.PRELOAD += [
        name
        for name in sys.modules
        if name.startswith("mgpu_tutorial.") and name.split(".")[1] in CHAPTERS
    ]
    server.PRELOAD += ["pytest", "psutil", "torch.distributed.checkpoint.state_dict"]
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def ranks():
    """Start a worker on some ranks; the same call again gives the same report.

    `ranks(4, worker, *args, **kwargs)` is `launch(worker, 4, *args, **kwargs)`, done once in
    a session for the same arguments: parametrised tests share a launch.
    """
    from mgpu_tutorial.lab import launch

    reports = {}

    def start(world_size, worker, *args, **kwargs):
        call = cloudpickle.dumps((world_size, worker, args, kwargs))
        if call not in reports:
            reports[call] = launch(worker, world_size, *args, **kwargs)
        return reports[call]

    return start


@pytest.fixture
def refused(ranks):
    """Every rank refuses, before anything is sent.

    `refused(2, ValueError("cap", "-1"), worker, *args)` runs `worker(rank, 2, *args)`: each
    rank must raise an error of this kind, of one sentence or two, with these names in it, and
    none may have called `torch.distributed` before. A name is an argument's, a parameter's or
    a value that was given: so the sentence can be put better, and no test turns red.
    A worker that builds what it then spoils is asked with `sent=True`, which allows the calls
    before the refusal. (A text in place of the error asks for these words.)
    """

    def attempt(rank, world_size, worker, *args):
        try:
            return f"returned {worker(rank, world_size, *args)!r:.200}"
        except (ValueError, TypeError, IndexError, KeyError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"

    def ask(world_size, asked, worker, *args, sent=False):
        report = ranks(world_size, attempt, worker, *args, trace=True, timeout=20)
        for said in report.results:
            assert not said.startswith("returned"), said
            if isinstance(asked, Exception):
                assert said.partition(":")[0] == type(asked).__name__, said
            for name in [asked] if isinstance(asked, str) else asked.args:
                assert name in said, f"{name!r} is not in: {said}"
            assert len(said) < 400 and said.count("\n") < 3, said
        assert sent or report.events == []

    return ask


@pytest.fixture
def cell(monkeypatch):
    """Run a source as a cell of a notebook does; gives the functions and classes it makes."""
    return cell_in(monkeypatch)


def cell_in(monkeypatch):
    """The same for as long as the patches last."""
    shown = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", shown)

    def run(source):
        name = f"<cell {len(linecache.cache)}>"
        lines = source.splitlines(keepends=True)
        monkeypatch.setitem(linecache.cache, name, (len(source), None, lines, name))
        exec(compile(source, name, "exec"), vars(shown))
        made = (node for node in ast.parse(source).body if hasattr(node, "name"))
        return [vars(shown)[node.name] for node in made]

    return run
