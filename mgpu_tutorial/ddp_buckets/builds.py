"""What the reader's wrappers must do, on real ranks."""

from collections.abc import Callable

import torch
from torch import nn

from mgpu_tutorial.ddp_buckets import experiments, wrappers
from mgpu_tutorial.lab import note
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.lab.teach.groups import expect_in_groups
from mgpu_tutorial.shared.slow_link import slow_link

LAYER = 64 * 64 * 4 / 2**20  # MiB of the weight of one layer: closes a bucket


def _state_of(rank: int, world_size: int, wrapper: type) -> dict[str, float]:
    """The largest number of each parameter and buffer of a rank, once it is wrapped."""
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module.register_buffer("not_in_state_dict", torch.zeros(2), persistent=False)
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    for tensor in tensors.values():
        tensor.detach().fill_(rank + 5)
    wrapper(module)
    return {name: tensor.max().item() for name, tensor in tensors.items()}


def starts_alike(wrapper: type) -> None:
    """start every rank from rank 0's parameters and buffers."""
    for rank, state in enumerate(launch(_state_of, 3, wrapper).results):
        for name, value in state.items():
            expect(value, 5.0, f"rank 0 has 5 in `{name}`, and rank {rank}")


def _gradients_of(
    rank: int, world_size: int, wrapper: type | None, **options: float
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """This rank's gradients in three steps on its shares, and what they were by themselves.

    Without a wrapper it is one process.

    A layer of the Tower is frozen, and two share one weight.
    """
    torch.manual_seed(rank)
    tower, gradients = experiments.Tower(), {}
    tower.body[1].requires_grad_(False)
    tower.body[3].weight = tower.body[2].weight
    model = wrapper(tower, **options) if wrapper else tower
    trained = {name: p for name, p in tower.named_parameters() if p.requires_grad}
    for step, batch in enumerate(experiments.shares(rank, world_size, 3, width=64)):
        model.zero_grad()
        loss = tower(batch).square().mean()  # beside the wrapper: this rank's own
        own = dict(
            zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True)
        )
        model(batch).square().mean().backward()
        experiments.finish_gradient_synchronization(model)
        for name, p in tower.named_parameters():
            nothing = (
                f"`{name}.grad` is None after finish. all_reduce changes the tensor that it "
            )
            assert p.grad is not None or not p.requires_grad, (
                f"{nothing}gets, returns nothing"
            )
            if p.requires_grad:
                gradients[f"step {step}, gradient of `{name}`"] = p.grad.clone(), own[name]
    return gradients


def equals_one_process(wrapper: type, **options: float) -> None:
    """leave the gradients of one process on 1, 2 and 3 ranks, the same bits on each, also
    with a frozen layer and two layers that share a weight.
    """
    alone = _gradients_of(0, 1, None)
    for world_size in (1, 2, 3):
        results = launch(_gradients_of, world_size, wrapper, **options).results
        for name, (expected, _) in alone.items():
            for rank, gradients in enumerate(results):
                where, length = f"rank {rank} of {world_size}, {name}", expected.norm()
                found, own = gradients[name]
                off = largest_difference(found, expected) / length
                is_own = world_size > 1 and largest_difference(found, own) < length / 1e5
                still = f"{where}: still rank {rank}'s own. Nothing was averaged"
                assert off < 1e-5 or not is_own, still
                times = (found * expected).sum() / length**2
                is_multiple = largest_difference(found, expected * times) < length / 1e3
                but = f"{times:.3g} times as long" if is_multiple else "in another direction"
                assert off < 1e-5, f"{where}: not that of one process, but {but}"
                alike = torch.equal(found, results[0][name][0])
                assert alike, f"{where}: other bits than on rank 0"


def _train_a_line(rank: int, wrapper: Callable) -> list[float]:
    """The weight of rank r begins at r, its gradient at 10 r: both after the wrapper."""
    line = nn.Linear(1, 1, bias=False)
    nn.init.constant_(line.weight, rank)
    model = wrapper(line)
    model(torch.full((1, 1), 10.0 * rank)).sum().backward()
    model.finish_gradient_synchronization()
    return [line.weight.item(), line.weight.grad.item()]


def works_in_groups(wrapper: type) -> None:
    """do in two groups of two ranks what it does in two worlds of two."""
    what = "weight and gradient"
    expect_in_groups(wrapper, _train_a_line, what, even=[0.0, 10.0], odd=[1.0, 20.0])


def _send_ranks(rank: int, function: Callable) -> list[float]:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.full((1,), 10.0 * rank)
    function([parameter]).wait()
    return parameter.grad.tolist()


def sends_to_the_group(function: Callable) -> None:
    """average over the ranks of its group only."""
    what = "the mean of ten times the rank"
    expect_in_groups(function, _send_ranks, what, even=[10.0], odd=[20.0])


