"""`python -m mgpu_tutorial mine` puts the reader's file in order, and changes no more."""

import json

import pytest

from mgpu_tutorial.lab.teach import mine
from mgpu_tutorial.lab.teach.book import Library

BEFORE = '''"""Mine."""

import torch
import os
from torch.nn import Linear
from torch import nn
from torch.nn import ReLU


def by_hand(x):
    return os.path.join(x)  # please stay


# data_partitioning: global_batches; borrowed: spare
def spare(x):
    return x


def global_batches(rank):
    return nn.Sequential(ReLU(), Linear(1, 1))


# point_to_point: swap
def swap(mine, peer):
    return mine
'''
STUB = '''def swap(mine, peer):
    """Each gets the other's.

    Of one shape.
    """
    ...


build(swap)
'''


def theirs(rank):
    """The batches of a rank,
    in their order.

    Raises what a reader's does not.
    """


@pytest.fixture
def said(tmp_path, monkeypatch):
    """What the command says of a file, beside a notebook with a stub."""
    monkeypatch.setattr(mine, "FILE", tmp_path / "mine.py")
    mine.FILE.write_text(BEFORE)
    half_typed = "def swap(:\n    build(swap)\n"
    texts = [text.splitlines(keepends=True) for text in (half_typed, STUB)]
    cells = [{"source": text, "metadata": {"tags": ["exercise"]}} for text in texts]
    (tmp_path / "01_point_to_point.ipynb").write_text(json.dumps({"cells": cells}))
    return mine.clean({"data_partitioning": {"global_batches": theirs}}.get).splitlines()


def test_it_says_what_it_did(said):
    assert said == [
        "Not used any more, and gone: spare.",
        "Imported for nothing, and gone: torch.",
        "Docstrings as in the course, for global_batches and swap.",
        "mine.py is in order, by subject.",
    ]


def test_nothing_is_left_to_do(said):
    text = mine.FILE.read_text()
    assert mine.clean() == "" and mine.FILE.read_text() == text
    assert str(Library(text)) == text


def test_imports_are_sorted_and_none_is_there_for_nothing(said):
    assert (
        "\nimport os\n\nfrom torch import nn\nfrom torch.nn import Linear, ReLU\n"
        in mine.FILE.read_text()
    )


def test_a_build_gets_the_docstring_of_its_stub(said):
    stub = STUB.partition("    ...")[0]
    assert f"{stub}    return mine\n" in mine.FILE.read_text()


def test_without_a_stub_it_gets_the_first_words_of_ours(said):
    doc = '"""The batches of a rank, in their order."""'
    assert f"def global_batches(rank):\n    {doc}\n    return" in mine.FILE.read_text()


OLD = '''import math
from torch.distributed.fsdp import fully_shard


# sharding: units; borrowed: queue
def queue(step: "MicroBatchStep", many: "list[math.nan] | None" = None) -> "list[Work]":
    return many


def units(model):
    """Shard it."""
    return fully_shard(queue(model))
'''


@pytest.fixture
def renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(mine, "FILE", tmp_path / "mine.py")
    mine.FILE.write_text(OLD)
    mine.clean()
    return mine.FILE.read_text()


def test_a_type_that_is_absent_goes_from_what_an_earlier_version_borrowed(renewed):
    assert '\ndef queue(step, many: "list[math.nan] | None" = None):\n' in renewed


def test_a_slow_import_of_an_earlier_version_moves_to_where_it_is_used(renewed):
    line = "    from torch.distributed.fsdp import fully_shard"
    assert f'"""Shard it."""\n{line}\n\n    return' in renewed
    assert "\nfrom torch" not in renewed


def test_what_cannot_be_imported_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(mine, "FILE", tmp_path / "mine.py")
    assert mine.clean() == "" and not mine.FILE.exists()
    for text in ("def f(:\n", "import os\n\n1 / 0\n"):
        mine.FILE.write_text(text)
        assert "cannot be imported" in mine.clean() and mine.FILE.read_text() == text
