"""The blocks of docs/prove.md are run as the page writes them, each in a layer."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

from mgpu_tutorial import watched

PAGE = (Path(__file__).parents[2] / "docs" / "prove.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


class Part(nn.Module):
    """Some outputs of a linear layer."""

    def __init__(self, weight, rank, size, marks=""):
        super().__init__()
        group = None
        self.size, self.group = size, group
        self.weight = nn.Parameter(weight.chunk(size)[rank].clone())
        exec(marks, {"nn": nn, **locals()})

    def forward(self, x):
        return linear(x, self.weight)


def in_parts(rank, ranks, block):
    """Each rank has some outputs, and the sum of the squares of these."""
    torch.manual_seed(0)
    model = watched(nn.Sequential(nn.Linear(4, 6, bias=False)))
    own = model[0].weight.detach(), rank, ranks
    if block.startswith("def "):
        methods = {}
        exec(block, {"dist": dist, "torch": torch}, methods)
        part = type("Whole", (Part,), methods)(*own)
    else:
        part = Part(*own, block)
    if ranks > 1:
        model[0] = part
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(2):
        model(torch.arange(4.0) + number).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("block", BLOCKS, ids=["by marks", "by a method"])
def test_a_layer_of_the_page_is_put_together(proved, block):
    proof = proved(2, in_parts, block)
    assert proof.right and proof.tensors == 1, proof
    assert not proved(2, in_parts, "").right
