"""The folded answers of 20's exercises, run as they stand on the page."""

import re
from inspect import getsource
from pathlib import Path

import nbformat
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

from mgpu_tutorial.tensor_parallel.layers import ColumnParallelLinear, CopyToRanks
from mgpu_tutorial.tensor_parallel_in_practice import vocabulary

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.fixture(scope="module")
def answers():
    """The code of the answers, in the page's order."""
    (path,) = NOTEBOOKS.glob("*_tensor_parallel_in_practice.ipynb")
    (cell,) = [c for c in nbformat.read(path, 4).cells if "## Exercises" in c.source]
    return re.findall(r"```python\n(.*?)```", cell.source, re.DOTALL)


def smoothed_loss(rank, world_size, text, logits, targets):
    names = vars(vocabulary) | {"epsilon": 0.1}
    exec(text, names)
    mine = logits.chunk(world_size, -1)[rank].clone().requires_grad_()
    loss = names["parallel_cross_entropy"](mine, targets)
    loss.backward()
    return loss.detach(), mine.grad


def test_label_smoothing_is_that_of_one_process(ranks, answers):
    ours = getsource(vocabulary.parallel_cross_entropy)
    *kept, last = ours.rstrip().splitlines(keepends=True)
    assert last.strip().startswith("return")
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 7, 12).double(), torch.arange(14).view(2, 7) % 12
    targets[0, 3] = -100
    whole = logits.clone().requires_grad_()
    expected = cross_entropy(whole.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
    expected.backward()
    text = "".join(kept) + answers[0]
    results = ranks(3, smoothed_loss, text, logits, targets).results
    for loss, _ in results:
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(torch.cat([g for _, g in results], -1), whole.grad)


def before(layer, x, a, b):
    return layer(x) + linear(linear(CopyToRanks.apply(x), a), b)


def lora(rank, world_size, text):
    """Gradients of x and a in one process; and on ranks with f behind and before a."""
    behind = f"lambda layer, x, a, b, group=None: {text.strip()}"
    with_lora = eval(behind, {"linear": linear, "CopyToRanks": CopyToRanks})
    found = []
    for branch in (None, with_lora, before):
        torch.manual_seed(0)
        whole, x = nn.Linear(6, 8).double(), torch.randn(4, 6).double().requires_grad_()
        a, b = torch.randn(2, 6).double().requires_grad_(), torch.randn(8, 2).double()
        if branch is None:
            output = whole(x) + x @ a.T @ b.T
        else:
            layer = ColumnParallelLinear(whole)
            output = branch(layer, x, a, b.chunk(world_size)[rank])
        output.square().sum().backward()
        found.append((x.grad, a.grad))
    return found


def test_lora_needs_its_f_behind_a(ranks, answers):
    for one, behind, other in ranks(2, lora, answers[1]).results:
        torch.testing.assert_close(behind, one)
        torch.testing.assert_close(other[0], one[0])
        assert not torch.allclose(other[1], one[1])
