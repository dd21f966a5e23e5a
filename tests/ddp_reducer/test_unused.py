"""Parameters without a gradient: who complains, who waits, and what each cure gives."""

import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_reducer import reducer
from mgpu_tutorial.lab import RankFailed

NOBODY, FIRST_ONLY = (None, None), (1.0, None)


@pytest.mark.parametrize(
    "second, options, gradients",
    [
        (NOBODY, {"find_unused_parameters": True}, [3.0, None]),
        (NOBODY, {"static_graph": True}, [3.0, None]),
        ((0.0, 0.0), {}, [3.0, 0.0]),
        (FIRST_ONLY, {"find_unused_parameters": True}, [3.0, 1.0]),  # the mean of 2 and none
        ((None, 1.0), {"find_unused_parameters": True}, [3.0, 2.0]),  # of none and 4
        (FIRST_ONLY, {"static_graph": True}, [3.0, 1.0]),  # as long as it stays so
    ],
)
def test_the_cures_for_unused_parameters(ranks, second, options, gradients):
    for steps in (1, 2, 3):
        report = ranks(2, reducer.train_two_heads, second, steps, **options)
        assert report.results == [gradients] * 2


def test_in_the_next_step_the_other_rank_raises(ranks):
    says = "rank 1 raised RuntimeError: Expected to have"
    with pytest.raises(RankFailed, match=says) as caught:
        ranks(2, reducer.train_two_heads, FIRST_ONLY)
    assert caught.value.report.stdout[0] == "forward 0 done\n"


def use_in_turn(rank, world_size, *seconds, **options):
    """The gradients of the first head's bias, after each step with its `second`."""
    model = DistributedDataParallel(reducer.TwoHeads(), **options)
    gradients = []
    for second in seconds:
        model.zero_grad()
        output = model(
            torch.ones(2, 4), second[rank] if isinstance(second, tuple) else second
        )
        (output.sum() * (1 + rank)).backward()
        gradients.append(model.module.first.bias.grad.item())
    return gradients


def test_a_broken_promise_of_a_static_graph_is_told(ranks):
    with pytest.raises(RankFailed, match="Your training graph has changed in this iteration"):
        ranks(2, use_in_turn, None, None, 1.0, static_graph=True)


def test_a_head_left_out_of_a_static_graph_is_told_only_by_the_next_forward(ranks):
    ranks(2, use_in_turn, 1.0, 1.0, None, static_graph=True)  # nobody is told
    with pytest.raises(RankFailed, match="Expected to have finished reduction"):
        ranks(2, use_in_turn, 1.0, 1.0, None, 1.0, static_graph=True)
    with pytest.raises(RankFailed, match="rank 1 returned while rank 0 still waited"):
        ranks(2, use_in_turn, 1.0, 1.0, FIRST_ONLY, static_graph=True, timeout=10)


def leave_one_of_three_out(rank, world_size, **options):
    """The gradients of three layers; in the third step the second of them is not used.

    Those of rank 0 are 2, those of rank 1 are 4. Each layer has a bucket of its own.
    """

    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))

        def forward(self, x, used):
            return sum(self.layers[i](x) for i in used)

    model = DistributedDataParallel(Three(), bucket_cap_mb=1e-6, **options)
    for used in ([0, 1, 2], [0, 1, 2], [0, 2]):
        model.zero_grad()
        model(torch.full((1, 1), 2.0 + 2 * rank), used).sum().backward()
    time.sleep(0.2)  # nobody waits for a bucket that has left
    return [layer.weight.grad and layer.weight.grad.item() for layer in model.module.layers]


def test_what_a_layer_leaves_behind_that_is_left_out_after_the_rebuild(ranks):
    """The last layer's bucket has left; its mean arrives only where gradients are views."""
    plain = ranks(2, leave_one_of_three_out).results
    assert plain == [[2.0, None, 2.0], [4.0, None, 4.0]]
    views = ranks(2, leave_one_of_three_out, gradient_as_bucket_view=True).results
    assert [gradients[2] for gradients in views] == [3.0, 3.0]
    assert [gradients[0] for gradients in views] == [1.0, 2.0]  # divided, and never sent
