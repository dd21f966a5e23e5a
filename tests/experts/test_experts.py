"""Experts on several ranks are the layer of one process, written out here token by token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, NaiveDDP
from mgpu_tutorial.experts.layer import choose, drawn
from mgpu_tutorial.experts.parallel import ExpertModel, ExpertParallel, run, step
from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.lab.measure import largest_difference

EXPERTS, WIDTH, HIDDEN = 8, 16, 32


def reference(k, tokens=24):
    """Output and gradients of the mean square over all tokens, by plain loops."""
    below, router = drawn(4, WIDTH, WIDTH), drawn(1, WIDTH, EXPERTS)
    up, down = drawn(2, EXPERTS, WIDTH, HIDDEN), drawn(3, EXPERTS, HIDDEN, WIDTH)
    parameters = [p.requires_grad_() for p in (below, router, up, down)]
    data, target = drawn(5, 2, tokens, WIDTH)
    rows = []
    for token in data:
        hidden = token @ below
        scores = hidden @ router
        best = sorted(range(EXPERTS), key=lambda e: (-scores[e].item(), e))[:k]
        exp = (scores - scores.max()).exp()
        answers = [exp[e] / exp.sum() * (torch.relu(hidden @ up[e]) @ down[e]) for e in best]
        rows.append(hidden + sum(answers))
    output = torch.stack(rows)
    gradients = torch.autograd.grad(((output - target) ** 2).mean(), parameters)
    names = ["below", "experts.router", "experts.up", "experts.down"]
    return {"output": output.detach()} | dict(zip(names, gradients, strict=True))


@pytest.mark.parametrize(
    "world_size, copies, k, tokens",
    [(1, 1, 8, 24), (2, 2, 1, 24), (4, 2, 3, 7), (4, 1, 2, 3)],
)
def test_any_grid_and_any_shares_are_one_process(ranks, world_size, copies, k, tokens):
    results = ranks(world_size, step, copies, k, tokens).results  # 3: one has no token
    expected = reference(k, tokens)
    norm = torch.cat([g.flatten() for name, g in expected.items() if name != "output"]).norm()
    norms = [found["norm"].item() for found in results]
    assert norms == pytest.approx([norm.item()] * len(results), rel=0, abs=1e-12)
    for name, right in expected.items():
        found = torch.cat([result[name] for result in results])
        times = {"output": 1, "experts.up": copies, "experts.down": copies}
        right = torch.cat([right] * times.get(name, world_size))
        assert largest_difference(found, right) < 1e-12, name


def in_a_ddp(rank, world_size, wrapper):
    """A DDP of the whole model; this rank's experts divide their own gradients."""
    model = ExpertModel(ExpertParallel(EXPERTS, 2))
    for parameter in (model.experts.up, model.experts.down):
        parameter.register_hook(lambda gradient: gradient / world_size)
    ddp = wrapper(model)
    run(model)
    ddp.finish_gradient_synchronization()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("wrapper", [NaiveDDP, BucketedDDP])
def test_a_ddp_leaves_this_ranks_experts_alone(ranks, wrapper):
    results, expected = ranks(2, in_a_ddp, wrapper).results, reference(2)
    for name in results[0]:
        found = [result[name] for result in results]
        parts = 1 if name.endswith(("up", "down")) else 2
        right = torch.cat([expected[name]] * parts)
        assert largest_difference(torch.cat(found), right) < 1e-12, name


def build_layer(rank, world_size, experts, k):
    layer = ExpertParallel(experts, k)
    return [p.untyped_storage().nbytes() for p in (layer.up, layer.down)]


def test_a_rank_keeps_the_memory_of_its_own_experts_only(ranks):
    assert ranks(2, build_layer, 4, 1).results == [[2 * WIDTH * HIDDEN * 8] * 2] * 2


def test_what_cannot_work_is_said_before_anything_is_sent(ranks):
    with pytest.raises(RankFailed, match="6 experts") as failed:
        ranks(4, build_layer, 6, 2, trace=True)
    assert failed.value.report.events == []


def test_no_score_of_the_lesson_is_rounded_and_no_choice_is_close():
    """So every processor chooses the same experts."""
    scores = drawn(5, 2, 24, WIDTH)[0] @ drawn(4, WIDTH, WIDTH) @ drawn(1, WIDTH, EXPERTS)
    assert torch.equal(scores * 512, (scores * 512).round())
    best = scores.sort(dim=1, descending=True).values
    assert (best[:, :3] - best[:, 1:4]).min() > 1e-3


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 5), min_size=1), st.integers(1, 5))
def test_of_equal_scores_the_lower_number_is_chosen(rows, k):
    wanted = [sorted(range(5), key=lambda e: (-row[e], e))[:k] for row in rows]
    assert choose(torch.tensor(rows), k).tolist() == wanted
