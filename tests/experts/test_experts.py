"""Experts on several ranks are the layer of one process, written out here token by token."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.experts import figures, layer
from mgpu_tutorial.experts.layer import Experts, choose, drawn
from mgpu_tutorial.experts.parallel import (
    Exchange,
    ExpertModel,
    ExpertParallel,
    average_gradients,
    run,
    step,
)
from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.lab.measure import largest_difference

EXPERTS, WIDTH, HIDDEN = 8, 16, 32


def reference(k, tokens=24):
    """Output and gradients of the mean square over all tokens, by plain loops."""
    below, router = drawn(4, WIDTH, WIDTH), drawn(1, WIDTH, EXPERTS)
    up, down = drawn(2, EXPERTS, WIDTH, HIDDEN), drawn(3, EXPERTS, HIDDEN, WIDTH)
    parameters = below, router, up, down
    for parameter in parameters:
        parameter.requires_grad_()
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


def with_one_and_three(rank, world_size, copies):
    return {k: step(rank, world_size, copies, k) for k in (1, 3)}


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("world_size, copies", [(1, 1), (4, 1), (2, 2), (4, 2)])
def test_any_grid_has_the_output_and_gradients_of_one_process(ranks, world_size, copies, k):
    results = [found[k] for found in ranks(world_size, with_one_and_three, copies).results]
    expected = reference(k)
    norm = torch.cat([g.flatten() for name, g in expected.items() if name != "output"]).norm()
    assert all(abs(r["norm"] - norm) < 1e-12 for r in results)
    for name, right in expected.items():
        found = torch.cat([r[name] for r in results])
        times = {"output": 1, "experts.up": copies, "experts.down": copies}
        right = torch.cat([right] * times.get(name, world_size))
        assert largest_difference(found, right) < 1e-12, name


@pytest.mark.parametrize("tokens", [3, 7])
def test_a_rank_without_tokens_or_with_fewer_changes_nothing(ranks, tokens):
    results = ranks(4, step, 1, 2, tokens).results
    expected = reference(2, tokens)
    assert len(results[3]["output"]) == (0 if tokens == 3 else 1)
    assert (
        largest_difference(torch.cat([r["output"] for r in results]), expected["output"])
        < 1e-12
    )
    assert largest_difference(results[3]["below"], expected["below"]) < 1e-12
    up = torch.cat([r["experts.up"] for r in results])
    assert largest_difference(up, expected["experts.up"]) < 1e-12


def gradients_untouched(rank, world_size):
    model = ExpertModel(ExpertParallel(EXPERTS, 2))
    run(model)
    return model.experts.up.grad


@pytest.mark.parametrize("world_size", [2, 4])
def test_before_the_division_an_expert_s_gradient_is_that_many_times_too_large(
    ranks, world_size
):
    found = torch.cat(ranks(world_size, gradients_untouched).results)
    assert largest_difference(found, world_size * reference(2)["experts.up"]) < 1e-12


def random_gradients(rank, world_size):
    """Dense gradients of random float32 after the average."""
    model = ExpertModel(ExpertParallel(EXPERTS, 2)).float()
    generator = torch.Generator().manual_seed(rank)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    average_gradients(model, dist.group.WORLD)
    return [parameter.grad for parameter in model.parameters()]


def test_the_average_leaves_the_same_bits_on_every_rank(ranks):
    first, *others = ranks(4, random_gradients).results
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def both_ways(rank, world_size, sent):
    """Rows with the number of their sender come, and gradients with that of theirs go."""
    received = [row[rank] for row in sent]
    rows = torch.full((sum(sent[rank]), 1), float(rank), requires_grad=True)
    arrived = Exchange.apply(rows, sent[rank], received)
    arrived.backward(torch.full_like(arrived, float(rank)))
    return arrived.flatten().tolist(), rows.grad.flatten().tolist()


@pytest.mark.parametrize(
    "sent",
    [[[0, 2, 1], [3, 0, 0], [1, 1, 1]], [[0, 0, 0], [2, 2, 2], [0, 0, 0]], [[0] * 3] * 3],
)
def test_gradients_take_the_way_back(ranks, sent):
    for rank, (arrived, gradient) in enumerate(ranks(3, both_ways, sent).results):
        assert arrived == [float(r) for r in range(3) for _ in range(sent[r][rank])]
        assert gradient == [float(r) for r in range(3) for _ in range(sent[rank][r])]


def test_the_bytes_that_the_recorder_counts_are_those_of_the_splits(ranks):
    report = ranks(4, step, 1, trace=True)
    calls = [e for e in report.events if e.op == "all_to_all_single"]
    sizes = sum(e.nbytes for e in calls)
    # 24 tokens twice, 16 numbers of 8 bytes, four journeys; and counts, 8 numbers a rank
    assert len(calls) == 4 * 5 and sizes == 24 * 2 * 16 * 8 * 4 + 4 * 8 * 8


def build_layer(rank, world_size, experts, k):
    ExpertParallel(experts, k)


@pytest.mark.parametrize(
    "experts, k, said",
    [
        (6, 2, "6 experts on 4 ranks: use a multiple of 4"),
        (2, 3, "k is 3, but there are 2 experts: take a smaller k."),
    ],
)
def test_what_cannot_work_is_said_on_every_rank_before_anything_is_sent(
    ranks, experts, k, said
):
    with pytest.raises(RankFailed, match=said) as failed:
        ranks(4, build_layer, experts, k, trace=True)
    assert failed.value.report.events == []


def test_no_score_of_the_lesson_is_rounded_and_no_choice_is_close():
    """So every processor chooses the same experts."""
    scores = drawn(5, 2, 24, WIDTH)[0] @ drawn(4, WIDTH, WIDTH) @ drawn(1, WIDTH, EXPERTS)
    assert torch.equal(scores * 512, (scores * 512).round())
    best = scores.sort(dim=1, descending=True).values
    assert (best[:, :3] - best[:, 1:4]).min() > 1e-3
    scores = figures.skewed(3)
    assert torch.equal(scores * 1024, (scores * 1024).round())


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1),
    st.integers(1, 5),
)
def test_of_equal_scores_the_lower_number_is_chosen(rows, k):
    wanted = [sorted(range(5), key=lambda e: (-row[e], e))[:k] for row in rows]
    assert choose(torch.tensor(rows), k).tolist() == wanted


def test_k_experts_of_a_single_process_are_refused_too_where_there_are_fewer():
    assert Experts(8, 8)(drawn(0, 5, 16)).shape == (5, 16)
    with pytest.raises(ValueError, match="k is 9, but there are 8"):
        Experts(8, 9)


def test_the_load_counts_experts_that_nobody_chose():
    assert layer.tokens_per_expert(torch.tensor([[0, 2], [2, 0]]), 4).tolist() == [2, 0, 2, 0]


def test_the_auxiliary_loss_is_one_for_equal_loads_and_its_gradient_pushes_the_busy_down():
    assert layer.auxiliary_loss(
        torch.zeros(6, 3), torch.tensor([2, 2, 2])
    ).item() == pytest.approx(1)
    scores = torch.zeros(6, 3, requires_grad=True)
    loss = layer.auxiliary_loss(scores, torch.tensor([6, 0, 0]))
    loss.backward()
    assert loss.item() == pytest.approx(1)
    assert (scores.grad[:, 0] > 0).all() and (scores.grad[:, 1:] < 0).all()


def test_the_bias_falls_for_the_busy_and_stays_at_the_mean():
    moved = layer.move_bias(torch.tensor([0.5, 0.0, 0.0]), torch.tensor([5, 2, 2]), 0.25)
    assert moved.tolist() == [0.25, 0.25, 0.25]
    assert layer.move_bias(torch.zeros(2), torch.tensor([3, 3]), 0.25).tolist() == [0, 0]


@pytest.mark.slow
def test_the_bias_balances_and_without_it_nothing_does():
    none, slow = figures.excess(0, steps=200), figures.excess(0.001, steps=200)
    assert min(none) > 1.5 and none[0] == slow[0] and slow[-1] < 0.25
