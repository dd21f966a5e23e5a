"""What the job and its tests cannot do, every rank says before it sends."""

import pytest
import torch
from torch import nn

from mgpu_tutorial.tensor_parallel.layers import shard
from mgpu_tutorial.wrong_gradient import job, kinds, trials


def without(rank, world_size, plan, lacking, ranks=range(8)):
    """Put gradients together of which some ranks lack one."""
    mesh = job.mesh_of(plan, world_size)
    stage, first = job.stage_of(job.new_model(), mesh)
    for name, parameter in stage.named_parameters():
        if f"{first + int(name[0])}{name[1:]}" != lacking or rank not in ranks:
            parameter.grad = parameter.detach().clone()
    return trials.whole_gradients(stage, mesh, first)


@pytest.mark.parametrize(
    "world_size, name, worker, given",
    [
        *((2, repr(plan), trials.one_step, (plan,)) for plan in ("dp=3", "dp", "", "cp=2")),
        *((2, repr(plan), trials.one_step, (plan,)) for plan in ("dp=2,dp=2", "dp=x", None)),
        (2, "dp=2,tp=2", trials.one_step, ("dp=2,tp=2",)),
        (2, "'sums'", trials.one_step, ("dp=2", "sums")),
        (2, "seed 9", trials.one_step, ("dp=2", "seed 9")),
        (2, "8 ranks", trials.one_step, ("dp=2,tp=2,pp=2", "seed 1")),
    ],
)
def test_a_job_that_cannot_be_is_refused(refused, world_size, name, worker, given):
    refused(world_size, ValueError(name), worker, *given)


@pytest.mark.parametrize("lacking", ["3.1.bias", "2.mlp.up.weight", "0.attention.out.bias"])
def test_a_missing_gradient_is_refused_on_every_stage(refused, lacking):
    refused(4, ValueError(lacking), without, "tp=2,pp=2", lacking, sent=True)


@pytest.mark.parametrize("lacking", ["1.mlp.up.weight", "0.attention.out.bias"])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_gradient_that_one_rank_lacks_is_refused_by_all(refused, lacking, missing):
    refused(2, ValueError(lacking), without, "tp=2", lacking, (missing,), sent=True)


def of_another_model(rank, world_size):
    """Names such as those of Transformers, a frozen norm, and a layer whose rows are cut."""
    mesh = job.mesh_of("tp=2", world_size)
    stage = nn.ModuleDict({"fc1": nn.Linear(2, 2), "h": nn.ModuleList([nn.LayerNorm(2)])})
    model = nn.ModuleDict({"model": stage})
    model.model.h.requires_grad_(False)
    model.model.fc1.weight = shard(model.model.fc1.weight, 0)
    for number, parameter in enumerate(model.model.fc1.parameters()):
        parameter.grad = torch.full_like(parameter, number + rank)
    return trials.whole_gradients(model, mesh)


def test_a_model_may_have_other_names_and_frozen_parameters(ranks):
    for rank, found in enumerate(ranks(2, of_another_model).results):
        assert list(found) == ["model.fc1.weight", "model.fc1.bias"]
        assert found["model.fc1.weight"].tolist() == [[0, 0], [1, 1]]
        assert found["model.fc1.bias"].tolist() == [1 + rank] * 2


@pytest.mark.parametrize(
    "name, whole",
    [
        ("0.mlp.up.weight", "2.mlp.up.weight"),
        ("model.layers.10.mlp.experts.3.w1", "model.layers.12.mlp.experts.3.w1"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("h.0.fc1.weight", "h.2.fc1.weight"),
    ],
)
def test_the_first_number_of_a_name_is_the_layer_s(name, whole):
    assert trials.renumbered(name, 2) == whole


def test_tokens_cannot_be_disturbed():
    with pytest.raises(TypeError, match="int64"):
        trials.first_difference({}, dict, torch.arange(3))


def without_first(rank, world_size):
    mesh = job.mesh_of("pp=2", world_size)
    stage, first = job.stage_of(job.new_model(), mesh)
    for parameter in stage.parameters():
        parameter.grad = parameter.detach().clone()
    return trials.whole_gradients(stage, mesh)


def test_stages_without_their_number_are_refused(refused):
    """Gradients of several layers would have one name, and the last one would be left."""
    refused(2, ValueError("`first`"), without_first, sent=True)


def test_other_names_are_not_compared():
    x, targets = job.batch_of()
    found = trials.alone(x, targets)
    found["9.bias"] = found.pop("0.mlp.up.bias")
    with pytest.raises(ValueError, match="9.bias"):
        trials.first_difference(found, lambda x: trials.alone(x, targets), x)


def test_another_word_is_no_kind():
    with pytest.raises(ValueError, match="'sharded'"):
        kinds.dual("sharded")
