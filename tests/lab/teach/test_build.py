"""A build tries what the reader wrote on real ranks, and keeps what passes."""

import os
import signal
import sys
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from IPython.utils.capture import capture_output

from mgpu_tutorial.data_partitioning.builds import build as of_samplers
from mgpu_tutorial.lab.run.errors import Interrupted
from mgpu_tutorial.lab.teach import limit, mine, needs
from mgpu_tutorial.lab.teach.build import Builder, Outcome, expect, launch


def add_up(number):
    """The package's own version."""
    dist.all_reduce(number)
    return number


def mean(number):
    return add_up(number) / dist.get_world_size()


class Mean:
    def of(self, number):
        return mean(number)


def used_by(rank, world_size, function):
    return function(torch.tensor([rank + 1.0]))


def leaves_one_rank_alone(function):
    """leave the number of one rank as it is."""
    expect(launch(used_by, 1, function).results, [torch.ones(1)], "alone")


def adds_two(function):
    """add up two ranks."""
    found = launch(used_by, 2, function, timeout=2).results
    expect(found, [torch.tensor([3.0])] * 2, "the sums")


def halves(function):
    """divide by the ranks."""
    expect(launch(used_by, 2, function).results[0], torch.tensor([1.5]), "the mean")


def of_halves(function):
    """have a mean."""
    expect(launch(used_by, 2, function().of).results[0], torch.tensor([1.5]), "the mean")


@pytest.fixture
def build(tmp_path, monkeypatch):
    """The `build` of a chapter; the reader's library lies in a folder of its own."""
    monkeypatch.setattr(mine, "FILE", tmp_path / "mine.py")
    asked = {add_up: [leaves_one_rank_alone, adds_two], mean: [halves], Mean: [of_halves]}
    return Builder("second", asked)


RIGHT = "import torch.distributed as dist\ndef add_up(number):\n    dist.all_reduce(number)\n"
RIGHT += "    return number\n"
MEAN = "import torch.distributed as dist\n"
MEAN += "def mean(number):\n    return add_up(number) / dist.get_world_size()\n"


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("def add_up(number): pass", "alone, entry 0 of 1: None"),
        ("def add_up(number): raise SystemExit(3)", "rank 0 raised SystemExit: 3"),
        ("def add_up(): return 1", "takes 0 positional arguments but 1 was given"),
    ],
)
def test_the_first_behaviour_that_does_not_hold_says_what_was_seen(cell, build, source, seen):
    rows = build.rows(*cell(source))
    assert [row.holds for row in rows] == [False, None]
    assert seen in rows[0].seen


def test_an_error_outside_of_a_launch_names_its_line_too(cell):
    def takes_a_list(function):
        function([])

    build = Builder("second", {add_up: [takes_a_list]})
    (row,) = build.rows(*cell("def add_up(number):\n    return number[5]\n"))
    assert row.seen.startswith("IndexError: list index out of range, at ")
    assert row.seen.endswith(":2  return number[5]")


ENDLESS = {
    "works": ("while True: pass", "2  while True: pass"),
    "sleeps": ("while True:\n        time.sleep(9)", "3  time.sleep(9)"),
    "swallows": (
        "while True:\n        try:\n            time.sleep(9)\n        except Exception:\n"
        "            pass",
        "4  time.sleep(9)",
    ),
}


@pytest.mark.parametrize("body, place", ENDLESS.values(), ids=ENDLESS)
def test_a_loop_without_an_end_is_ended_in_the_kernel_and_named(
    cell, monkeypatch, body, place
):
    monkeypatch.setattr(limit, "LIMIT", 0.2)
    clock, usual = signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)
    header = "def rank_indices(rank, world_size, number_of_samples, seed, epoch, drop_last):"
    *_, function = cell(f"{header}\n    {body}\nimport time")
    first, *others = of_samplers.rows(function)
    assert first.seen.startswith("it had not returned after ") and place in first.seen
    assert not first.holds and {row.holds for row in others} == {None}
    assert signal.getsignal(signal.SIGALRM) is usual
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) is (clock[0] > 0)  # of pytest's own


