"""Every plan takes the steps of one process, which are written out here."""

from functools import cache, partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.language_model import PARTS, figures, train
from mgpu_tutorial.language_model.model import (
    batch_of,
    decode,
    encode,
    load_checkpoint,
    new_model,
    text,
)
from mgpu_tutorial.language_model.plan import (
    average_gradients,
    clip_gradients,
    cut_model,
    forward_backward,
    mesh_of,
    plan_of,
    share_products,
)


@cache
def trained_by_hand(count):
    """One process in float64: losses, parameters and first gradients, clipped, by name."""
    model = new_model().double()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, first = [], {}
    for step in range(count):
        inputs, targets = batch_of(step)
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        adam.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
        for parameter in model.parameters():
            parameter.grad /= max(1.0, norm.item())
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        adam.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}, first


def train_twice(rank, world_size, words, first, file):
    """One step and its checkpoint, then two from the beginning."""
    train(rank, world_size, words, steps=1, dtype="float64", save=first, every=1)
    return train(rank, world_size, words, steps=2, dtype="float64", save=file, every=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["dp=1", "pp=4", "tp=2,pp=2,cp=2", "dp=2,tp=2,zero=1", "dp=2,pp=2,zero=1"]
)
def test_every_plan_trains_as_one_process(ranks, words, tmp_path):
    first, file = str(tmp_path / "first.pt"), str(tmp_path / "run.pt")
    report = ranks(plan_of(words).ranks, train_twice, words, first, file)
    losses, parameters, gradients = trained_by_hand(2)
    for found in report.results:
        assert found == pytest.approx(losses, abs=1e-12)
    found = {name: t[0] for name, t in torch.load(file)["tensors"].items()}
    assert largest_difference(found, parameters) < 1e-11
    found = {name: t[1] / 0.1 for name, t in torch.load(first)["tensors"].items()}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert largest_difference(found[name], gradient) < 1e-13, name


def norms(rank, world_size, words):
    """The norm that clipping sees, and each gradient's own, before the first step."""
    plan = plan_of(words)
    mesh = mesh_of(plan)
    model = cut_model(new_model().double(), mesh, partial(share_products, parts=PARTS))
    inputs, targets = batch_of(0)
    share = slice(mesh["dp"].get_local_rank(), None, plan.dp)
    order = PARTS.order_of_1f1b
    forward_backward(model, mesh, inputs[share], targets[share], order)
    average_gradients(model, mesh)
    return clip_gradients(model, mesh).item()


@pytest.mark.parametrize("words", ["pp=2", "dp=2,tp=2"])
def test_each_parameter_counts_once_in_the_norm(ranks, words):
    model = new_model().double()
    inputs, targets = batch_of(0)
    cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    expected = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters())).item()
    found = ranks(plan_of(words).ranks, norms, words).results
    assert found == pytest.approx([expected] * len(found), abs=1e-12)


@pytest.mark.slow
def test_a_run_changes_its_plan_and_nobody_sees_it(ranks, tmp_path):
    file, losses = str(tmp_path / "run.pt"), []
    for words, until in (("tp=2", 1), ("dp=2,zero=1", 2), ("pp=2", 3)):
        how = {"steps": until, "dtype": "float64", "save": file, "every": 1}
        resume = file if losses else ""
        losses += ranks(2, train, words, resume=resume, **how).results[1]
    assert losses == pytest.approx(trained_by_hand(3)[0], abs=1e-11)


@pytest.mark.slow
def test_bytes_are_those_of_the_formula(ranks):
    for words in ("dp=2,pp=2,zero=1", "tp=2,cp=2"):
        report = ranks(4, train, words, steps=1, dtype="float64", trace=True)
        (row,) = figures.plan_table({words: report}).rows
        for predicted, counted in (cell.split(" / ") for cell in row[2:]):
            assert predicted == counted


@pytest.mark.parametrize(
    ("words", "world_size", "message"),
    [
        ("dp=3", 2, "it takes 3 ranks, and there are 2"),
        ("tp=3", 3, "3 ranks cannot share 8 heads"),
        ("pp=3", 3, "3 ranks cannot share 4 blocks"),
        ("dp=3", 3, "3 ranks cannot share 8 sequences of a micro-batch evenly"),
        ("zero=2", 1, "zero is 0 or 1"),
        ("dp=0", 1, "it takes 0 ranks, and there are 1"),
        ("dp:2", 2, "expected something like dp=2,tp=2"),
        ("cp=3", 3, "3 ranks cannot share 32 pairs of characters"),
        ("ep=2", 2, "expected something like dp=2,tp=2 with dp, tp, pp, cp, zero"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_on_every_rank(ranks, words, world_size, message):
    with pytest.raises(RankFailed, match=message) as refused:
        ranks(world_size, train, words)
    assert len(refused.value.tracebacks) == world_size


def test_a_checkpoint_of_another_model_is_named(tmp_path):
    file = tmp_path / "other.pt"
    torch.save({"step": 1, "tensors": {"0.character.weight": [torch.zeros(96, 32)]}}, file)
    with pytest.raises(ValueError, match="of another model: size mismatch for 0.character"):
        load_checkpoint(file)


def test_the_text_is_the_alphabet_and_nothing_else():
    alphabet = "\n" + "".join(map(chr, range(32, 127)))
    assert set(text()) <= set(alphabet) and len(text()) > 300_000
    assert decode(encode(alphabet)) == alphabet and encode(alphabet).tolist() == [*range(96)]
    inputs, targets = batch_of(3)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
