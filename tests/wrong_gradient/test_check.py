"""The check of the language model's plans is silent where all is right, and not elsewhere."""

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial import language_model
from mgpu_tutorial.__main__ import main
from mgpu_tutorial.ddp_in_practice.practice import AccumulatingDDP
from mgpu_tutorial.language_model import plan as plans
from mgpu_tutorial.wrong_gradient import check


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=1", "dp=2,tp=2", "cp=2,pp=2", "dp=2,zero=1"])
def test_a_right_plan_has_no_wrong_gradient(ranks, plan):
    world_size = plans.plan_of(plan).ranks
    report = ranks(world_size, check, plan, timeout=100)
    assert report.results == [[]] * world_size
    one, copies, norm = report.stdout[0].splitlines()
    assert one == "one process: 0 of 54 gradients are off" and copies == "copies: 0 differ"
    numbers = [word for word in norm.split() if "." in word]
    assert len(numbers) == 2 and numbers[0] == numbers[1]


def faulty(rank, world_size, plan, fault):
    """The check, on a language model with a fault of which its loss knows nothing."""

    finish = AccumulatingDDP.finish_gradient_synchronization

    def spoiled(model):
        finish(model)
        for parameter in model.parameters():
            parameter.grad *= {"sums": world_size, "nan": torch.nan}[fault]

    if fault == "nothing":  # each rank averages alone
        own, _ = dist.new_subgroups(1)
        language_model.rank.data_group = lambda mesh: own
    else:
        AccumulatingDDP.finish_gradient_synchronization = spoiled
    return check(rank, world_size, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, differ", [("sums", False), ("nothing", True), ("nan", False)]
)
def test_a_wrong_gradient_is_named_and_so_are_copies(ranks, fault, differ):
    report = ranks(2, faulty, "dp=2", fault, timeout=100)
    assert all(len(wrong) == 54 for wrong in report.results)
    assert "54 of 54 gradients are off 5.scores.bias" in report.stdout[0]
    assert ("copies: 0 differ" not in report.stdout[0]) == differ


@pytest.mark.slow
def test_it_runs_from_the_command_line(capsys):
    assert main(["wrong_gradient.check", "--plan", "tp=2", "--timeout", "100"]) == 0
    assert "one process: 0 of 54 gradients are off" in capsys.readouterr().out
