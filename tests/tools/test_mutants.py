"""make mutants: each mistake can be made today, and is told from what is no mistake."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

import pytest

from mgpu_tutorial import CHAPTERS
from tools import mutants
from tools.mutants import Copy, Mutant, Outcome, Unfit

ALL = [mutant for chapter in mutants.chapters() for mutant in mutants.load(chapter)]


@pytest.mark.parametrize("mutant", ALL, ids=lambda m: f"{m.chapter}-{m.number}")
def test_a_mistake_can_be_made_today(mutant):
    changed = mutant.applied((mutants.ROOT / mutant.file).read_text(encoding="utf-8"))
    compile(changed, mutant.file, "exec")
    assert mutant.file.endswith(".py") and mutant.wrong and not mutant.wrong.endswith(".")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        text = (mutants.ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text, test
    for name in mutant.notebooks:
        assert name in CHAPTERS


def test_every_chapter_has_mistakes_and_no_two_are_the_same():
    assert set(mutants.chapters()) >= {*CHAPTERS, "shared", "lab"}
    assert len({(m.file, m.old, m.new) for m in ALL}) == len(ALL) >= 120


FILE = "mgpu_tutorial/lab/words.py"
HALF = Mutant("lab", 1, FILE, "nbytes /= 1024", "nbytes /= 2048", "KiB are halved",
              tests=("tests/lab/test_words.py",))  # fmt: skip


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("no such text", "", "lab 1: its old text stands 0 times in"),
        ("nbytes", "", r"lab 1: its old text stands \d+ times in"),
        ("nbytes /= 1024", "nbytes /= 1024", "old and new text are the same"),
    ],
)
def test_a_mistake_that_cannot_be_made_is_named(old, new, says):
    text = (mutants.ROOT / FILE).read_text(encoding="utf-8")
    with pytest.raises(Unfit, match=says):
        replace(HALF, old=old, new=new).applied(text)


def test_names_choose_chapters_or_single_mistakes(capsys):
    assert {m.chapter for m in mutants.chosen(["nonblocking"])} == {"nonblocking"}
    assert [m.number for m in mutants.chosen(["lab:3"])] == [3]
    assert mutants.main(["nowhere"]) == 2
    assert "NAMES='nowhere': no such chapter; there are " in capsys.readouterr().err


def test_the_closest_tests_come_first_and_the_notebook_last():
    first, whole, book = mutants.checks_of(replace(HALF, chapter="nonblocking"))
    assert first[-1] == "tests/lab/test_words.py"
    assert whole[-1] == "tests/test_nonblocking.py"
    assert "--nbval" in book and book[-1] == "notebooks/02_nonblocking.ipynb"


def test_a_listing_is_not_compared():
    book = '{"cells": [%s]}'
    cell = '{"cell_type": "code", "metadata": {}, "source": ["%s"]}'
    listing = mutants.without_listings(book % (cell % "show_source(worker)"))
    assert "nbval-ignore-output" in listing
    assert "nbval" not in mutants.without_listings(book % (cell % "launch(worker, 2)"))


@pytest.mark.fresh
@pytest.mark.timeout(300)  # five times a pytest
def test_a_mistake_is_caught_by_a_test_and_a_remark_survives(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # with nobody else's files
    remark = replace(HALF, number=2, old="nbytes /= 1024", new="nbytes /= 1024  # bytes")
    broken = replace(HALF, number=3, new="nbytes /= 1024)")  # not even Python
    absent = replace(HALF, number=4, tests=("tests/lab/test_words.py::test_nothing",))
    seeded = [replace(m, chapter="none") for m in (HALF, remark, broken, absent)]
    outcomes = mutants.try_all(seeded, 1, lambda outcome: None)
    assert [o.verdict for o in outcomes] == ["caught", "survived", "undecided", "undecided"]
    assert outcomes[0].by.startswith("tests/lab/test_words.py::test_sizes_are_written")
    assert not list(tmp_path.iterdir())
    assert "2048" not in (mutants.ROOT / FILE).read_text(encoding="utf-8")


class Failing(Copy):
    """A copy in which a pytest without any mistake fails too."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def pytest(self, words):
        self.asked.append(list(words))
        return 1, ["tests/a.py::test_shaky"]


def test_what_fails_without_the_mistake_too_has_noticed_nothing():
    shaky = Outcome(HALF, "caught", "tests/a.py::test_shaky", "tests/a.py")
    sound = Outcome(HALF, "caught", "tests/a.py::test_sound", "tests/a.py")
    other = Outcome(HALF, "undecided", "pytest could not run it", "tests/b.py")
    mutants.confirm([shaky, sound, other], copy := Failing())
    assert (shaky.verdict, sound.verdict) == ("undecided", "caught")
    assert copy.asked[0][-2:] == ["tests/a.py::test_shaky", "tests/a.py::test_sound"]


def test_the_table_counts_and_the_survivors_are_explained():
    explained = replace(HALF, number=2, survives="Nobody looks.")
    told = mutants.report([Outcome(HALF, "caught", "x"), Outcome(explained, "survived")])
    assert told.splitlines() == [
        "lab    1 of 2",
        "all    1 of 2: 50.0% caught",
        "survived: lab 2, KiB are halved",
        "    Nobody looks.",
    ]


@pytest.mark.fresh
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_the_middle_it_leaves_nothing(tmp_path, number):
    # where the tests run in the background a child would be born with Ctrl-C ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    program = subprocess.Popen(
        [sys.executable, "tools/mutants.py", "--jobs", "1", "lab:1"],
        cwd=mutants.ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, before)
    end = time.monotonic() + 90
    while not list(tmp_path.glob("mutants-*/0/output")) and time.monotonic() < end:
        time.sleep(0.05)
    program.send_signal(number)
    _, said = program.communicate(timeout=20)
    assert "stopped; nothing below is confirmed" in said and program.returncode == 1
    assert not list(tmp_path.iterdir())
