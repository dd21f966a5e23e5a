"""What a tape counts, exactly: operations, bytes, calls, and memory by kind."""

import math
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from mgpu_tutorial.ddp_buckets.experiments import Tower
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, NaiveDDP
from mgpu_tutorial.instruments.price import Priced, llama_3_8b, price
from mgpu_tutorial.instruments.price.machine import machine_of
from mgpu_tutorial.instruments.price.tape import EXACT, HALF, Call, Operation
from mgpu_tutorial.lab import span
from mgpu_tutorial.lab.run import server
from mgpu_tutorial.sharding.blocks import PrefetchingBlock, ShardedBlock, linked
from mgpu_tutorial.shared.cost_model.links import Link

WIDTH, DEPTH, TOKENS = 256, 4, 512
PARAMETERS = DEPTH * WIDTH**2
H100 = machine_of("8 x H100")


@pytest.fixture(scope="module", autouse=True)
def preloaded():
    """What a pretended rank imports, its fork server has imported once for all."""
    server.PRELOAD += [
        "torch._subclasses.fake_tensor",
        "torch.fx.experimental.symbolic_shapes",
    ]


def whole(model):
    return model


def sharded(model):
    return nn.Sequential(*map(ShardedBlock, model))


def prefetching(model):
    return linked([PrefetchingBlock(layer) for layer in model])


