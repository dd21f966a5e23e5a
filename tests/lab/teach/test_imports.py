"""Imports stand as isort would put them, and one with a remark stays as it is."""

import subprocess
import sys

import pytest

from mgpu_tutorial.lab.teach.imports import import_lines

MIXED = """\
from torch import nn
import torch.distributed as dist
from typing import NamedTuple, Any
import os
from torch import Tensor
from __future__ import annotations
from torch.nn.functional import linear, nll_loss as nll, cross_entropy, MANY
import torch
from torch import tensor as t
import numpy as np  # big"""
IN_ORDER = """\
from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np  # big
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import tensor as t
from torch.nn.functional import MANY, cross_entropy, linear
from torch.nn.functional import nll_loss as nll"""
LONG = [f"from torch.nn.functional import {name}" for name in ("a" * 40, "b" * 40)]


def test_imports_come_by_origin_and_name_a_line_for_each_module():
    assert "\n".join(import_lines(MIXED.split("\n"))) == IN_ORDER


@pytest.mark.parametrize(
    "texts", [MIXED.split("\n"), LONG, ["import os"]], ids=["mixed", "long", "one"]
)
def test_ruff_would_put_them_no_other_way(texts, tmp_path):
    file = tmp_path / "imports.py"
    file.write_text("\n".join(import_lines(texts)) + "\n")
    run = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "I", str(file)]
    found = subprocess.run(run, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
