"""What the reader's wrappers must do, on real ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.ddp_buckets.experiments import Tower, train
from mgpu_tutorial.ddp_buckets.figures import count_calls
from mgpu_tutorial.ddp_buckets.wrappers import (
    BucketedDDP,
    NaiveDDP,
    into_buckets,
    send_bucket,
)
from mgpu_tutorial.lab import note, span
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.shared.slow_link import slow_link

LAYER = 64 * 64 * 4 / 2**20  # MiB of the weight of one layer: closes a bucket
Gradients = list[dict[str, torch.Tensor]]  # of each step, by name


def state_of(rank: int, world_size: int, wrapper: type) -> list[tuple[str, float]]:
    """The first number of each parameter and buffer of a rank, once it is wrapped."""
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    for tensor in module.state_dict().values():
        tensor.fill_(rank + 5)
    wrapper(module)
    return [(name, tensor.max().item()) for name, tensor in module.state_dict().items()]


def starts_alike(wrapper: type) -> None:
    """start every rank from rank 0's parameters and buffers."""
    for rank, state in enumerate(launch(state_of, 3, wrapper).results):
        for name, value in state:
            expect(value, 5.0, f"rank 0 has 5 in `{name}`, and rank {rank}")


def odd_tower() -> Tower:
    """A Tower with a layer that is frozen and two that share one weight."""
    tower = Tower()
    tower.body[1].requires_grad_(False)
    tower.body[3].weight = tower.body[2].weight
    return tower


