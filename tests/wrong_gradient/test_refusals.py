"""What the job, its tests and the check cannot do, every rank says before it sends."""

import pytest

from mgpu_tutorial.wrong_gradient import check, job, kinds, trials


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
        (2, "dp=4", check, ("dp=4",)),
        (3, "8 heads", check, ("tp=3",)),
        (2, "'dp'", check, ("dp",)),
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
