"""make test, quick and check: every step runs, and the end says which of them failed."""

import sys

import pytest

from tools import budget, check

FAILS, PASSES = [sys.executable, "-c", "raise SystemExit(3)"], [sys.executable, "-c", ""]


def test_every_step_runs_after_a_failure_and_the_failures_are_named(capfd):
    said = [sys.executable, "-c", "print('ran')"]
    assert check.run({"one": FAILS, "two": said, "three": FAILS}) == ["one", "three"]
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["one", "ran", "two", "three"]


def test_no_selected_test_is_no_failure():
    nothing = [sys.executable, "-c", f"raise SystemExit({check.NOTHING_TO_RUN})"]
    assert check.run({"none": nothing, "all": PASSES}) == []


def test_a_failure_is_the_exit_code(monkeypatch, capsys):
    for steps, code, said in (
        ({"style": FAILS, "tests": PASSES}, 1, "failed: style, in"),
        ({"style": PASSES}, 0, "all checks passed, in"),
    ):
        monkeypatch.setattr(check, "everything", lambda steps=steps: steps)
        assert check.main(["test"]) == code
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, module, tests",
    [
        ("point_to_point", "point_to_point.py", "test_point_to_point.py"),
        ("ddp_buckets", "mgpu_tutorial/ddp_buckets", "tests/ddp_buckets"),
    ],
)
def test_a_chapter_is_its_module_its_tests_and_its_notebook(name, module, tests):
    steps = check.one_chapter(name)
    assert steps["style"][-3].endswith(module) and steps["tests"][-1].endswith(tests)
    assert steps["notebook"][-1].endswith(f"_{name}.ipynb")


def test_another_name_is_refused_with_what_there_is(capsys):
    assert check.main(["chapter", "nowhere"]) == 2
    assert "NAME='nowhere': no such chapter; there are" in capsys.readouterr().err


def test_time_is_added_by_chapter_and_what_is_over_says_so():
    assert budget.chapter_of("tests/ddp_buckets/test_hooks.py::test_a") == "ddp_buckets"
    assert budget.chapter_of("tests/test_nonblocking.py::test_a[1]") == "nonblocking"
    assert budget.chapter_of("notebooks/03_collectives.ipynb::Cell 2") == "collectives"
    assert budget.lines({"a": 3.04, "b": 20.0, "lab": 19.0}, 15.0) == [
        "  20.0 s  b   over its 15 s",
        "  19.0 s  lab",
        "   3.0 s  a",
    ]
    assert budget.lines({"lab": 181.0}, 15.0) == [" 181.0 s  lab   over its 180 s"]
