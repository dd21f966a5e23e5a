"""What the job, its tests and the check cannot do, every rank says before it sends."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mgpu_tutorial.wrong_gradient import check, curves, job, kinds, trials

PLAN = "each of dp, tp, pp at most once and 1, 2 or 4"


def without(rank, world_size, plan, lacking, ranks=range(8)):
    """Put gradients together of which some ranks lack one."""
    mesh = job.mesh_of(plan, world_size)
    stage, first = job.stage_of(job.new_model(), mesh)
    for name, parameter in stage.named_parameters():
        if f"{first + int(name[0])}{name[1:]}" != lacking or rank not in ranks:
            parameter.grad = parameter.detach().clone()
    return trials.whole_gradients(stage, mesh, first)


@pytest.mark.parametrize(
    "world_size, words, worker, given",
    [
        *((2, PLAN, trials.one_step, (plan,)) for plan in ("dp=3", "dp", "", "cp=2", "dp=0")),
        *((2, PLAN, trials.one_step, (plan,)) for plan in ("dp=2,dp=2", "dp=x", 2, None)),
        (2, "it takes 4 ranks, and there are 2", trials.one_step, ("dp=2,tp=2",)),
        (2, "fault 'sums': expected one of FAULTS", trials.one_step, ("dp=2", "sums")),
        (2, "seed 9", trials.one_step, ("dp=2", "seed 9")),
        (2, "dtype='int64': expected one of", trials.one_step, ("dp=2", "", 1.0, "int64")),
        (2, "most=-1.0: expected the largest norm", trials.one_step, ("dp=2", "", -1.0)),
        (2, "most=0: expected the largest norm", trials.one_step, ("dp=2", "", 0)),
        (2, "most=nan: expected the larg", trials.one_step, ("dp=2", "", float("nan"))),
        (
            2,
            "it takes 8 ranks, and there are 2",
            trials.one_step,
            ("dp=2,tp=2,pp=2", "seed 1"),
        ),
        (1, "optimizer 'Adam': expected one of SGD", curves.losses, ("Adam", 1.0)),
        (2, "plan dp=4: it takes 4 ranks", check, ("dp=4",)),
        (3, "3 ranks cannot share 8 heads evenly", check, ("tp=3",)),
        (2, "expected something like dp=2,tp=2", check, ("dp",)),
    ],
)
def test_refused(refused, world_size, words, worker, given):
    refused(world_size, words, worker, *given)


@pytest.mark.parametrize("lacking", ["3.1.bias", "2.mlp.up.weight", "0.attention.out.bias"])
def test_a_missing_gradient_is_refused_on_every_stage(refused, lacking):
    refused(4, f"{lacking} has no gradient", without, "tp=2,pp=2", lacking, sent=True)


@pytest.mark.parametrize("lacking", ["1.mlp.up.weight", "0.attention.out.bias"])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_gradient_that_one_rank_lacks_is_refused_by_all(refused, lacking, missing):
    words = f"{lacking} has no gradient"
    refused(2, words, without, "tp=2", lacking, (missing,), sent=True)


def without_first(rank, world_size):
    mesh = job.mesh_of("pp=2", world_size)
    stage, first = job.stage_of(job.new_model(), mesh)
    for parameter in stage.parameters():
        parameter.grad = parameter.detach().clone()
    return trials.whole_gradients(stage, mesh)


def test_stages_without_their_number_are_refused(refused):
    """Gradients of several layers would have one name, and the last one would be left."""
    refused(2, "stages 0 and 1 both have 0.", without_first, sent=True)


def without_a_dimension(rank, world_size, *names):
    mesh = init_device_mesh("cpu", (2,) + (1,) * (len(names) - 1), mesh_dim_names=names)
    return trials.whole_gradients(nn.Sequential(nn.Linear(1, 1)), mesh)


@pytest.mark.parametrize(
    "names, lacking", [(["tp", "dp"], "pp"), (["pp"], "tp"), (["dp"], "tp and pp")]
)
def test_a_mesh_without_a_dimension_is_refused(refused, names, lacking):
    words = f"and no {lacking}: make it with both"
    refused(2, words, without_a_dimension, *names, sent=True)


def one_layer(rank, world_size):
    mesh = job.mesh_of("dp=1,tp=1", world_size)
    trials.whole_gradients(torch.nn.Linear(2, 2), mesh)


def test_a_stage_has_numbered_layers(refused):
    refused(1, "the stage is Linear, whose layers have no numbers", one_layer)


def test_a_batch_that_moves_nothing_sets_no_limit():
    def constant(x):
        return {"w": torch.ones(2)}

    with pytest.raises(ValueError, match="no gradient moved with x"):
        trials.first_difference({"w": torch.ones(2)}, constant, torch.zeros(2))


def test_tokens_have_no_last_place():
    with pytest.raises(TypeError, match="x is torch.int64, of which no last place can be"):
        trials.first_difference({}, dict, torch.arange(3))


def test_other_names_are_not_compared():
    x, targets = job.batch_of()
    found = trials.alone(x, targets)
    found["9.bias"] = found.pop("0.mlp.up.bias")
    with pytest.raises(ValueError, match="are compared with"):
        trials.first_difference(found, lambda x: trials.alone(x, targets), x)


@pytest.mark.parametrize("kind", ["sharded", "", None, 3])
def test_another_word_is_no_kind(kind):
    with pytest.raises(ValueError, match="is no kind: expected one of replicated"):
        kinds.dual(kind)


@pytest.mark.parametrize("found", [torch.ones(4, 1), torch.ones(16), None])
def test_a_gradient_of_another_shape_is_not_stretched(found):
    def right(x):
        return {"w": 2 * x}

    with pytest.raises(ValueError, match=r"w: .* is compared with torch.Size\(\[4, 4\]\)"):
        trials.first_difference({"w": found}, right, torch.ones(4, 4))
