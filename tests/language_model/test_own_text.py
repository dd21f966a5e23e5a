"""A text of one's own: read, trained on, gone on with, and talked to."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from mgpu_tutorial.lab import launch
from mgpu_tutorial.language_model import course, own_text, train
from mgpu_tutorial.language_model.model import AGES, SHIPPED, batch_of, decode, encode

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "26_language_model.ipynb"
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps. " * 30


def test_accents_and_quotes_become_ascii_and_the_rest_a_question_mark(tmp_path):
    file = tmp_path / "own.txt"
    file.write_text("\u201cd\u00e9j\u00e0\u201d\tvu \u2013 \u732b\r\n" + TEXT, "utf-8")
    assert decode(own_text.read_text(str(file)))[:15] == '"deja" vu - ?\nT'


def test_a_batch_is_of_the_text_that_is_given():
    inputs, targets = batch_of(3, encode(TEXT))
    assert all(decode(row) in TEXT for row in inputs)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.slow
def test_a_second_run_goes_on_from_the_first(ranks, tmp_path):
    file = tmp_path / "own.txt"
    file.write_text(TEXT)
    for steps in (10, 20):
        call = str(file), "dp=2", 1e-6 * steps  # `ranks` makes the same call once
        one, other = ranks(2, own_text.train_on, *call, timeout=100).results
        assert one == other and one.steps == steps and one.last < one.first
        assert torch.load(tmp_path / "own.pt")["step"] == steps
    assert one.last < 3.5
    (line,) = own_text.lines_beside(str(file)).read_text().splitlines()  # after 20 steps
    assert line.startswith("    20  The ") and len(line) <= 8 + 64
    said = own_text.talk(str(file), "The ", 20)
    assert len(said) == 24 and said.startswith("The ")
    assert own_text.talk(str(file), "The ", 20) == said
    assert own_text.talk(str(file), "Größe", 3).startswith("Gro?e")  # as a text is read


@pytest.mark.slow
def test_an_interrupt_leaves_no_process_and_the_next_run_goes_on(ranks, tmp_path, request):
    """Stopped in the middle, from the last tenth step, with the losses of a run in one."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, usual))
    file, saved, during = tmp_path / "own.txt", tmp_path / "own.pt", []
    file.write_text(TEXT)
    ranks(1, idle)  # starts the server, which stays
    before = set(psutil.Process().children(recursive=True))

    def stop():
        for _ in range(1800):
            time.sleep(0.05)
            if saved.exists() and torch.load(saved)["step"] >= 20:
                break
        time.sleep(0.2)
        during.extend(set(psutil.Process().children(recursive=True)) - before)
        os.kill(os.getpid(), signal.SIGINT)

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(KeyboardInterrupt, match="rank 1 was at"):
        launch(own_text.train_on, 2, str(file), "dp=2", 5.0, timeout=100)
    stopper.join()
    _, left = psutil.wait_procs(during, timeout=5)
    assert len(during) >= 2 and not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]
    done = torch.load(saved)["step"]
    assert done >= 20 and done % 10 == 0
    last = launch(own_text.train_on, 2, str(file), "dp=2", 1e-6, timeout=100).results[0]
    assert torch.load(saved)["step"] == last.steps == done + 10
    how = {"steps": done + 10, "lr": 2e-3, "text": encode(TEXT), "timeout": 100}
    losses = ranks(2, train, **how).results[0]
    assert last[1:] == pytest.approx((losses[-10], losses[-1]), abs=1e-5)


def idle(rank, world_size):
    """Nothing to do."""


def test_the_four_lines_are_of_one_run_whose_checkpoint_is_shipped():
    ages = json.loads(AGES.read_text("ascii"))
    assert [age["step"] for age in ages] == [20, 100, 300, 3000]
    assert torch.load(SHIPPED, weights_only=True)["step"] == 3000
    assert len({age["plan"] for age in ages}) == 4
    losses = [age["loss"] for age in ages]
    assert losses == sorted(losses, reverse=True)
    assert all(age["text"].startswith("Returns a new tensor ") for age in ages)
    head = "".join(json.loads(NOTEBOOK.read_text("utf-8"))["cells"][0]["source"])
    assert all(" ".join(age["text"].split("\n")).rstrip() in head for age in ages)


def test_prose_has_no_links_tables_code_or_marks(tmp_path):
    page = (
        "# A **title**\n\nSee [06](06_a.ipynb), `dp`.\n\n| a |\n|---|\n\n```\nrun\n```\nEnd."
    )
    cells = [{"cell_type": "markdown", "source": [page]}, {"cell_type": "code", "source": []}]
    (tmp_path / "00_a.ipynb").write_text(json.dumps({"cells": cells}))
    assert " ".join(course.prose(str(tmp_path)).split()) == "# A title See 06, dp. End."


def test_the_lines_of_the_course_are_of_one_prompt_and_growing_steps():
    lines = course.LINES.read_text("ascii").splitlines()
    steps = [int(line[:6].replace(",", "")) for line in lines]
    assert steps == sorted(own_text.AGES)[: len(steps)] and steps[-1] >= 2000
    assert all(line[8:].startswith(course.PROMPT) for line in lines)
