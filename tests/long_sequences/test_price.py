"""Each way to share a sequence has a price, whose bytes are those of the formulas."""

from pathlib import Path

import nbformat
import pytest
import torch

from mgpu_tutorial.instruments.price.machine import machine_of
from mgpu_tutorial.instruments.price.pricing import price
from mgpu_tutorial.long_sequences.others import METHODS, sent_by_formula
from mgpu_tutorial.long_sequences.ring import contiguous


def there_and_back(rank, world_size, way):
    shape = 1, 8, 16, 4  # 16 tokens on each rank
    q = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    k, v = (q.detach()[:, :4].clone().requires_grad_() for _ in "kv")
    METHODS[way](q, k, v, contiguous).sum().backward()


@pytest.mark.parametrize(
    "way, back", [("ring", 3 * 2 + 4 * 4), ("all-gather", 3 * 2), ("ulysses", 3 * 2)]
)
def test_what_a_priced_rank_sends(way, back):
    """Backward: the blocks, of 2 bytes, make 3 hops, and their gradients, of 4 bytes, 4."""
    forward = 2 * sent_by_formula(way, 4, 8 * 4, 2, 64)
    assert price(there_and_back, 4, way).sent() == pytest.approx(forward * (1 + back / 6))


def test_the_text_says_above_how_many_tokens_a_way_pays():
    (path,) = (Path(__file__).parents[2] / "notebooks").glob("*_long_sequences.ipynb")
    text = {cell.id: cell.source for cell in nbformat.read(path, 4).cells}["ring-pays"]
    machine = machine_of("8 x H100")
    inside, between = machine.inside.bandwidth, machine.between.bandwidth
    ring = [2 * machine.flops / given for given in (inside, 4 * inside, 4 * between)]
    heads = (2 + 2 / 4) * machine.flops / (0.1 * inside)
    for tokens, said in zip(
        [*ring, heads], ("4,200", "1,040", "9,400", "52,000"), strict=True
    ):
        assert said in text
        assert tokens == pytest.approx(float(said.replace(",", "")), rel=0.01)
