"""Slots and orders, counted by hand; a model of Llama's kind in stages."""

import re

import pytest
import torch
from torch import nn
from torch.optim import SGD

from mgpu_tutorial.model_parallel.figures import duration
from mgpu_tutorial.model_parallel.micro_batches import Task
from mgpu_tutorial.pipelines import figures, llama, stages
from mgpu_tutorial.shared import small_and_large as sizes


def order_with_weights_later(rank, ranks, micro):
    """What the page's answer makes: rank r keeps r of its Ws back."""
    order, later = [], []
    for name in stages.order_of_1f1b(rank, ranks, micro):
        order.append(name.replace("B", "I"))
        if name[0] == "B":
            later.append(f"W{name[1:]}")
        if len(later) > rank:
            order.append(later.pop(0))
    return order + later


@pytest.mark.parametrize("ranks, micro", [(1, 1), (2, 3), (4, 5), (4, 8), (3, 7)])
def test_weights_later_leave_a_slot_for_each_rank_before_the_last(ranks, micro):
    orders = [order_with_weights_later(rank, ranks, micro) for rank in range(ranks)]
    tasks = figures.lay_out(figures.tasks_in(orders), F=1, I=1, W=1)
    assert duration(tasks) == 3 * micro + ranks - 1


def test_a_w_waits_for_its_own_i_and_a_stage_may_have_slots_of_its_own():
    orders = [["F0", "I0", "W0"], ["F0", "I0", "W0"]]
    tasks = figures.lay_out(figures.tasks_in(orders), F=[1, 2], I=3, W=1)
    wanted = [
        *(Task(0, 1, 0, 0, "F", 0), Task(6, 9, 0, 0, "I", 0), Task(9, 10, 0, 0, "W", 0)),
        *(Task(1, 3, 1, 1, "F", 0), Task(3, 6, 1, 1, "I", 0), Task(6, 7, 1, 1, "W", 0)),
    ]
    assert sorted(tasks) == sorted(wanted)


def order_of_gpipe(rank, ranks, micro):
    return [f"{kind}{i}" for kind in "FB" for i in range(micro)]


@pytest.mark.parametrize("order", [order_of_gpipe, stages.order_of_1f1b])
@pytest.mark.parametrize("ranks, micro", [(2, 1), (4, 8), (8, 4), (8, 32)])
def test_the_chart_of_slots_shows_the_bubble_and_what_is_held(order, ranks, micro):
    orders = [order(rank, ranks, micro) for rank in range(ranks)]
    drawing = figures.slot_chart(figures.lay_out(figures.tasks_in(orders), F=1, B=2))
    bubble = (ranks - 1) / (micro + ranks - 1)
    assert f"{3 * (micro + ranks - 1)} slots, {bubble:.0%} idle" in drawing.alt
    most = [micro if order is order_of_gpipe else min(micro, ranks - r) for r in range(ranks)]
    svg = drawing.svg()
    assert re.findall(r">holds (\d+)<", svg) == [str(each) for each in most]
    paths = re.findall(r"M[\d.]+ [\d.]+h([\d.]+)v", svg)  # where no number fits
    rects = re.findall(r"width='([\d.]+)' height='[\d.]+' rx='0' stroke='#1a1a1a'", svg)[2:]
    boxes = list(map(float, paths or rects))  # first those of rank 0, its forwards before
    assert len(boxes) == 2 * ranks * micro
    assert boxes[micro] == pytest.approx(2 * boxes[0], abs=0.11)


@pytest.mark.parametrize("layers", [[1, 1], [2, 0], [0, 2]])
def test_stages_of_llamas_kind_train_as_one_process(ranks, layers):
    what = stages.run_gpipe, layers, sizes.small, sizes.SMALL, SGD
    first, last = ranks(2, llama.train_stages, *what).results
    (alone,) = ranks(1, sizes.train, nn.Sequential, sizes.small, sizes.SMALL, SGD).results
    assert first is None
    torch.testing.assert_close(last, alone, rtol=0, atol=1e-5)