def test_a_launch_and_another_thread_have_no_limit_but_their_own(cell, monkeypatch):
    monkeypatch.setattr(limit, "LIMIT", 0.05)
    monkeypatch.setattr(limit, "WAITING", 1)
    build = Builder("second", {add_up: [leaves_one_rank_alone]})
    function = cell(
        "def add_up(number):\n    time.sleep(0.5)\n    return number\nimport time"
    )
    (row,) = build.rows(*function)
    assert row.holds, row.seen
    build, rows = Builder("second", {mean: [lambda function: function()]}), []
    (slow,) = cell("def mean():\n    time.sleep(0.5)\nimport time")
    thread = threading.Thread(target=lambda: rows.extend(build.rows(slow)))
    thread.start()
    thread.join()
    assert [row.holds for row in rows] == [True]


def test_the_stop_button_is_told_in_a_sentence_with_the_line(cell, request):
    # A job that a shell put in the background inherits that SIGINT is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def stops(function):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        function()

    build = Builder("second", {mean: [stops]})
    with pytest.raises(
        Interrupted, match=r"^the build was stopped, at .*:3  time.sleep\(9\)$"
    ):
        build.rows(*cell(f"def mean():\n    {ENDLESS['sleeps'][0]}\nimport time"))


@pytest.mark.parametrize(
    "found, right, within",
    [
        (1_000_001, 1_000_000, 0.0),
        (1.000001, 1.0, 0.0),
        (torch.tensor([1.0, 1.000001]), torch.ones(2), 0.0),
        (1e6 + 2, 1e6, 1.0),
        (2e-9, 0.0, 1e-9),
        ([3, 1_000_000], [3, 1_000_001], 0.0),
        (2**53 + 1, 2**53, 0.0),
        (torch.tensor([2**53 + 1]), torch.tensor([2**53]), 0.0),
        (1 + 2j, 1, 0.5),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), 0.0),
    ],
)
def test_what_is_further_away_than_allowed_is_wrong_however_large(found, right, within):
    expect(right, right, "the number", within)
    with pytest.raises(AssertionError, match="^the number.*, expected "):
        expect(found, right, "the number", within)


def test_another_name_is_one_sentence(cell, build):
    (row,) = build.rows(*cell("def add(number):\n    return 1\n"))
    assert row.must == "have a name of this chapter: add_up, mean, Mean" and not row.holds


def said(build, *functions):
    with capture_output() as shown:
        build(*functions)
    return shown.stdout.strip()


NO_FUNCTIONS = ["add_up"], [None], [len], [partial(print)], [Mean()]


@pytest.mark.parametrize("given", [[], *NO_FUNCTIONS])
def test_what_is_no_function_is_one_sentence(build, given):
    assert "must get the function itself, build(name)" in said(build, *given)


def test_a_lambda_is_told_that_it_has_no_name(build):
    assert "a lambda has none" in said(build, lambda number: number)


@pytest.mark.filterwarnings("error")
def test_what_is_of_torch_is_judged_without_a_warning(build):
    assert "must have a name of this chapter" in said(build, dist.broadcast)


def test_a_mistake_of_ours_is_a_verdict_too(cell, build, monkeypatch):
    monkeypatch.setattr(mine, "holds", lambda thing: thing.no_such_thing)
    heard = said(build, *cell(RIGHT))
    assert heard.startswith("not yet: build") and "a mistake of this course" in heard


def test_a_stub_is_one_line_and_folds_what_will_be_tried(cell, build):
    blank, whole = cell("def add_up(number):\n    ...\n" + MEAN)
    assert said(build, blank, whole) == "not yet: a `...` is left to fill in"
    made = Outcome(["add_up", "mean"], build.rows(blank, whole), [])
    line, fold = made._repr_html_().split("<details>")
    assert "not yet" in line and "divide" not in line
    assert fold.count("<li>") == 3 and "<li>add up two ranks</li>" in fold


def test_a_stub_below_an_answer_leaves_the_rows(cell, build):
    heard = said(build, *cell(f"{RIGHT}def mean(number):\n    ...\n"))
    assert "must add up two ranks: yes" in heard and "left to fill in" in heard


