"""`prove` beside jobs whose outcome is known: each fault by its kind and its first tensor."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from mgpu_tutorial.instruments.prove import watch_worker, watched
from mgpu_tutorial.instruments.prove.proof import UNWATCHED
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


def stepping(rank, world_size, model, forward=None, after_step=None, rate=0.1, average=None):
    """Two steps on this rank's samples; what is done with gradients, and after, is given."""
    average = average or average_of
    optimizer = SGD(model.parameters(), lr=rate)
    samples = torch.arange(32.0).double().reshape(8, 4).sin().chunk(world_size)[rank]
    for _ in range(2):
        (forward or model)(samples).square().mean().backward()
        for p in model.parameters():
            average(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        if after_step:
            after_step(optimizer)


def average_of(gradient):
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def linears(of=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(of)))


class Keeping(nn.Linear):
    """It computes with a copy of its weight that it once made."""

    def forward(self, x):
        if dist.get_world_size() > 1 and not hasattr(self, "kept"):
            self.kept = self.weight.detach().clone()
        late = self.kept - self.weight.detach() if hasattr(self, "kept") else 0.0
        return linear(x, self.weight + late, self.bias)


def keeping_a_copy(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Keeping(4, 4), nn.Linear(4, 4))
    stepping(rank, world_size, model)


def stepping_further(rank, world_size):
    """The rate is multiplied by the ranks after each step."""

    def faster(optimizer):
        optimizer.param_groups[0]["lr"] *= world_size

    stepping(rank, world_size, linears(), after_step=faster)


def sending_nothing(rank, world_size):
    stepping(rank, world_size, linears(), rate=0.1 if world_size == 1 else 0.0)


def gathering_in_another_order(rank, world_size):
    def gather(optimizer):
        for p in optimizer.param_groups[0]["params"]:
            own = p.detach().chunk(world_size)[rank].contiguous()
            parts = [torch.empty_like(own) for _ in range(world_size)]
            dist.all_gather(parts, own)
            p.data.copy_(torch.cat(parts[::-1]))

    stepping(rank, world_size, linears(), after_step=gather)


def averaging_in_bfloat16(rank, world_size):
    def average(gradient):
        short = gradient.bfloat16() if world_size > 1 else gradient
        dist.all_reduce(short)
        gradient.copy_(short / world_size)

    stepping(rank, world_size, linears(), average=average)


def cutting_a_tie(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    if world_size > 1:
        model[2].weight = nn.Parameter(model[0].weight.detach().clone())
    stepping(rank, world_size, watched(model))


class Counting(nn.Linear):
    """It counts its forwards in a buffer."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x):
        self.forwards += 1
        return super().forward(x)


def in_stages(rank, world_size, watch):
    """A pipeline of two stages."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Counting(4, 4) for _ in range(4)))
    model = watched(model) if watch else model
    stage = nn.Sequential(*list(model)[2 * rank :][: 4 // world_size])

    def forward(x):
        if world_size == 1:
            return stage(x)
        x = torch.arange(32.0).double().reshape(8, 4).sin()
        if rank == 0:
            dist.send(stage(x).detach(), 1)
            return stage(x)
        dist.recv(x, 0)
        return stage(x)

    stepping(rank, world_size, stage, forward, average=lambda gradient: None)


SAID = {
    "a copy of the weight is kept": (
        keeping_a_copy,
        "gradients of step 2",
        "in forward of step 2 the first is the output of 1: 4 of 4 rows on rank 0",
    ),
    "the rate grows by the ranks": (
        stepping_further,
        "parameters after step 2",
        "changed 2 times as much: is it stepped as often",
    ),
    "what nobody steps": (sending_nothing, "parameters after step 1", "not changed: does"),
    "gathered in another order": (
        gathering_in_another_order,
        "parameters after step 1",
        "its parts in another order: 2 along 0, here 1, 0",
    ),
    "averaged in bfloat16": (
        averaging_in_bfloat16,
        "gradients of step 1",
        "% off, all in numbers of bfloat16",
    ),
    "a tie that is cut before it is watched": (
        cutting_a_tie,
        "parameters at the start",
        "suspect: tied in one process, and not on the ranks",
    ),
}


@pytest.mark.parametrize("job", SAID)
def test_what_is_said_leads_to_the_line(proved, job):
    worker, when, said = SAID[job]
    proof = proved(2, worker)
    assert proof.first.when == when, proof
    assert said in str(proof), proof
    assert "one seed for all" not in str(proof), proof


def test_a_stage_that_was_not_watched_is_said_to_have_other_names(proved):
    proof = proved(2, in_stages, False)
    assert proof.remarks == [UNWATCHED], proof


def test_a_buffer_counts_on_the_stage_that_computes_with_it(proved):
    proof = proved(2, in_stages, True)
    rows = {row.name: row.kind for row in proof.of("buffers")}
    assert rows.keys() == {f"{n}.forwards" for n in range(4)}
    assert [rows["2.forwards"], rows["3.forwards"]] == ["", ""], proof


def test_a_job_that_is_watched_sends_what_it_sends_alone(ranks):
    given = jobs.train, (DDP,), {}, torch.float64, False
    plain = ranks(2, jobs.train, DDP, trace=True, device="cpu")
    seen = ranks(2, watch_worker, *given, trace=True, device="cpu")
    calls = [[event.op for event in report.events] for report in (plain, seen)]
    assert sorted(calls[0]) == sorted(calls[1])


def test_watched_does_nothing_outside_of_a_proof():
    model = net()
    before = [p.clone() for p in model.parameters()]
    assert watched(model) is model
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