def fsdp(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(rank, world_size, wrapper, dtype=torch.float32):
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(DEPTH)]
    model = wrapper(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(TOKENS, WIDTH, dtype=dtype)
    for _ in range(2):
        with span("step"):
            model(x).sum().backward()
            getattr(model, "finish_gradient_synchronization", lambda: None)()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(scope="module")
def priced():
    made = {}

    def get(wrapper, ranks=4, dtype=torch.float32):
        if (wrapper, ranks, dtype) not in made:
            made[wrapper, ranks, dtype] = price(train, ranks, wrapper, dtype)
        return made[wrapper, ranks, dtype]

    return get


def events_of(found: Priced, kind):
    return [event for event in found.tapes[0].events if isinstance(event, kind)]


@pytest.mark.parametrize("wrapper", [whole, BucketedDDP, sharded, prefetching, fsdp])
def test_two_operations_forward_and_four_backward(priced, wrapper):
    flops = sum(event.flops for event in events_of(priced(wrapper), Operation))
    first_input = 2 * WIDTH**2 * TOKENS  # whose gradient nobody wants
    assert flops == 6 * PARAMETERS * TOKENS - first_input


def test_a_product_reads_both_and_writes_one(priced):
    first = next(e for e in events_of(priced(whole), Operation) if e.flops)
    assert first.nbytes == 4 * (2 * TOKENS * WIDTH + WIDTH**2)


def test_32_bits_take_longer_than_16(priced):
    ratios = {
        dtype: {
            e.numbers for e in events_of(priced(whole, dtype=dtype), Operation) if e.flops
        }
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert ratios == {torch.float32: {EXACT}, torch.bfloat16: {HALF}}


NBYTES = 4 * PARAMETERS


@pytest.mark.parametrize(
    ("wrapper", "calls"),
    [
        (whole, {}),
        (NaiveDDP, {"all_reduce": (DEPTH, NBYTES)}),
        (BucketedDDP, {"all_reduce": (1, NBYTES)}),
        (
            sharded,  # backward does not need the first layer's weight
            {
                "all_gather_single": (2 * DEPTH - 1, 2 * NBYTES - 4 * WIDTH**2),
                "reduce_scatter_single": (DEPTH, NBYTES),
            },
        ),
        (
            fsdp,
            {
                "all_gather_single": (2 * DEPTH, 2 * NBYTES),
                "reduce_scatter_single": (DEPTH, NBYTES),
            },
        ),
    ],
)
def test_calls_and_their_bytes(priced, wrapper, calls):
    found = {}
    for event in events_of(priced(wrapper), Call):
        count, nbytes = found.get(event.name, (0, 0))
        found[event.name] = count + 1, nbytes + event.nbytes
    assert found == calls
    assert all(event.group == (0, 1, 2, 3) for event in events_of(priced(wrapper), Call))


def scatter_and_gather(rank, world_size):
    """A DTensor of 4,096 bytes: its parts are added up and dealt, and then gathered."""
    mesh = init_device_mesh("cpu", (world_size,))
    parts = DTensor.from_local(torch.ones(32, 32), mesh, [Partial()])
    parts.redistribute(placements=[Shard(0)]).redistribute(placements=[Replicate()])


def test_the_calls_of_a_dtensor_count_the_whole():
    calls = events_of(price(scatter_and_gather, 4), Call)
    found = {event.name: event.nbytes for event in calls}
    assert found == {"reduce_scatter_single": 4096, "all_gather_single": 4096}


def between_steps(found):
    kinds = found.memory()[-1][1]
    return {kind: nbytes for kind, nbytes in kinds.items() if nbytes > 64}


@pytest.mark.parametrize(("wrapper", "copies"), [(whole, 1), (BucketedDDP, 2)])
def test_a_replica_holds_sixteen_bytes_per_parameter(priced, wrapper, copies):
    """As `comparison` counts: 4 of the parameter, 4 of the gradient, 8 of Adam's moments.

    A bucket is a second copy of its gradients, and here there is one bucket.
    """
    found = priced(wrapper)
    kinds = between_steps(found)
    assert kinds["parameters"] == 4 * PARAMETERS
    assert kinds["optimizer"] == pytest.approx(8 * PARAMETERS, abs=64)  # and its steps
    assert max(kinds["gradients"] for _, kinds in found.memory()) == copies * 4 * PARAMETERS


@pytest.mark.parametrize("wrapper", [sharded, prefetching, fsdp])
@pytest.mark.parametrize("ranks", [2, 4])
def test_stage_3_divides_the_sixteen_bytes_by_the_ranks(priced, wrapper, ranks):
    kinds = between_steps(priced(wrapper, ranks))
    assert kinds["parameters"] == 4 * PARAMETERS / ranks
    assert kinds["optimizer"] == pytest.approx(8 * PARAMETERS / ranks, abs=64)


def test_fsdp_frees_what_it_has_gathered(priced):
    """One layer is whole at a time, and the next one on the way; else all four would be."""
    most = max(kinds["parameters"] + kinds["buffers"] for _, kinds in priced(fsdp).memory())
    assert most < 0.9 * NBYTES * (1 + 1 / 4)


def test_fsdp_gathers_ahead_on_streams_of_its_own(priced):
    calls = events_of(priced(fsdp), Call)
    assert {call.stream for call in calls}.isdisjoint({0})


LINK = Link(latency=6e-3, bandwidth=40e6)  # that of `ddp_buckets`


def backward(rank, world_size, wrapper, tower=Tower, **options):
    """The step of `ddp_buckets`, whose layers sleep in backward, without its forward."""
    module = tower(256, 6)
    for layer in module.body:
        layer.register_full_backward_pre_hook(lambda layer, gradient: time.sleep(0.02))
    model = wrapper(module, **options)
    loss = model(torch.randn(8, 256)).square().mean()
    with span("step"):
        loss.backward()
        getattr(model, "finish_gradient_synchronization", lambda: None)()


@pytest.mark.parametrize(
    ("wrapper", "options", "computed"),
    [
        (NaiveDDP, {}, 328),
        (BucketedDDP, {"bucket_cap_mb": 0}, 228),
        (BucketedDDP, {"bucket_cap_mb": 25}, 172),
        (BucketedDDP, {"bucket_cap_mb": 0.25}, 151),
    ],
)
def test_steps_of_08_end_on_its_link_when_the_page_says(wrapper, options, computed):
    machine = machine_of("2 x H100")._replace(inside=LINK, kernel=0)
    found = price(backward, 2, wrapper, machine=machine, **options)
    assert 1e3 * found.seconds == pytest.approx(computed, abs=0.6)


def test_another_machine_runs_nothing_again(priced, monkeypatch):
    found = priced(BucketedDDP)
    monkeypatch.setattr("mgpu_tutorial.instruments.price.pricing.launch", None)
    slower = found.on("4 x A100")
    assert slower.tapes is found.tapes and slower.seconds > found.seconds


def test_more_gpus_are_priced_as_if_from_the_start(priced):
    grown = priced(sharded, 2).on("4 x H100")
    assert grown.tapes == priced(sharded, 4).tapes


def pass_on(rank, world_size, micro):
    """Forward through a pipeline of equal stages."""
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(TOKENS, WIDTH)
    with span("step"):
        for _ in range(micro):
            if rank:
                dist.recv(x, rank - 1)
            y = layer(x)
            if rank < world_size - 1:
                dist.send(y.detach(), rank + 1)


def test_a_pipeline_is_taped_stage_by_stage():
    found = price(pass_on, 4, 6)
    assert list(found.tapes) == [0, 1, 2, 3]
    slot = found.played[0].computing / 6
    assert found.seconds > (4 - 1 + 6) * slot
    assert len(found.table().rows) == 4


def around(rank, world_size):
    """One turn of a ring, sent and received at once."""
    mine, theirs = torch.randn(TOKENS, WIDTH), torch.empty(TOKENS, WIDTH)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    operations = [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, theirs, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def test_a_ring_sends_and_receives_at_once():
    machine = machine_of("4 x H100")._replace(kernel=0, memory_rate=float("inf"))
    link, nbytes = machine.inside, 4 * TOKENS * WIDTH
    found = price(around, 4, machine=machine)
    assert found.seconds == pytest.approx(link.latency + nbytes / link.bandwidth)
    assert found.sent() == nbytes


def count(rank, world_size):
    assert sum(p.numel() for p in llama_3_8b().parameters()) == 8_030_261_248


def test_llama_has_eight_billion_parameters_and_no_memory():
    price(count, 1)


def test_it_shows_itself_the_same_each_time(priced):
    found = priced(BucketedDDP)
    shown = found._repr_mimebundle_()
    assert shown == found.on("4 x H100")._repr_mimebundle_()
    assert "priced on 4 x H100, not measured" in shown["text/plain"]
    assert len(shown["image/svg+xml"]) < 100_000


def ask(rank, world_size):
    if torch.randn(3).sum().item() > 0:
        dist.barrier()


def hand_objects(rank, world_size):
    dist.all_gather_object([None] * world_size, rank)


def choose(rank, world_size):
    return torch.randn(9)[torch.randn(9) > 0]


def compress(rank, world_size):
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)


def align(rank, world_size):
    some = torch.tensor([3, 3])
    nn.functional.ctc_loss(torch.ones(3, 2, 4), torch.ones(2, 3).long(), some, some)


def fail(rank, world_size):
    torch.ones(2, 3) @ torch.ones(2, 3)


def move(rank, world_size):
    nn.Linear(2, 2).cuda()


def make_there(rank, world_size):
    torch.ones(2, device="cuda")


def choose_device(rank, world_size):
    torch.cuda.set_device(rank)


def remember(rank, world_size):
    nn.LSTM(4, 4)(torch.ones(3, 2, 4))


def decompose(rank, world_size):
    torch.linalg.svd(torch.ones(4, 4))


def hang(rank, world_size):
    while True:
        pass


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (ask, r"depends on numbers .*item.*test_tape.py"),
        (hand_objects, r"depends on numbers .*all_gather_object"),
        (align, r"depends on numbers .*ctc_loss\(.*test_tape.py.*PyTorch's ctc_loss"),
        (choose, r"depends on numbers .*randn"),
        (compress, r"DistributedDataParallel does with register_comm_hook has no price"),
        (move, r"is a GPU .*cuda\(\).*leave the device out"),
        (make_there, r"is a GPU .*device=.*leave the device out"),
        (remember, r"what \w+ computes is not counted.*no price.*LSTM.forward"),
        (decompose, r"what \w+ computes is not counted.*no price"),
        (choose_device, r"is a GPU .*set_device.*leave the device out"),
        (fail, r"the worker failed as pretended rank 0: .*torch.ones\(2, 3\) @"),
    ],
)
def test_what_has_no_price_is_told_in_a_sentence(worker, words):
    with pytest.raises((ValueError, RuntimeError), match=words) as found:
        price(worker, 2)
    assert len(str(found.value)) < 400 and "\n" not in str(found.value)