def _trace_step(rank: int, world_size: int, wrapper: type, **options: float) -> None:
    """Two steps over a link that takes 20 ms a call."""
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = wrapper(layers, **options)
    layers[0].register_full_backward_pre_hook(lambda *_: note("backward is at layer 0"))
    with slow_link(lambda nbytes: 0.02):
        for _ in range(2):
            model.zero_grad()
            loss = model(torch.ones(2, 64)).square().mean()
            note("begin")
            loss.backward()
            note("backward is over")
            model.finish_gradient_synchronization()
            note("end")


def _expect_calls(wrapper: type, calls: int, during: int, early: int, **options) -> None:
    """A step makes `calls`, `during` of them in backward, `early` before its last layer.

    All is told by the order of the events, which holds on a busy machine too.
    """
    report = launch(_trace_step, 2, wrapper, trace=True, **options)
    mine = [event for event in report.events if event.rank == 0]
    places = {event.note: event.index for event in mine}  # of the second step
    mine = [event for event in mine if event.index >= places["begin"]]
    sent = [event for event in mine if event.op == "all_reduce"]
    begun = [e for e in sent if e.index < places["backward is over"]]
    expect(len(sent), calls, "the calls of the second step")
    expect(len(begun), during, "the calls that begin during backward")
    before = sum(e.index < places["backward is at layer 0"] for e in sent)
    expect(before, early, "the calls that begin before layer 0 is ready")
    for event in mine:
        waits = event.op == "wait" or (event in begun and event.done is None)
        assert not (begun and waits and event.index < begun[-1].index), (
            "backward waits until a call is over before it makes the next"
        )
    # a call that was waited for may be noted as done a moment later
    late = [e for e in sent if (e.done or 0) > mine[-1].begin + 0.03]
    assert not late, f"{len(late)} calls were still on their way when finish returned"


def sends_after_backward(wrapper: type) -> None:
    """make a call per parameter, each of them after backward."""
    _expect_calls(wrapper, calls=8, during=0, early=0)


def sends_buckets_early(wrapper: type) -> None:
    """make a call per bucket, each when it is complete, and wait for all."""
    _expect_calls(wrapper, calls=4, during=4, early=3, bucket_cap_mb=LAYER)


def equals_with_buckets(wrapper: type) -> None:
    """leave the gradients of one process, as NaiveDDP does."""
    equals_one_process(wrapper, bucket_cap_mb=LAYER)


