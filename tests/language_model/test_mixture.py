"""Experts on several ranks take the steps of one process, which are written out here."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.language_model import own_text, train
from mgpu_tutorial.language_model.model import (
    batch_of,
    experts_of,
    load_checkpoint,
    new_model,
)
from mgpu_tutorial.language_model.plan import plan_of


class ByHand(nn.Module):
    """All experts answer each character, and the best two count."""

    def __init__(self, router, up, down):
        super().__init__()
        self.router, self.up, self.down = router, up, down

    def forward(self, x):
        chances = torch.softmax(x @ self.router, dim=-1)
        pairs = zip(self.up, self.down, strict=True)  # one after the other: less memory
        answers = torch.stack([torch.relu(x @ up) @ down for up, down in pairs], dim=-2)
        best, which = chances.topk(2)
        weights = torch.zeros_like(chances).scatter(-1, which, best)
        return (weights[..., None] * answers).sum(dim=-2)


def hundredfold(scores, targets):
    """A loss whose gradients are clipped."""
    return 100 * cross_entropy(scores, targets)


@cache
def trained_by_hand(steps=2):
    """One process in float64: the losses; parameters and moments by name."""
    model = new_model(experts=4).double()
    for block in list(model)[1:-1]:
        block.mlp = ByHand(block.mlp.router, block.mlp.up, block.mlp.down)
    adam, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(steps):
        inputs, targets = batch_of(step)
        loss = hundredfold(model(inputs).flatten(0, 1), targets.flatten())
        adam.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
        assert norm > 1
        for parameter in model.parameters():
            parameter.grad /= norm
        adam.step()
        losses.append(loss.item())
    named = dict(model.named_parameters())
    moments = {name: adam.state[p]["exp_avg"] for name, p in named.items()}
    return losses, {name: p.detach() for name, p in named.items()}, moments


HOW = {"steps": 2, "dtype": "float64", "every": 2, "experts": 4, "loss_of": hundredfold}
PLANS = ["dp=1", "dp=2,ep=2", "dp=4,ep=2", "dp=4,ep=4", "dp=2,ep=2,tp=2", "dp=2,ep=2,pp=2"]
PLANS += ["dp=2,ep=2,cp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2"]


def expect_as_by_hand(losses, file):
    right, parameters, moments = trained_by_hand()
    assert losses == pytest.approx(right[-len(losses) :], abs=1e-10)
    tensors = torch.load(file)["tensors"].items()
    assert largest_difference({name: t[0] for name, t in tensors}, parameters) < 1e-11
    assert largest_difference({name: t[1] for name, t in tensors}, moments) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("words", PLANS)
def test_every_plan_trains_experts_as_one_process(ranks, words, tmp_path):
    file = str(tmp_path / "run.pt")
    for losses in ranks(plan_of(words).ranks, train, words, save=file, **HOW).results:
        expect_as_by_hand(losses, file)


@pytest.mark.parametrize(
    "first, then", [("dp=2,ep=2", "dp=1"), ("dp=1", "dp=4,ep=4"), ("dp=4,ep=4", "dp=4,ep=2")]
)
def test_a_checkpoint_of_experts_moves_to_another_plan(ranks, first, then, tmp_path):
    file = str(tmp_path / "run.pt")
    ranks(plan_of(first).ranks, train, first, save=file, **HOW | {"steps": 1})
    report = ranks(plan_of(then).ranks, train, then, resume=file, save=file, **HOW)
    expect_as_by_hand(report.results[0], file)


def test_a_rank_keeps_its_experts_only(ranks):
    report = ranks(4, train, "dp=4,ep=2", 1, experts=8)
    for rank, said in enumerate(report.stdout):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert f"has 4 of 8 experts in each block, with {pair}" in said
    dense = sum(p.numel() for p in new_model().parameters())
    each = dense - 4 * sum(p.numel() for p in new_model()[1].mlp.parameters())
    each += 4 * (64 * 8 + 4 * 2 * 64 * 256)
    assert report.stdout[0].startswith(f"holds {each:,} numbers")


def test_a_text_of_ones_own_and_a_talk_with_experts(ranks, tmp_path):
    (tmp_path / "own.txt").write_text("some words, and more of them, are enough. " * 40)
    text = str(tmp_path / "own.txt")
    for minutes in 1e-6, 1e-7:
        ranks(2, own_text.train_on, text, "dp=2,ep=2", minutes, experts=4)
    step, _, (whole, *_) = load_checkpoint(str(tmp_path / "own.pt"))
    assert (step, experts_of(whole)) == (20, 4)
    assert own_text.talk(text, "some", 3).startswith("some")
