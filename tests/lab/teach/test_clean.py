"""`python -m mgpu_tutorial mine` puts the reader's file in order, and changes no more."""

import json

from mgpu_tutorial.lab.teach import clean, mine

BEFORE = '''"""Mine."""

import torch
import os
from torch.nn import Linear
from torch import nn
from torch.nn import ReLU


def by_hand(x):
    return os.path.join(x)  # please stay


# collectives: ring_all_reduce
def ring_all_reduce(tensor):
    return nn.Sequential(ReLU(), Linear(1, 1))


# point_to_point: swap
def swap(mine, peer):
    return mine
'''
AFTER = '''"""Mine."""

import os
from torch import nn
from torch.nn import Linear, ReLU


def by_hand(x):
    return os.path.join(x)  # please stay


# point_to_point: swap
def swap(mine, peer):
    """Each gets the other's.

    Of one shape.
    """
    return mine


# collectives: ring_all_reduce
def ring_all_reduce(tensor):
    return nn.Sequential(ReLU(), Linear(1, 1))
'''
STUB = '''def swap(mine, peer):
    """Each gets the other's.

    Of one shape.
    """
    ...


build(swap)
'''


def test_imports_chapters_and_docstrings(tmp_path, monkeypatch):
    monkeypatch.setattr(mine, "FILE", tmp_path / "mine.py")
    mine.FILE.write_text(BEFORE)
    half_typed = "def swap(:\n    build(swap)\n"
    texts = [text.splitlines(keepends=True) for text in (half_typed, STUB)]
    cells = [{"source": text, "metadata": {"tags": ["exercise"]}} for text in texts]
    (tmp_path / "01_point_to_point.ipynb").write_text(json.dumps({"cells": cells}))
    assert clean.clean().splitlines() == [
        "Not used, and gone: torch",
        "The chapters are in the order of the course.",
        "A docstring as in the notebook: swap",
    ]
    assert mine.FILE.read_text() == AFTER
    assert clean.clean() == "" and mine.FILE.read_text() == AFTER


def test_what_cannot_be_imported_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(mine, "FILE", tmp_path / "mine.py")
    assert clean.clean() == "" and not mine.FILE.exists()
    for text in ("def f(:\n", "import os\n\n1 / 0\n"):
        mine.FILE.write_text(text)
        assert "cannot be imported" in clean.clean() and mine.FILE.read_text() == text