class _Heads(nn.Module):
    """Two layers, the second of which a forward uses on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.first(x) + (self.second(x) if both else 0)


def _what_it_says(rank: int, world_size: int, wrapper: type, *uses: bool, **options) -> str:
    """Backward after each forward, which uses both heads or one, then finish: the error."""
    torch.manual_seed(0)
    model = wrapper(_Heads(), **options)
    note("begin")
    try:
        for both in uses:
            model(torch.ones(1, 4), both).sum().backward()
        model.finish_gradient_synchronization()
    except (RuntimeError, ValueError, AssertionError) as error:
        return str(error) or "an error without a word"
    return ""


def _expect_refused(wrapper: type, what: str, *uses: bool, calls: int, **options) -> None:
    report = launch(_what_it_says, 2, wrapper, *uses, trace=True, **options)
    for rank, said in enumerate(report.results):
        assert said, f"{what}, and rank {rank} said nothing"
        assert said != "an error without a word", f"{what}: the error says nothing"
    mine = [event for event in report.events if event.rank == 0]
    begin = next(event.index for event in mine if event.note == "begin")
    sent = sum(event.op == "all_reduce" and event.index > begin for event in mine)
    assert sent <= calls, f"{what}, and {sent} calls were made before the error"


def refuses_no_gradient(wrapper: type) -> None:
    """raise an error before any call when a trained parameter has no gradient."""
    _expect_refused(wrapper, "no rank used the second of two layers", False, calls=0)


def refuses_a_missing_bucket(wrapper: type) -> None:
    """raise an error in finish when a bucket never left, because a parameter got no
    gradient.
    """
    what = "no rank used the second of two layers, whose bucket never left"
    _expect_refused(wrapper, what, False, calls=0)
    what = "no rank used the second of two layers, whose buckets never left"
    _expect_refused(wrapper, what, False, calls=0, bucket_cap_mb=0)


def refuses_a_second_backward(wrapper: type) -> None:
    """raise an error in a second backward before finish."""
    what = "a second backward began before finish"
    _expect_refused(wrapper, what, True, True, calls=1)


def _use_another_order(rank: int, world_size: int, wrapper: type) -> list[float]:
    """One number of the gradients of two layers, which odd ranks use in the other order.

    By itself a rank would have 3 in the first layer, 2 in the second.
    """
    layers = [nn.Linear(8, 8, bias=False) for _ in range(2)]
    for factor, layer in enumerate(layers, start=2):
        layer.weight.data = factor * torch.eye(8)
    module, (first, second) = nn.Sequential(*layers), layers if rank % 2 else layers[::-1]
    module.forward = lambda x: second(first(x))
    model = wrapper(module, bucket_cap_mb=1e-6)
    model(torch.ones(1, 8)).sum().backward()
    model.finish_gradient_synchronization()
    return [layer.weight.grad[0, 0].item() for layer in layers]


def sends_in_one_order(wrapper: type) -> None:
    """send the buckets in the same order on every rank, whichever is complete first."""
    for rank, found in enumerate(launch(_use_another_order, 2, wrapper).results):
        expect(found, [3.0, 2.0], f"ranks use two layers in different orders: rank {rank}")


BYTES = {  # of parameters in float16, and of the buckets that a cap of 100 bytes makes
    (10, 20, 30): [[30, 20, 10]],
    (40, 60, 40, 58, 2): [[2, 58, 40], [60, 40]],
    (40, 60, 38, 58, 2): [[2, 58, 38, 60], [40]],
    (300, 10, 300): [[300], [10, 300]],
}


def closes_at_the_cap(function: Callable) -> None:
    """begin with the last parameter, close a bucket as soon as it holds the cap in bytes,
    keep what is left, and leave the list that it was given as it was.
    """
    for sizes, expected in BYTES.items():
        parameters = [nn.Parameter(torch.zeros(n // 2, dtype=torch.half)) for n in sizes]
        given_list = list(parameters)
        buckets = function(given_list, 100 / 2**20)
        assert buckets is not None, "nothing was returned. Is a `return` missing?"
        found = [[p.nbytes for p in bucket] for bucket in buckets]
        given = f"parameters of {', '.join(map(str, sizes))} bytes, a cap of 100/2**20 MiB"
        assert found == expected, f"{given}: the buckets are {found}, expected {expected}"
        kept = list(map(id, given_list)) == list(map(id, parameters))
        assert kept, "the list of parameters that it was given is another one afterwards"


def _send(rank: int, world_size: int, function: Callable) -> tuple | None:
    """The gradients of a bucket of two parameters once the Work is done, and whose memory."""
    weight, bias = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))
    weight.grad = torch.arange(6.0).view(2, 3) + 10 * rank
    bias.grad = torch.arange(6.0, 9.0) + 10 * rank
    work = function([weight, bias])
    note("returned")
    if work is not None:
        work.wait()
        memories = {p.grad.untyped_storage().data_ptr() for p in (weight, bias)}
        return weight.grad, bias.grad, len(memories)


def sends_one_tensor(function: Callable) -> None:
    """send a weight of 6 numbers and a bias of 3 in one call, and return its Work at once."""
    report = launch(_send, 2, function, trace=True)
    mine = [event for event in report.events if event.rank == 0]
    nothing = "nothing was returned. Is a `return` missing, or `async_op=True`?"
    assert report.results[0] is not None, nothing
    sent = [event.nbytes for event in mine if event.op == "all_reduce"]
    expect(sent, [36], "the bytes of each all_reduce")
    ops = [event.note or event.op for event in mine]
    assert "wait" not in ops[: ops.index("returned")], (
        "it waits for the mean before it returns, and backward would stand still"
    )


def averages_in_place(function: Callable) -> None:
    """leave the mean over the ranks in each gradient, as a view into the flat tensor."""
    mean = torch.arange(10.0, 19.0)  # of 0, 1, 2, …, of 10, 11, 12, … and of 20, 21, 22, …
    for rank, (weight, bias, memories) in enumerate(launch(_send, 3, function).results):
        where = f"rank {rank} of 3: the gradient of the"
        tensors = f"rank {rank} of 3: the gradients lie in {memories} tensors"
        assert memories == 1, f"{tensors}; each must be a view into the one that is sent"
        expect(weight, mean[:6].view(2, 3), f"{where} weight", 1e-4)
        expect(bias, mean[6:], f"{where} bias", 1e-4)


build = Builder(
    "ddp_buckets",
    {
        wrappers.NaiveDDP: [
            starts_alike,
            equals_one_process,
            sends_after_backward,
            works_in_groups,
            refuses_no_gradient,
        ],
        wrappers.into_buckets: [closes_at_the_cap],
        wrappers.send_bucket: [sends_one_tensor, averages_in_place, sends_to_the_group],
        wrappers.BucketedDDP: [
            sends_buckets_early,
            equals_with_buckets,
            sends_in_one_order,
            works_in_groups,
            refuses_a_missing_bucket,
            refuses_a_second_backward,
        ],
    },
)
