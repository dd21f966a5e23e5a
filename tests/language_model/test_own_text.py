"""A text of one's own: read, trained on, gone on with, and talked to."""

import json
from pathlib import Path

import pytest
import torch

from mgpu_tutorial.language_model import own_text
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
        losses = ranks(2, own_text.train_on, *call, timeout=100).results
        assert losses[0] == losses[1] and len(losses[0]) == 10
        assert torch.load(tmp_path / "own.pt")["step"] == steps
    assert losses[0][-1] < 3.5
    said = own_text.talk(str(file), "The ", 20)
    assert len(said) == 24 and said.startswith("The ")
    assert own_text.talk(str(file), "The ", 20) == said


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
