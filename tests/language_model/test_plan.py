"""Every plan takes the steps of one process, which are written out here."""

import math
from collections import Counter
from functools import cache, partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.language_model import PARTS, train
from mgpu_tutorial.language_model.model import (
    BATCH,
    BLOCKS,
    CONTEXT,
    MICRO_BATCHES,
    WIDTH,
    batch_of,
    decode,
    encode,
    load_checkpoint,
    new_model,
    text,
)
from mgpu_tutorial.language_model.plan import (
    Plan,
    clip_gradients,
    forward_backward,
    loss_over,
    mesh_of,
    plan_of,
)
from mgpu_tutorial.language_model.rank import build_rank
from mgpu_tutorial.tensor_parallel.block import whole_of


@cache
def trained_by_hand():
    """One process in float64, two steps: the losses; parameters and moments by name."""
    model = new_model().double()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(2):
        inputs, targets = batch_of(step)
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        adam.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
        for parameter in model.parameters():
            parameter.grad /= max(1.0, norm.item())
        adam.step()
        losses.append(loss.item())
    moments = {name: adam.state[p]["exp_avg"] for name, p in model.named_parameters()}
    return losses, {name: p.detach() for name, p in model.named_parameters()}, moments


PLANS = ["dp=1", "tp=2,pp=2,cp=2", "pp=4", "dp=2,tp=2,zero=1", "dp=2,cp=2,zero=1"]
PLANS += ["dp=2,pp=2", "cp=2,pp=2,zero=3", "tp=4", "tp=2,pp=2"]


@pytest.mark.slow
@pytest.mark.parametrize("words", PLANS)
def test_every_plan_trains_as_one_process(ranks, words, tmp_path):
    file = str(tmp_path / "run.pt")
    how = {"steps": 2, "dtype": "float64", "save": file, "every": 2}
    report = ranks(plan_of(words).ranks, train, words, **how)
    losses, parameters, moments = trained_by_hand()
    for found in report.results:
        assert found == pytest.approx(losses, abs=1e-12)
    tensors = torch.load(file)["tensors"].items()
    assert largest_difference({name: t[0] for name, t in tensors}, parameters) < 1e-11
    assert largest_difference({name: t[1] for name, t in tensors}, moments) < 1e-13


SMOOTH = partial(cross_entropy, label_smoothing=0.3)


def test_another_loss_is_an_argument(ranks):
    model, (inputs, targets) = new_model().double(), batch_of(0)
    expected = SMOOTH(model(inputs).flatten(0, 1), targets.flatten()).item()
    how = {"steps": 1, "dtype": "float64", "loss_of": SMOOTH}
    for plan in "pp=2", "tp=2":
        for (found,) in ranks(2, train, plan, **how).results:
            assert found == pytest.approx(expected, abs=1e-12)


def gradients_of_smooth(rank, world_size, plan):
    """Those of a loss that needs all scores at once; whole, on every rank."""
    sizes, (inputs, targets) = plan_of(plan), batch_of(0)
    mesh = mesh_of(sizes)
    job = build_rank(new_model().double(), sizes, mesh, PARTS)
    loss_of = loss_over(mesh["tp"].get_group(), SMOOTH, PARTS)
    forward_backward(job.model, mesh, inputs, targets, PARTS.order_of_1f1b, loss_of)
    return {name: whole_of(p.grad, p) for name, p in job.stage.named_parameters()}


def test_a_loss_of_all_scores_has_the_gradients_of_one_process(ranks):
    model, (inputs, targets) = new_model().double(), batch_of(0)
    SMOOTH(model(inputs).flatten(0, 1), targets.flatten()).backward()
    right = {name: p.grad for name, p in model.named_parameters()}
    for found in ranks(4, gradients_of_smooth, "tp=4").results:
        assert largest_difference(found, right) < 1e-14


def held_by_head(rank, world_size, plan):
    sizes = plan_of(plan)
    stage = build_rank(new_model(), sizes, mesh_of(sizes), PARTS).stage
    scores = getattr(stage[-1], "scores", None)
    return scores and (tuple(scores.weight.shape), scores.weight[0, 0].item())


def test_ranks_of_a_tp_group_share_the_characters_of_the_last_stage(ranks):
    weight = new_model()[-1].scores.weight[:, 0].tolist()
    parts = [((48, 64), weight[0]), ((48, 64), weight[48])]
    assert ranks(2, held_by_head, "tp=2").results == parts
    assert ranks(4, held_by_head, "tp=2,pp=2").results == [None, None, *parts]


def sent_by_the_loss(rank, world_size):
    """Numbers in each all-reduce of forward, after those of the blocks."""
    train(rank, world_size, "tp=2", 1)


def test_the_loss_sends_three_numbers_a_character_and_no_scores(ranks):
    report = ranks(2, sent_by_the_loss, trace=True)
    sizes = Counter(e.nbytes // 4 for e in report.events if e.rank == 0 and e.nbytes > 8)
    rows = BATCH * CONTEXT // MICRO_BATCHES
    assert sizes[rows] == 3 * MICRO_BATCHES
    assert sizes[rows * WIDTH] == (4 * BLOCKS + 1) * MICRO_BATCHES


TAKEN = {"dp": [1, 2, 4, 8], "tp": [1, 2, 4, 8], "pp": [1, 2, 4], "zero": [0, 1, 3]}


@pytest.mark.parametrize("name, taken", [*TAKEN.items(), ("cp", [1, 2, 4, 8, 16, 32])])
def test_a_plan_is_taken_where_everything_divides(name, taken):
    for number in range(-1, 65):
        words = f"{name}={number}"
        if number in taken:
            assert plan_of(words) == Plan(**{name: number})
        else:
            with pytest.raises(ValueError, match=f"^plan {words}: "):
                plan_of(words)


@pytest.mark.parametrize("words", ["dp:2", "dp=3,tp=2"])
def test_what_is_no_plan_for_them_is_refused_on_every_rank(ranks, words):
    with pytest.raises(RankFailed, match="expected something like|takes 6 ranks") as refused:
        ranks(2, train, words)
    assert len(refused.value.tracebacks) == 2


def clipped(rank, world_size, *gradients):
    """Each of two stages has one gradient."""
    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight.grad = torch.tensor([[gradients[rank]]])
    clip_gradients(layer, mesh_of(Plan(pp=2)))
    return layer.weight.grad.item()


def test_gradients_of_all_stages_are_made_shorter_but_never_longer(ranks):
    assert ranks(2, clipped, 3.0, 4.0).results == pytest.approx([0.6, 0.8])
    assert ranks(2, clipped, 0.3, 0.4).results == pytest.approx([0.3, 0.4])


def test_a_norm_that_is_nan_leaves_no_gradient_as_torch_leaves_none(ranks):
    """Not the spike of the other stage at its full length."""
    assert all(math.isnan(each) for each in ranks(2, clipped, 300.0, math.nan).results)


def test_a_checkpoint_of_another_model_is_named(tmp_path):
    file = tmp_path / "other.pt"
    torch.save({"step": 1, "tensors": {"0.character.weight": [torch.zeros(96, 32)]}}, file)
    with pytest.raises(ValueError, match="of another model: size mismatch for 0.character"):
        load_checkpoint(file)


def test_the_text_is_the_alphabet_and_nothing_else():
    alphabet = "\n" + "".join(map(chr, range(32, 127)))
    assert set(text()) <= set(alphabet)
    assert decode(encode(alphabet)) == alphabet and encode(alphabet).tolist() == [*range(96)]
