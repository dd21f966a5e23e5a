"""The cast to eight bits against one written out number by number, and a layer's products."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.mixed_precision import float8
from mgpu_tutorial.shared import small_and_large as sizes


def nearest(number, scale):
    """The float8 nearest to number / scale, times the scale, from the format's definition."""
    size = min(abs(number) / scale, 448.0) if scale else 0.0
    exponent = max(math.floor(math.log2(size)), -6) if size else -6
    gap = 2.0 ** (exponent - 3)
    return math.copysign(min(round(size / gap) * gap, 448.0) * scale, number)


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=64, max_size=64))
def test_a_number_becomes_the_nearest_under_its_scale(numbers):
    x = torch.tensor(numbers).view(2, 32)
    largest = [max(map(abs, row)) for row in x.tolist()]
    by_row = [amax / 448 for amax in largest]
    by_block = [2.0 ** math.ceil(math.log2(s)) if s > 2.0**-120 else 0.0 for s in by_row]
    for per, scales in ("row", by_row), ("block", by_block):
        found = float8.scales_of(x, per)
        back = float8.from_float8(float8.to_float8(x, found), found)
        for i, row in enumerate(x.tolist()):
            gap = largest[i] / 448 * 32  # of the largest numbers: a tie may go either way
            for got, number in zip(back[i].tolist(), row, strict=True):
                if scales[i]:
                    assert abs(got - nearest(number, scales[i])) <= 1e-4 * gap or (
                        abs(got - number) <= abs(nearest(number, scales[i]) - number) * 1.001
                    )


def test_one_number_for_a_tensor_a_row_and_a_block():
    x = torch.arange(1.0, 257.0).view(2, 2, 64)
    shapes = {per: float8.scales_of(x, per).shape for per in ("tensor", "row", "block")}
    assert shapes == {"tensor": (1,), "row": (2, 2, 1), "block": (2, 2, 2)}
    blocks = float8.scales_of(x, "block")
    assert torch.equal(blocks.to(torch.float8_e8m0fnu).float(), blocks)  # one byte holds them
    expected = torch.tensor([32, 64, 96, 128, 160, 192, 224, 256]) / 448
    assert (blocks.flatten() >= expected).all() and (blocks.flatten() < 2 * expected).all()


def test_products_of_what_a_cast_leaves_are_those_of_autograd():
    """Three products of float64 with a cast that keeps everything are torch's own."""
    x, weight = torch.randn(2, 3, 5).double(), torch.randn(4, 5).double()
    x.requires_grad_(), weight.requires_grad_()
    found = float8.ShortProduct.apply(x, weight, lambda inputs: inputs)
    expected = x @ weight.T
    back = torch.randn(2, 3, 4).double()
    gradients = torch.autograd.grad(found, (x, weight), back)
    of_torch = torch.autograd.grad(expected, (x, weight), back)
    assert torch.equal(found, expected)
    for one, other in zip(gradients, of_torch, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_the_rows_of_what_is_cast_lie_along_the_sum():
    seen = []

    def cast(x):
        seen.append(tuple(x.shape))
        return x

    x = torch.randn(2, 3, 5, requires_grad=True)
    weight = torch.randn(4, 5, requires_grad=True)
    float8.ShortProduct.apply(x, weight, cast).sum().backward()
    # (…, inputs), then (…, outputs), then (…, tokens)
    assert seen == [(2, 3, 5), (4, 5), (2, 3, 4), (5, 4), (4, 6), (5, 6)]


@pytest.mark.parametrize("short", [True, False])
def test_all_products_of_the_blocks_are_cast_and_those_of_the_head_are_not(short):
    model, seen = sizes.small(), []
    if short:
        float8.cast_products(model, lambda x: (seen.append(x), x)[1])
    model(sizes.SMALL[:, :-1]).sum().backward()
    # two layers of seven matrices, six casts each; 128 is the width inside an MLP
    assert len(seen) == (2 * 7 * 6 if short else 0)
    assert not any(256 in x.shape for x in seen[: 2 * 7 * 2])
