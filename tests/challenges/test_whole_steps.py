"""What is priced is what was proved: attacks on the judge of whole steps."""

import inspect

import pytest
import torch
from torch.nn.functional import cross_entropy

from mgpu_tutorial.challenges import solutions, whole_steps
from mgpu_tutorial.challenges.builds import build
from mgpu_tutorial.lab import span
from mgpu_tutorial.shared.price import price
from mgpu_tutorial.shared.price.tape import Operation
from tests.challenges.first_attempts import FIRST

OURS = inspect.getsource(solutions.ShardedTrainer)
PROBLEM = build.problems["ShardedTrainer"]
WAIT = "            self.gathers.pop(number).wait()"
MEAN = "        self.shares[number].grad /= self.ranks\n"


def first_wrong(source, cell):
    *_, trainer = cell(source)
    return next(row for row in build.rows(trainer) if not row.holds)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_first_attempt_is_right_and_takes_nearly_twice_as_long(cell):
    row = first_wrong(FIRST["ShardedTrainer"], cell)
    assert row.must.startswith("reach the target"), row
    assert row.seen.startswith("1,905 ms a step; nobody gets below 850"), row


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_whole_gradients_do_not_fit(cell):
    source = FIRST["ShardedTrainer"].replace("0 < number < 5", "number < 0")
    row = first_wrong(source, cell)
    assert row.must.startswith("hold at most 80 GB") and "it holds 85.7 GB" in row.seen, row


ATTACKS = {  # what is replaced, and what the row says
    "it never waits for the gathers": (WAIT, WAIT.removesuffix(".wait()"), "a loss of"),
    "the sum for the mean": (MEAN, "", "a loss of"),
    "no step at all": ("        self.optimizers[number].step()\n", "", "a loss of"),
    "one rank's gradient": (
        MEAN,
        MEAN + "        self.shares[number].grad *= number != 1\n",
        "a loss of",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_wrong_trainer_is_found_in_the_proof(attack, cell):
    old, new, says = ATTACKS[attack]
    assert OURS.count(old) == 1
    row = first_wrong(OURS.replace(old, new), cell)
    assert row.must.startswith("train on 4 ranks") and says in row.seen, row


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_that_waits_on_few_ranks_only_is_refused(cell):
    new = WAIT.replace("self", "work = self").replace(".wait()", "")
    new += "\n            work.wait() if self.ranks < 64 else None"
    row = first_wrong(OURS.replace(WAIT, new), cell)
    assert row.must.startswith("train on 4 ranks"), row
    assert "of `arrive` did not run in the proof" in row.seen, row


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_that_works_outside_of_its_steps_is_refused(cell):
    """It computes the first step of each pair twice, and the other outside of the spans."""
    source = FIRST["ShardedTrainer"].replace(
        "        loss.backward()\n", "        (0 * loss).backward()\n"
    )
    assert "a loss of" in first_wrong(source, cell).seen


DOORS = {
    "a message": ("dist.all_gather_single(", "dist.isend(", "`dist.isend` has no price"),
    "a name of its own": ("dist.all_gather_single(", "dist.group.WORLD.a(", "`dist.group`"),
    "an import": (
        "        import torch.distributed as dist\n\n        self.waiting",
        "        from torch.distributed import all_reduce\n\n        self.waiting",
        "write `import torch.distributed as dist`",
    ),
    "another name": (
        "dist.all_gather_single(",
        "[d := dist][0].a(",
        "`dist` is only for calls",
    ),
    "an operation": ("dist.all_gather_single(", "torch.ops.c10d.a(", "`ops`"),
    "DDP": ("dist.all_gather_single(", "dist.fsdp.fully_shard(", "is a door"),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_door_beside_the_judge_is_named(door, cell):
    old, new, says = DOORS[door]
    assert old in OURS
    row = first_wrong(OURS.replace(old, new), cell)
    assert row.must.startswith("be written") and says in row.seen, row


def plain(rank, world_size):
    """Forward and backward of the whole model, and nothing else."""
    model, text = whole_steps.llama_in_16_bits(), torch.zeros(1, 8193, dtype=torch.long)
    for step in range(2):
        with span(f"step {step}"):
            cross_entropy(model(text[:, :-1]).mT, text[:, 1:]).backward()
        model.zero_grad()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_bound_is_the_model_alone():
    priced = price(plain, 64, machine=whole_steps.network(), timeout=300)
    kernels = [event for event in priced.tapes[0].events if isinstance(event, Operation)]
    assert sum(kernel.flops for kernel in kernels) == pytest.approx(
        whole_steps.FLOPS, rel=1e-3
    )
    assert 0.99 * whole_steps.COMPUTES <= 1000 * priced.seconds <= whole_steps.COMPUTES
    parameters = sum(p.numel() for p in llama_sizes())
    assert parameters == whole_steps.PARAMETERS


def llama_sizes():
    with torch.device("meta"):
        return list(whole_steps.llama_3_8b().parameters())
