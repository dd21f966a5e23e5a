"""What is priced is what was proved: attacks on the judge of whole steps."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from mgpu_tutorial.challenges import solutions, whole_steps
from mgpu_tutorial.challenges.builds import build
from mgpu_tutorial.instruments.price import price
from mgpu_tutorial.instruments.price.tape import Operation
from mgpu_tutorial.lab import span
from mgpu_tutorial.lab.run.errors import LaunchError
from tests.challenges.first_attempts import FIRST

OURS = inspect.getsource(solutions.ShardedTrainer)
PROBLEM = build.problems["ShardedTrainer"]
WAIT = "            self.gathers.pop(number).wait()"
MEAN = "        self.shares[number].grad /= self.ranks\n"


def first_wrong(source, cell):
    *_, trainer = cell(source)
    return next(row for row in build.rows(trainer) if not row.holds)


@pytest.fixture
def proof_alone(monkeypatch):
    """What the proof finds needs no price of the whole model."""
    monkeypatch.setattr(whole_steps, "priced_step", lambda trainer: "not asked for")


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
@pytest.mark.usefixtures("proof_alone")
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_wrong_trainer_is_found_in_the_proof(attack, cell):
    old, new, says = ATTACKS[attack]
    assert OURS.count(old) == 1
    row = first_wrong(OURS.replace(old, new), cell)
    assert row.must.startswith("train on 4 ranks") and says in row.seen, row


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "wait",
    [
        "[each.wait() for each in [work][: 4 // self.ranks]]",
        "work.wait() if self.ranks < 64 else None",
    ],
)
def test_one_that_waits_on_few_ranks_only_is_refused(wait, cell):
    new = WAIT.replace("self", "work = self").replace(".wait()", "")
    new += f"\n            {wait}"
    row = first_wrong(OURS.replace(WAIT, new), cell)
    assert row.must.startswith("hold at most 80 GB at full size"), row
    assert "still has on its way" in row.seen and ".case" not in row.seen, row


# Whole gradients are written into five buffers, in turn, and nobody waits until one has left.
POOL = (
    "        gradients = self.joined([p.grad for p in parameters])\n",
    "        gradients = self.joined([p.grad for p in parameters])\n"
    "        self.pool = getattr(self, 'pool', {})\n"
    "        key = number % 5 if 0 < number < len(self.layers) - 2 else -1 - number\n"
    "        if key not in self.pool:\n"
    "            self.pool[key] = gradients\n"
    "        gradients = self.pool[key].copy_(gradients)\n",
)


@pytest.mark.slow
@pytest.mark.usefixtures("proof_alone")
def test_a_pool_of_buffers_that_come_round_too_early_is_refused(cell):
    source = OURS.replace(*POOL).replace("number + 3", "number + 6")
    row = first_wrong(source, cell)
    assert row.must.startswith("train on 4 ranks") and "32 layers" in row.seen, row


def test_a_picture_asks_for_the_price_alone(monkeypatch):
    """And what has no price says why."""
    monkeypatch.setattr(whole_steps, "priced_step", lambda trainer: "no price")
    with pytest.raises(AssertionError, match="no price"):
        build.picture(solutions.ShardedTrainer)


def in_flight(rank, world_size, breaks):
    """An all-gather on its way, and a kernel on its memory."""
    with whole_steps.Watching() as watching:
        watching.calls()
        whole, share = torch.empty(8), torch.ones(8 // world_size)
        work = dist.all_gather_single(whole, share, async_op=True)
        assert share + 1 is not None and whole.view(2, 4) is not None
        assert torch.empty_like(whole) is not None  # none of these three touches what moves
        if breaks == "reads":
            whole + 1
        if breaks == "changes":
            share.add_(1)
        work.wait()
        whole.add_(share.sum())
    return whole.sum().item()


@pytest.mark.parametrize("breaks", ["reads", "changes"])
def test_a_kernel_that_touches_what_is_on_its_way_is_named(breaks, ranks):
    with pytest.raises(LaunchError, match=f"{breaks} what `all_gather_single` still has"):
        ranks(2, in_flight, breaks, timeout=20)


def test_memory_is_free_after_a_wait(ranks):
    assert ranks(2, in_flight, "", timeout=20).results == [40, 40]


@pytest.mark.slow
@pytest.mark.usefixtures("proof_alone")
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
    "FSDP": ("dist.all_gather_single(", "dist.fsdp.fully_shard(", "`dist.fsdp`"),
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


COMPUTES = 850  # ms, as the page says


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_model_alone_takes_what_the_page_says():
    priced = price(plain, 64, machine=whole_steps.network(), timeout=300)
    kernels = [event for event in priced.tapes[0].events if isinstance(event, Operation)]
    assert sum(kernel.flops for kernel in kernels) == pytest.approx(
        whole_steps.FLOPS, rel=1e-3
    )
    assert 0.99 * COMPUTES <= 1000 * priced.seconds <= COMPUTES
    parameters = sum(p.numel() for p in llama_sizes())
    assert parameters == whole_steps.PARAMETERS
    with torch.device("meta"):  # its numbers would take 32 GB
        assert len(whole_steps.llama_in_16_bits()) == whole_steps.LAYERS + 3


def test_the_bound_is_what_the_link_must_carry():
    """A GB that a rank sends, and a call, as the page has them."""
    to, gb, ranks = whole_steps.network(), 35.0, 64  # eight cards of 50 Gb/s at 70%
    assert 8 * to.between.bandwidth == gb * 1e9 and round(1000 / gb, 1) == 28.6
    call = (ranks - 8) * to.inside.latency + 7 * to.between.latency
    assert round(1000 * call, 2) == 0.15
    carries = round(whole_steps.SENDS / 1e9, 2)
    assert carries == 29.55
    assert PROBLEM.bound(()) == int(1000 * (carries / gb + 2 * call)) == 844


def llama_sizes():
    with torch.device("meta"):
        return list(whole_steps.llama_3_8b().parameters())