def gradients_of(
    rank: int, world_size: int, wrapper: type | None, new_tower: Callable, **options: float
) -> Gradients:
    """The gradients of three steps on this rank's shares; None is one process, unwrapped."""
    models = train(rank, world_size, wrapper, 3, new_tower, **options)
    next(models)  # at the start
    return [
        {
            name.removeprefix("module."): p.grad.clone()
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        for model in models
    ]


def require_one_process(
    wrapper: type, world_size: int, new_tower: Callable = Tower, **options: float
) -> None:
    """AssertionError, which names the worst gradient, where one is not one process's."""
    found = launch(gradients_of, world_size, wrapper, new_tower, **options).results
    alone = gradients_of(0, 1, None, new_tower)
    for step, expected in enumerate(alone):
        for rank in range(world_size):
            off = {
                name: largest_difference(found[rank][step][name], gradient)
                / gradient.abs().max().item()
                for name, gradient in expected.items()
            }
            name = max(off, key=off.get)
            assert off[name] < 1e-4, (
                f"on {world_size} ranks, step {step}: rank {rank}'s gradient of `{name}` is "
                f"{_beside(found[rank][step][name], expected[name])}"
            )


def _beside(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Says by which factor a gradient is too large, or how far off where there is none."""
    factor = (found * expected).sum().item() / expected.square().sum().item()
    if torch.allclose(found, factor * expected, atol=1e-6):
        return f"{factor:.3g} times that of one process"
    share = largest_difference(found, expected) / expected.abs().max().item()
    return f"off by up to {share:.0%} of one process's largest number"


def equals_one_process(wrapper: type, **options: float) -> None:
    """leave the gradients of one process, on 1, 2 and 3 ranks."""
    for world_size in (1, 2, 3):
        require_one_process(wrapper, world_size, **options)


def takes_odd_layers(wrapper: type) -> None:
    """be right with a frozen layer, and with two layers that share a weight."""
    require_one_process(wrapper, 2, odd_tower)


def leaves_same_bits(wrapper: type) -> None:
    """leave the same bits on every rank."""
    results = launch(gradients_of, 3, wrapper, Tower).results
    for rank, gradients in enumerate(results):
        for mine, first in zip(gradients, results[0], strict=True):
            for name, gradient in mine.items():
                assert torch.equal(gradient, first[name]), (
                    f"rank {rank} has other bits than rank 0 in the gradient of `{name}`"
                )


def trace_step(rank: int, world_size: int, wrapper: type, **options: float) -> None:
    """Two steps over a link that takes 20 ms a call; notes when backward enters layer 0."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = wrapper(layers, **options)

    def tell(layer: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: note("the other layers are ready"))

    layers[0].register_forward_hook(tell)
    with slow_link(lambda nbytes: 0.02):
        for step in range(2):
            model.zero_grad()
            with span(f"step {step}"):
                loss = model(torch.ones(2, 64)).square().mean()
                with span("backward"):
                    loss.backward()
                model.finish_gradient_synchronization()


def require_calls(
    wrapper: type, calls: int, during: int, early: int, **options: float
) -> None:
    """AssertionError unless a step makes its calls at their time, and waits for them.

    `during` of them begin in backward, `early` before it comes to the first layer.
    """
    report = launch(trace_step, 2, wrapper, trace=True, **options)
    found, begun = count_calls(report, "step 1")
    expect(found, calls, "the calls of a step")
    expect(begun, during, "the calls that begin during backward")
    mine = [event for event in report.events if event.rank == 0]
    (whole,) = (e for e in mine if e.note == "step 1")
    end = whole.end
    sent = [e for e in mine if e.op == "all_reduce" and whole.begin < e.begin]
    turn = [e.index for e in mine if e.kind == "note"][-1]
    before = sum(e.index < turn for e in sent)
    expect(before, early, "the calls that begin before layer 0 is ready")
    backward = [e for e in mine if e.note == "backward"][-1]
    waits = [e for e in mine if e.op == "wait" and whole.begin < e.begin < end]
    in_backward = [e for e in sent + waits if backward.begin < e.begin < backward.end]
    # by order, which holds on a busy machine too: a wait, or a call that nobody waits for
    # and that so comes back only when it is over, before the last call begins
    last, waited = max((e.index for e in sent), default=0), {e.of for e in waits}
    blocking = sum(
        e.index < last and (e.op == "wait" or e.index not in waited) for e in in_backward
    )
    assert not during or 2 * blocking < calls, "backward waits until each call is over"
    assert len(waits) <= calls, "finish waits once more for the calls of the step before"
    # a call that was waited for may be noted as done a moment later
    late = [e for e in sent if e.begin < end < (e.done or 0) - 0.03]
    assert not late, f"{len(late)} calls were still on their way when finish returned"


def sends_after_backward(wrapper: type) -> None:
    """make a call per parameter, each of them after backward."""
    require_calls(wrapper, calls=8, during=0, early=0)


def sends_buckets_early(wrapper: type) -> None:
    """make a call per bucket, each when it is complete, and wait for all."""
    require_calls(wrapper, calls=4, during=4, early=3, bucket_cap_mb=LAYER)


def equals_with_buckets(wrapper: type) -> None:
    """leave the gradients of one process, on 1, 2 and 3 ranks."""
    equals_one_process(wrapper, bucket_cap_mb=LAYER)


class Either(nn.Module):
    """Two layers, of which odd ranks use the first defined first, even ranks last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        for factor, layer in enumerate(self.layers, start=2):
            layer.weight.data = factor * torch.eye(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers if dist.get_rank() % 2 else reversed(self.layers)
        return second(first(x))


def use_another_order(rank: int, world_size: int, wrapper: type) -> list[float]:
    """One number of each gradient; by itself 3 in the first layer, 2 in the second."""
    model = wrapper(Either(), bucket_cap_mb=1e-6)
    model(torch.ones(1, 8)).sum().backward()
    model.finish_gradient_synchronization()
    return [layer.weight.grad[0, 0].item() for layer in model.module.layers]


def sends_in_one_order(wrapper: type) -> None:
    """send the buckets in the same order on every rank, whichever is complete first."""
    for rank, found in enumerate(launch(use_another_order, 2, wrapper).results):
        expect(found, [3.0, 2.0], f"ranks use two layers in different orders: rank {rank}")


def expect_buckets(
    function: Callable, sizes: list[int], cap: int, expected: list[list[int]]
) -> None:
    """AssertionError unless parameters of these bytes, in float16, are cut so."""
    parameters = [nn.Parameter(torch.zeros(n // 2, dtype=torch.half)) for n in sizes]
    buckets = function(parameters, cap / 2**20)
    assert buckets is not None, "nothing was returned. Is a `return` missing?"
    found = [[p.nbytes for p in bucket] for bucket in buckets]
    given = f"parameters of {', '.join(map(str, sizes))} bytes, a cap of {cap}/2**20 MiB"
    assert found == expected, f"{given}: the buckets are {found}, expected {expected}"


def begins_with_the_last(function: Callable) -> None:
    """begin with the last parameter, whose gradient is ready first."""
    expect_buckets(function, [10, 20, 30], 1000, [[30, 20, 10]])


def closes_at_the_cap(function: Callable) -> None:
    """close a bucket as soon as it holds the cap in bytes, and no sooner."""
    expect_buckets(function, [40, 60, 40, 58, 2], 100, [[2, 58, 40], [60, 40]])
    expect_buckets(function, [40, 60, 38, 58, 2], 100, [[2, 58, 38, 60], [40]])
    expect_buckets(function, [300, 10, 300], 100, [[300], [10, 300]])


def keeps_the_rest(function: Callable) -> None:
    """keep what is left over, and make no empty bucket."""
    expect_buckets(function, [30, 100], 100, [[100], [30]])
    expect_buckets(function, [100, 100], 100, [[100], [100]])


def send(rank: int, world_size: int, function: Callable) -> tuple | None:
    """The gradients of a bucket of two parameters once the Work is done, and whose memory."""
    weight, bias = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))
    weight.grad = torch.arange(6.0).view(2, 3) + 10 * rank
    bias.grad = torch.arange(6.0, 9.0) + 10 * rank
    work = function([weight, bias])
    note("returned")
    if work is None:
        return None
    work.wait()
    memories = {p.grad.untyped_storage().data_ptr() for p in (weight, bias)}
    return weight.grad, bias.grad, len(memories)


def sends_one_tensor(function: Callable) -> None:
    """send a weight of 6 numbers and a bias of 3 in one call, and return its Work at once."""
    report = launch(send, 2, function, trace=True)
    mine = [event for event in report.events if event.rank == 0]
    sent = [event for event in mine if event.op == "all_reduce"]
    nothing = "nothing was returned. Is a `return` missing, or `async_op=True`?"
    assert report.results[0] is not None, nothing
    expect([event.nbytes for event in sent], [36], "the bytes of each all_reduce")
    ops = [event.note or event.op for event in mine]
    waits = "wait" in ops[: ops.index("returned")]
    assert not waits, (
        "it waits for the mean before it returns, and backward would stand still"
    )


def averages_in_place(function: Callable) -> None:
    """leave the mean over the ranks in each gradient, as a view into the flat tensor."""
    mean = torch.arange(10.0, 19.0)  # of 0, 1, 2, …, of 10, 11, 12, … and of 20, 21, 22, …
    for rank, (weight, bias, memories) in enumerate(launch(send, 3, function).results):
        where = f"rank {rank} of 3: the gradient of the"
        expect(weight, mean[:6].view(2, 3), f"{where} weight", 1e-4)
        expect(bias, mean[6:], f"{where} bias", 1e-4)
        assert memories == 1, f"rank {rank} of 3: the gradients lie in {memories} tensors"


build = Builder(
    "ddp_buckets",
    {
        NaiveDDP: [
            starts_alike,
            equals_one_process,
            leaves_same_bits,
            takes_odd_layers,
            sends_after_backward,
        ],
        into_buckets: [begins_with_the_last, closes_at_the_cap, keeps_the_rest],
        send_bucket: [sends_one_tensor, averages_in_place],
        BucketedDDP: [
            sends_buckets_early,
            equals_with_buckets,
            leaves_same_bits,
            takes_odd_layers,
            sends_in_one_order,
        ],
    },
)
