"""make check without a NAME runs what a change reaches, and no more than that."""

import json
from statistics import median

import pytest

from tools.reached import code_of, graph, to_run


def books(files):
    return {path for path in files if path.endswith(".ipynb")}


def test_a_file_outside_of_lab_reaches_few_notebooks():
    package = [path for path in graph().files if path.startswith("mgpu_tutorial/")]
    lesson = [path for path in package if not path.startswith("mgpu_tutorial/lab/")]
    assert median(len(books(graph().reached([path]))) for path in lesson) <= 3


@pytest.mark.parametrize("path", ["mgpu_tutorial/lab/run/launch.py", "pyproject.toml"])
def test_a_change_of_the_equipment_reaches_everything(path):
    found = to_run([path])
    everything = books(graph().files) | {path for path in graph().files if is_test(path)}
    assert set(found) == {"notebooks", "tests"} or set(found) == everything


def is_test(path):
    is_here = path.startswith("tests/") and not path.startswith("tests/browser/")
    return is_here and path.rpartition("/")[2].startswith("test_")


@pytest.mark.parametrize(
    "path, users",
    [
        ("mgpu_tutorial/ddp_buckets/wrappers.py", ["notebooks/08_ddp_buckets.ipynb"]),
        ("mgpu_tutorial/ddp_buckets/wrappers.py", ["tests/ddp_buckets/test_wrappers.py"]),
        ("mgpu_tutorial/ddp_buckets/wrappers.py", ["tests/sharding/test_together.py"]),
        ("mgpu_tutorial/instruments/prove/proof.py", ["notebooks/06_distributed_sgd.ipynb"]),
        ("mgpu_tutorial/collectives/builds.py", ["tests/test_builds.py"]),
        ("mgpu_tutorial/shared/logbook.json", ["notebooks/26_language_model.ipynb"]),
        ("docs/mine.md", ["tests/test_scripts_with_mine.py"]),
        ("tests/conftest.py", ["tests/sharding/test_stages.py"]),
        ("tests/builds.py", ["tests/sharding/test_builds.py"]),
        ("tools/assignment.py", ["tests/test_exercises.py"]),
        ("notebooks/03_collectives.ipynb", ["notebooks/03_collectives.ipynb"]),
        ("notebooks/03_collectives.ipynb", ["tests/test_exercises.py"]),
        ("README.md", ["tests/test_texts.py"]),
    ],
)
def test_what_uses_a_file_is_run(path, users):
    assert set(users) <= to_run([path]).keys()


@pytest.mark.parametrize(
    "path", ["mgpu_tutorial/ddp_buckets/wrappers.py", "notebooks/08_ddp_buckets.ipynb"]
)
def test_earlier_chapters_are_not_run(path):
    found = to_run([path])
    assert not [
        name for name in found if name.startswith(("notebooks/03", "tests/collectives"))
    ]


def test_each_file_of_data_in_the_package_is_used():
    data = [path for path in graph().files if path.startswith("mgpu_tutorial/")]
    data = [path for path in data if not path.endswith((".py", ".md", "LICENSE.txt"))]
    assert data and [path for path in data if path not in graph().users] == []


@pytest.mark.parametrize(
    "kind, text, is_code",
    [
        ("markdown", "Each rank sends.", False),
        ("markdown", "Every rank sends.\n\n```python\nsend(1)\n```", True),
        ("code", "Every rank sends.", True),
    ],
)
def test_prose_is_no_code_and_what_answers_a_change_is(kind, text, is_code):
    before, after = (
        json.dumps({"cells": [{"cell_type": kind, "source": [text]}]})
        for kind, text in (("markdown", "Every rank sends."), (kind, text))
    )
    assert (code_of(before) != code_of(after)) == is_code
