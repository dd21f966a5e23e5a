"""`prove` beside jobs whose outcome is known: each fault by its kind and its first tensor."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from mgpu_tutorial.instruments.prove import watch_worker
from tests.instruments import jobs
from tests.instruments.jobs import net, tied

SEVERAL = "before_step", "shares"  # what one process does without


def run(proved, world_size, wrap, dtype=torch.float64, **how):
    several = {"wrap": wrap} | {name: how.pop(name) for name in SEVERAL if name in how}
    return proved(world_size, jobs.train, dtype=dtype, several=several, **how)


RIGHT = {
    "ddp": (2, DDP, {}),
    "ddp of three": (3, DDP, {"loss_of": jobs.by_tokens}),
    "ddp with SGD": (2, DDP, {"optimizer_of": SGD}),
    "ddp by tokens": (2, DDP, {"loss_of": jobs.by_tokens, "ragged": True}),
    "ddp, clipped": (2, DDP, {"clip": 0.1}),
    "ddp, tied": (2, DDP, {"model_of": tied}),
    "fully_shard": (4, jobs.sharded, {}),
    "fully_shard of three": (3, jobs.sharded, {"loss_of": jobs.by_tokens}),
    "fully_shard, tied": (2, jobs.sharded, {"model_of": tied}),
    "fully_shard, clipped": (2, jobs.sharded, {"clip": 0.1}),
    "tensor parallel": (2, jobs.tensor_parallel, {"shares": 1}),
    "by hand": (2, jobs.by_hand, {"shares": 1}),
    "two dimensions": (4, jobs.two_dimensions, {"shares": 2}),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("job", RIGHT)
def test_a_right_job_is_called_right(proved, job, dtype):
    world_size, wrap, how = RIGHT[job]
    proof = run(proved, world_size, wrap, dtype, **how)
    assert proof.right, proof
    assert proof.tensors == (19 if "model_of" in how else 20)
    assert proof.furthest("parameters") < {8: 1e-12, 2: 0.5}[dtype.itemsize]


WRONG = {
    "nothing is averaged": (2, jobs.alone, {}, "head.weight", "never averaged", "2 ranks"),
    "all but the head": (
        *(2, jobs.alone, {"before_step": jobs.average_all_but_the_head}),
        *("head.weight", "never averaged", "2 ranks"),
    ),
    "started apart": (
        *(
            2,
            jobs.alone,
            {"before_step": jobs.average_all, "model_of": jobs.net_of_this_rank},
        ),
        *("head.weight", "on rank 1", "at the start"),
    ),
    "halved": (2, DDP, {"before_step": jobs.halve}, "head.weight", "0.5 times", ""),
    "halved at the second step": (
        *(2, DDP, {"before_step": jobs.halve_at_second}, "head.weight"),
        *("0.5 times", "step 2"),
    ),
    "half of the rows": (
        *(2, DDP, {"before_step": jobs.double_half_of_the_rows}, "layers.1.up.weight"),
        *("32 of 64 rows", "32 to 63"),
    ),
    "mean of means": (2, DDP, {"ragged": True}, "head.weight", "direction", "counts"),
    "sum": (2, DDP, {"loss_of": jobs.summed}, "head.weight", "0.5 times", "sum"),
    "weights": (2, DDP, {"loss_of": jobs.weighted}, "head.weight", "direction", "weights"),
    "frozen": (2, jobs.frozen_norms, {}, "layers.2.norm.bias", "no gradient", "frozen"),
    "no f": (
        2,
        jobs.without_f,
        {"shares": 1},
        "layers.2.norm.bias",
        "never summed",
        "2 ranks",
    ),
    "the bias on each rank": (
        *(2, jobs.bias_on_each, {"shares": 1}, "head.weight", "direction"),
        "output of layers.0",
    ),
    "BatchNorm": (
        *(2, DDP, {"model_of": jobs.with_batch_norm}, "3.bias", "direction"),
        "BatchNorm",
    ),
    "dropout": (
        2,
        DDP,
        {"model_of": jobs.with_dropout},
        "head.weight",
        "direction",
        "random",
    ),
    "clipped parts": (
        *(2, jobs.by_hand, {"shares": 1, "clip": 0.1}, "head.weight", "times too long"),
        "clipped",
    ),
}


@pytest.mark.parametrize("job", WRONG)
def test_a_fault_is_named_by_its_first_tensor_and_its_kind(proved, job):
    world_size, wrap, how, name, kind, said = WRONG[job]
    proof = run(proved, world_size, wrap, **how)
    assert not proof.right
    assert proof.first.name == name, proof
    assert kind in proof.first.kind, proof
    assert said in str(proof), proof


def train_without_head(rank, world_size, wrap, all_of_it):
    """Two steps, by an optimizer that may have the first layer alone."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = SGD((model if all_of_it else model[0]).parameters(), lr=0.1)
    model = wrap(model)
    samples = torch.arange(32.0).double().reshape(8, 4).chunk(world_size)[rank]
    for _ in range(2):
        model(samples).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("all_of_it", [True, False])
def test_what_no_optimizer_steps_is_named_though_one_process_leaves_it_too(proved, all_of_it):
    proof = proved(2, train_without_head, DDP, all_of_it)
    said = "no optimizer has 1.weight and 3 more, though it gets a gradient"
    assert proof.right and proof.remarks == ([] if all_of_it else [said])


def test_a_job_that_is_watched_sends_what_it_sends_alone(ranks):
    given = jobs.train, (DDP,), {}, torch.float64, False
    plain = ranks(2, jobs.train, DDP, trace=True, device="cpu")
    seen = ranks(2, watch_worker, *given, trace=True, device="cpu")
    calls = [[event.op for event in report.events] for report in (plain, seen)]
    assert sorted(calls[0]) == sorted(calls[1])


def test_watched_does_nothing_outside_of_a_proof():
    from mgpu_tutorial import watched

    model = net()
    before = [p.clone() for p in model.parameters()]
    assert watched(model) is model
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