def test_what_is_ours_is_not_kept(build):
    last = said(of_samplers, of_samplers.ours["rank_indices"]).splitlines()[-1]
    assert last.startswith("Not kept in mine.py: it is ours")
    assert not mine.FILE.exists()


def test_a_behaviour_of_two_functions_says_whose_it_is():
    def behaves(function):
        """add up"""

    def other(numbers):
        return sum(numbers)

    build = Builder("collectives", {sum_of: [behaves], other: [behaves]})
    assert [row.must for row in build.rows(sum_of, other)] == [
        "add up (sum_of)",
        "add up (other)",
    ]


def sum_of(numbers):
    return sum(numbers)


def test_what_passes_is_kept_with_its_imports_and_a_second_pass_replaces_it(cell, build):
    assert said(build, *cell("def add_up(number):\n    return number\n")).startswith(
        "not yet"
    )
    assert not mine.FILE.exists()
    heard = said(build, *cell(RIGHT))
    where = f"{mine.FILE.parent.name}/mine.py"  # which tells a student's copy from ours
    assert heard.endswith(f"add_up is now in {where}. To use it: from mine import add_up")
    assert mine.FILE.read_text().count("import torch.distributed as dist\n") == 1
    said(build, *cell(RIGHT.replace("return number", "return number + ZERO") + "ZERO = 0\n"))
    text = mine.FILE.read_text()
    assert text.count("def add_up") == 1 and "ZERO = 0\n" in text


def test_an_earlier_build_is_lent_until_the_reader_has_made_it(cell, build, monkeypatch):
    monkeypatch.setattr(needs, "OURS", __name__.partition(".")[0])  # this file is the package
    for module in (needs, mine):
        monkeypatch.setattr(module, "chapter_of", lambda name: "second")
    stub = "def add_up(number):\n    ...\n"
    source = (
        stub + MEAN + "class Mean:\n    def of(self, number):\n        return mean(number)\n"
    )
    blank, own, whole = cell(source)
    assert "Tried with our add_up." in said(build, own)
    assert sys.modules["__main__"].add_up is blank
    assert "Tried with our add_up." in said(build, whole)
    text = mine.FILE.read_text()
    assert "# built in second: mean, Mean\n# borrowed from second: add_up\n" in text
    assert "The package's own" in text
    said(build, *cell(RIGHT))
    text = mine.FILE.read_text()
    assert "# built in second: add_up, mean, Mean\n" in text and "# borrowed" not in text
    space = {}
    exec(text, space)
    assert space["Mean"].of and space["add_up"] is not add_up


@pytest.mark.parametrize("by_now", ["add_up = 3", "del add_up"])
def test_what_has_passed_and_means_something_else_by_now_is_lent(cell, build, by_now):
    mean_ = cell(RIGHT + MEAN)[1]
    said(build, sys.modules["__main__"].add_up)
    exec(by_now, mean_.__globals__)
    assert "Tried with our add_up." in said(build, mean_)
    assert mean_.__globals__.get("add_up") == (3 if "3" in by_now else None)


def test_functions_of_one_build_that_call_each_other_are_kept_once(
    cell, tmp_path, monkeypatch
):
    monkeypatch.setattr(mine, "FILE", tmp_path / "mine.py")
    half = "def half(count):\n    return count / 2"
    quarter = "def quarter(count):\n    return half(half(count))"
    mine.keep("first", cell(f"count = 49\n\n\n{half}\n\n\n{quarter}"))
    kept = f"# built in first: half, quarter\n\n\n{half}\n\n\n{quarter}\n\n\n# What is"
    assert kept in mine.FILE.read_text()  # each once; an argument is no name outside


def test_a_class_is_kept_before_what_is_derived_from_it(cell, tmp_path, monkeypatch):
    monkeypatch.setattr(mine, "FILE", tmp_path / "mine.py")
    build = Builder("first", {mean: [], Mean: []})
    base = "class Mean:\n    def of(self):\n        return 1\n"
    made = cell(base + base.replace("class Mean", "class mean(Mean)"))
    for function in (made[1], made[0], made[1], made[0]):
        said(build, function)
    exec(mine.FILE.read_text(), {})
