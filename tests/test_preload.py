"""The fork server of a notebook imports what its chapter's ranks need, and no more."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from mgpu_tutorial import CHAPTERS, preload

ROOT = Path(__file__).parent.parent
TRAINS = re.compile(r"optim\b|DistributedDataParallel|\bprice\(")  # what torch._dynamo is for


def code_of(chapter):
    (path,) = ROOT.glob(f"notebooks/[0-9]*_{chapter}.ipynb")
    return [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_what_a_chapter_imports_first_says_whether_its_ranks_train(chapter):
    first, *rest = [text for text in code_of(chapter) if "mgpu_tutorial" in text]
    trains = any(map(TRAINS.search, [first, *rest]))
    assert trains <= ("torch._dynamo" in preload._needed(first))
    uses = any("torchvision" in text for text in [first, *rest])
    assert uses <= ("mgpu_tutorial.shared.vision" in preload._needed(first))


@pytest.mark.parametrize("chapter", sorted(preload._NO_TRAINING))
def test_what_only_tells_does_not_wait_for_the_compiler(chapter):
    first = next(text for text in code_of(chapter) if "mgpu_tutorial" in text)
    assert preload._needed(first) == ()


@pytest.mark.parametrize("cell", ["", "from mgpu_tutorial.lab import launch"])
def test_a_cell_that_names_no_chapter_may_train(cell):
    assert preload._needed(cell) == preload._TRAINING


@pytest.mark.parametrize("chapter", ["language_model", "experts"])
def test_what_loads_torchvision_finds_it_in_the_fork_server(chapter):
    code = f"import sys, mgpu_tutorial.{chapter}; sys.exit('torchvision' not in sys.modules)"
    loads = subprocess.run([sys.executable, "-c", code]).returncode == 0
    needed = preload._needed(f"from mgpu_tutorial import {chapter}")
    assert loads == ("mgpu_tutorial.shared.vision" in needed)
