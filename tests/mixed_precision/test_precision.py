"""What short numbers lose; scaled ranks take the steps of one process, written out here."""

import math
from functools import cache

import pytest
import torch
from torch.nn.functional import nll_loss
from torch.nn.utils import clip_grad_norm_

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.mixed_precision import figures, precision
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet


@cache
def trained_by_hand(dtype):
    """One process: three SGD steps on global batches of 24 digits; the parameters.

    Each batch is computed in three parts, under autocast to `dtype`, on a scaled loss; their
    gradients are averaged in float32. The second of four steps is left out.
    """
    torch.manual_seed(0)
    model, data = SmallConvNet(), digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    for step in (0, 2, 3):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for mine in order[24 * step : 24 * step + 24].tensor_split(3):
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                loss = nll_loss(model(data.images[mine]), data.labels[mine])
            gradients = torch.autograd.grad(1024 * loss, list(model.parameters()))
            for whole, part in zip(total, gradients, strict=True):
                whole += part.float() / 3
        for parameter, whole in zip(model.parameters(), total, strict=True):
            parameter.grad = whole / 1024
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_picture_s_parts_begin_where_float16_has_its_limits(monkeypatch):
    of = torch.finfo(torch.float16)
    limits = of.smallest_normal * of.eps / 2, of.smallest_normal, of.max
    begins = [begin for begin, _ in figures.PARTS][1:]
    assert begins == [round(math.log2(limit)) for limit in limits]
    monkeypatch.setattr(figures, "Plot", lambda figure, text: figure.axes[0].containers[0])
    bars = figures.gradient_picture({row: torch.tensor([-(2.0**-9.5)]) for row in "ab"})
    assert [bar.get_x() for bar in bars if bar.get_height()] == [-10]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ranks_skip_a_step_together_and_take_the_others_of_one_process(ranks, dtype):
    how = {"infinite": (2, 1), "dtype": dtype}  # on rank 2 in step 1
    results = ranks(3, precision.train_scaled, precision.finish_step, **how).results
    for rank, records in enumerate(results):
        finite, scales, weights = zip(*records, strict=True)
        assert finite == (True, rank != 2, True, True) and scales == (1024, 512, 512, 512)
        assert largest_difference(weights[3], trained_by_hand(dtype)) < 1e-6
        assert torch.equal(weights[3], results[0][3][2])