def in_half(rank, world_size, convert):
    """One step in bfloat16, of a model that was made so, or converted with its gradients."""
    if not convert:
        torch.set_default_dtype(torch.bfloat16)
    model = nn.Linear(1024, 1024)
    if convert:
        model(torch.ones(8, 1024)).sum().backward()
        same = model.weight, model.weight.grad
        model.to(torch.bfloat16)
        assert (model.weight, model.weight.grad) == same, "others may hold them"
        assert model.weight.grad.dtype == torch.bfloat16
    model.zero_grad()
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(8, 1024, dtype=torch.bfloat16)).sum().backward()
    dist.all_reduce(model.weight.grad)
    adam.step()


def test_a_converted_model_has_the_price_of_one_made_in_its_dtype():
    made, converted = (price(in_half, 2, convert=how) for how in (False, True))
    for tape in (made.tapes[0], converted.tapes[0]):
        sent = [event.nbytes for event in tape.events if isinstance(event, Call)]
        assert sent == [2 * 2**20]
    (_, last), (_, same) = made.memory()[-1], converted.memory()[-1]
    assert last == same


def test_a_worker_that_never_returns():
    with pytest.raises(RuntimeError, match="within 3 s, so there is no price.*timeout=15"):
        price(hang, 2, timeout=3)


@pytest.mark.parametrize(
    ("ranks", "machine", "words"),
    [
        (8, "64 x H100", "8 ranks need a machine of 8 GPUs"),
        (8, "8 x Z80", "of one of A100"),
        (0, None, "ranks must be a whole number, 1 or more"),
        (2.5, None, "ranks must be a whole number, 1 or more"),
        ("2", None, "ranks must be a whole number, 1 or more, got '2'"),
        (True, None, "ranks must be a whole number, 1 or more, got True"),
        (8, H100._replace(flops=-1.0), "8 x H100: flops must be above 0, got -1"),
        (8, H100._replace(flops=0), "8 x H100: flops must be above 0, got 0"),
        (8, H100._replace(flops=math.nan), "8 x H100: flops must be above 0, got nan"),
        (8, H100._replace(memory_rate=-1.0), "memory_rate must be above 0, got -1"),
        (8, H100._replace(memory=math.nan), "memory must be above 0, got nan"),
        (8, H100._replace(kernel=-1.0), "kernel must be 0 or more, got -1"),
        (8, H100._replace(inside=Link(0, -1.0)), "bandwidth must be above 0"),
    ],
)
def test_ranks_and_machines_that_do_not_fit(ranks, machine, words):
    with pytest.raises(ValueError, match=words):
        price(train, ranks, whole, machine=machine)


def test_a_result_is_no_worker():
    with pytest.raises(TypeError, match="worker must be a function"):
        price(3, 2)
