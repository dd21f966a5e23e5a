"""Slots and orders, counted by hand; a model of Llama's kind in stages."""

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


@pytest.mark.parametrize("layers", [[1, 1], [2, 0], [0, 2]])
def test_stages_of_llamas_kind_train_as_one_process(ranks, layers):
    what = stages.run_gpipe, layers, sizes.small, sizes.SMALL, SGD
    first, last = ranks(2, llama.train_stages, *what).results
    (alone,) = ranks(1, sizes.train, nn.Sequential, sizes.small, sizes.SMALL, SGD).results
    assert first is None
    torch.testing.assert_close(last, alone, rtol=0, atol=1e-5)
