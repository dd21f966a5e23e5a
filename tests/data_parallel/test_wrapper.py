"""Our DataParallel does what PyTorch's does and what one device does; its limits hold."""

import copy
import os
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.data_parallel import experiments, measurements, wrapper
from mgpu_tutorial.lab import devices, launch, place
from tests.data_parallel import reference


def batch(count=24, side=8):
    """Images that become brighter along the batch, so that pieces have other statistics."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(count, 3, side, side, generator=generator)
    labels = torch.randint(20, (count, side, side), generator=generator)
    return images * torch.linspace(1, 4, count).view(-1, 1, 1, 1), labels


def pixel_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 20, 1))


def refuses(exception, words, call):
    with pytest.raises(exception, match=words):
        call()


# The stages


@pytest.mark.parametrize(
    "samples, count, sizes",
    [
        (30, 1, [30]),
        (30, 2, [15] * 2),
        (30, 3, [10] * 3),
        (256, 4, [64] * 4),
        (10, 8, [2] * 5),
        (10, 4, [3, 3, 3, 1]),
    ],
)
def test_the_sizes_of_the_pieces(samples, count, sizes):
    lines, several = [], devices(count)
    net = nn.Linear(4, 2).to(several[0])
    net.register_forward_hook(
        lambda _, x, y: lines.append((str(y.device), tuple(x[0].shape), tuple(y.shape)))
    )
    output = wrapper.DataParallel(net, several)(torch.randn(samples, 4))
    expected = [
        (str(device), (size, 4), (size, 2))
        for device, size in zip(several, sizes, strict=False)
    ]
    assert sorted(lines) == expected
    assert output.shape == (samples, 2) and output.device == several[0]


NESTED = [
    torch.arange(8.0),
    [torch.arange(10), "text"],
    (torch.ones(6, 2), {"a": torch.zeros(6), "b": [torch.arange(6), None]}, 3),
    {"names": ["x", "y"], "scale": 0.5, "image": torch.ones(4, 3)},
    "text",
    (),
    {},
]


@pytest.mark.parametrize("value", NESTED)
def test_scatter_cuts_as_pytorchs_does(monkeypatch, d, value):
    """PyTorch's own walk through containers; only the cut of one tensor is ours here."""
    from torch.nn.parallel import scatter_gather

    class Cut:
        @staticmethod
        def apply(targets, sizes, dim, tensor):
            pieces = tensor.chunk(len(targets), dim)
            return tuple(place(p, t) for p, t in zip(pieces, targets, strict=False))

    monkeypatch.setattr(scatter_gather, "Scatter", Cut)
    expected = list(scatter_gather.scatter(value, d[:2]))
    same(wrapper.scatter(value, d[:2]), expected)


def same(mine, other):
    assert type(mine) is type(other)
    if isinstance(mine, torch.Tensor):
        assert mine.device == other.device and torch.equal(mine, other)
    elif isinstance(mine, dict):
        assert list(mine) == list(other)
        same(list(mine.values()), list(other.values()))
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(other)
        for a, b in zip(mine, other, strict=True):
            same(a, b)
    else:
        assert mine == other


def test_replicas_are_on_their_devices_and_the_first_shares_memory(d):
    net = experiments.PixelNet(hidden=4).to(d[0])
    replicas = wrapper.replicate(net, d)
    for r, replica in enumerate(replicas):
        tensors = [*replica.parameters(), *replica.buffers()]
        assert {t.device for t in tensors} == {d[r]} and len(tensors) == 9
        shared = replica.conv.weight.data_ptr() == net.conv.weight.data_ptr()
        assert shared == (r == 0) and replica.conv is not net.conv
        assert not replica.conv.weight.is_leaf and replica.training
    assert replicas[0].norm.running_mean is net.norm.running_mean
    assert isinstance(net.conv.weight, nn.Parameter) and net.conv.weight.is_leaf


def test_the_gradients_of_the_replicas_add_up_on_the_module(d):
    net = nn.Linear(4, 2).to(d[0])
    replicas = wrapper.replicate(net, d[:3])
    for replica in replicas:
        replica.weight.retain_grad()
    pieces = wrapper.scatter(torch.randn(30, 4), d[:3])
    outputs = wrapper.parallel_apply(replicas, pieces, d[:3])
    wrapper.gather(outputs, d[0]).square().sum().backward()
    gradients = [replica.weight.grad for replica in replicas]
    assert [g.device for g in gradients] == list(d[:3])
    torch.testing.assert_close(net.weight.grad, sum(g.to(d[0]) for g in gradients))


def test_tied_and_frozen_parameters_stay_so(d):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    net[2].weight.requires_grad_(False)
    net.to(d[0])
    replica = wrapper.replicate(net, d[1:2])[0]
    assert replica[0].weight is replica[1].weight
    assert not replica[2].weight.requires_grad and replica[2].bias is None
    alone = copy.deepcopy(net)
    inputs = torch.randn(8, 4)
    wrapper.DataParallel(net, d)(inputs).sum().backward()
    alone(inputs.to(d[0])).sum().backward()
    torch.testing.assert_close(net[0].weight.grad, alone[0].weight.grad)
    assert net[2].weight.grad is None


def test_each_replica_has_a_thread_and_all_share_a_process(d):
    seen = []

    class WhoAmI(nn.Module):
        def forward(self, x):
            seen.append((os.getpid(), threading.current_thread().name))
            return x

    wrapper.DataParallel(WhoAmI(), d)(torch.zeros(8, 1))
    assert sorted(seen) == [(os.getpid(), str(device)) for device in d]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_threads_record_gradients_where_the_caller_does(d, enabled):
    """Asked inside forward: what leaves the threads is gathered by the caller anyway."""
    recorded = []

    class Asks(nn.Module):
        def forward(self, x):
            y = 2 * x
            recorded.append((torch.is_grad_enabled(), y.requires_grad))
            return y

    x = torch.zeros(8, 4, requires_grad=True)
    with torch.set_grad_enabled(enabled):
        wrapper.DataParallel(Asks(), d)(x)
    assert recorded == [(enabled, enabled)] * 4


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_batch_by_keyword_alone_uses_as_many_devices_as_there_are_pieces(count):
    several, seen = devices(count), []

    class Sees(nn.Module):
        def forward(self, scale=1, *, x):
            seen.append(str(x.device))
            return scale * x

    x = torch.arange(10.0)
    for call in ({"x": x}, {"x": x, "scale": 2}):
        seen.clear()
        y = wrapper.DataParallel(Sees(), several)(**call)
        assert sorted(seen) == [f"virtual:{i}" for i in range({2: 2, 4: 4, 8: 5}[count])]
        assert torch.equal(y.cpu(), call.get("scale", 1) * x)


def test_what_a_thread_raises_is_raised_here(d):
    class Fails(nn.Module):
        def forward(self, x):
            if x.device == d[2]:
                raise KeyError("nothing there")
            return x

    with pytest.raises(KeyError, match="nothing there") as caught:
        wrapper.DataParallel(Fails(), d)(torch.zeros(8, 1))
    assert caught.value.__notes__ == ["in replica 2 on virtual:2"]


def test_scalars_come_back_as_a_vector_and_other_things_do_not(d):
    losses = wrapper.DataParallel(experiments.WithLoss(nn.Linear(4, 2).to(d[0])), d)(
        torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)
    )
    assert losses.shape == (4,) and losses.device == d[0]
    refuses(
        TypeError, "gather joins tensors, got dict", lambda: wrapper.gather([{}, {}], d[0])
    )


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_stage_is_that_of_pytorchs_data_parallel(monkeypatch, count):
    several = devices(count)
    reference.on_virtual_devices(monkeypatch)
    reference.compare_stages(several)


# One device and several


def plain_step(net, images, labels):
    """Loss and gradients of a plain training step, in one process, on the CPU."""
    net = copy.deepcopy(net)
    loss = nn.functional.cross_entropy(net(images), labels)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in net.parameters()]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_step_on_several_devices_is_a_plain_step(d, count):
    images, labels = batch()
    there = pixel_net().to(d[0])
    output = wrapper.DataParallel(there, d[:count])(images)
    loss = cross_entropy(output, labels.to(d[0]))
    loss.backward()
    expected_loss, expected = plain_step(pixel_net(), images, labels)
    torch.testing.assert_close(loss.detach().cpu(), expected_loss)
    for parameter, gradient in zip(there.parameters(), expected, strict=True):
        assert parameter.grad.device == d[0]
        torch.testing.assert_close(parameter.grad.cpu(), gradient)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_eight_steps_train_like_a_plain_loop(count):
    several = devices(count)
    images, labels = batch(25)
    plain = pixel_net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    expected = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(plain(images), labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    net = pixel_net().to(several[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    step = (net, optimizer, images, labels, several)
    losses = [measurements.eight_steps(*step) for _ in range(4)]
    assert losses == pytest.approx(expected, rel=1e-5)
    for parameter, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), other.detach())


def test_the_eight_steps_are_told_in_their_order(d):
    told = []

    def note_step(title, /, gone=(), **new):
        told.append((int(title[0]), list(gone), list(new)))

    net = nn.Linear(4, 3).to(d[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    measurements.eight_steps(
        net, optimizer, torch.ones(8, 4), torch.zeros(8).long(), d, note_step
    )
    assert [step for step, _, _ in told] == [1, 2, 3, 4, 5, 6, 7, 8]
    there = set()
    for _, gone, new in told:
        assert set(gone) <= there
        there = (there - set(gone)) | set(new)
    assert there == {"gradient", "module"}


def test_only_what_has_a_gradient_shows_one():
    net = nn.Linear(4, 2)
    assert wrapper.gradients(net) == []
    (2 * net.weight).sum().backward()
    (gradient,) = wrapper.gradients(net)
    assert torch.equal(gradient, torch.full((2, 4), 2.0))
    there = devices(1)[0]
    replica = wrapper.replicate(net.to(there), [there])[0]
    with warnings.catch_warnings(action="error"):  # PyTorch warns who asks for such a .grad
        assert wrapper.gradients(replica) == []


def test_a_process_for_each_piece_has_the_same_gradient():
    images, labels = batch()
    net = pixel_net()
    results = launch(wrapper.average_piece_gradients, 2, net, images, labels).results
    _, expected = plain_step(net, images, labels)
    for _, gradients in results:
        torch.testing.assert_close(gradients, expected)
    assert len({pid for pid, _ in results} | {os.getpid()}) == 3


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_inside_needs_the_sum_for_an_uneven_batch(d, reduction):
    images, labels = batch(10)
    net = pixel_net()
    with torch.no_grad():
        alone = nn.functional.cross_entropy(net(images), labels)
    net.to(d[0])
    losses = wrapper.DataParallel(experiments.WithLoss(net, reduction), d)(images, labels)
    mine = losses.mean() if reduction == "mean" else losses.sum() / labels.numel()
    assert len(losses) == 4
    assert torch.allclose(mine.cpu(), alone, rtol=1e-5) == (reduction == "sum")


# What is lost, what is chosen, what is refused


def test_attributes_are_lost_and_the_first_devices_buffers_are_not(d):
    for count, calls in ((1, 3), (3, 0)):
        counting = experiments.Counting().to(d[0])
        for _ in range(3):
            wrapper.DataParallel(counting, d[:count])(torch.zeros(6, 1))
        assert (counting.calls, counting.calls_in_buffer.item()) == (calls, 3)


def test_the_first_device_leads_and_the_output_may_go_elsewhere(d):
    net = nn.Linear(4, 2).to(d[3])
    model = wrapper.DataParallel(net, [d[3], d[0], d[1]], output_device="virtual:1")
    output = model(torch.zeros(9, 4))
    output.sum().backward()
    assert output.device == d[1] and net.weight.grad.device == d[3]


def test_names_in_a_checkpoint(d):
    net = nn.Linear(4, 2).to(d[0])
    saved = wrapper.DataParallel(net, d).state_dict()
    assert list(saved) == ["module.weight", "module.bias"]
    nn.modules.utils.consume_prefix_in_state_dict_if_present(saved, "module.")
    plain = nn.Linear(4, 2)
    plain.load_state_dict(saved)
    assert torch.equal(plain.weight, net.weight.cpu())


def test_bad_input_is_refused_in_clear_words(d):
    net = nn.Linear(4, 2).to(d[0])
    model, x = wrapper.DataParallel(net, d), torch.zeros(8, 4)
    refuses(
        ValueError, "virtual:1 more than once", lambda: wrapper.DataParallel(net, [*d, d[1]])
    )
    refuses(
        ValueError, "more than once", lambda: wrapper.DataParallel(net, ["virtual", d[0]])
    )
    refuses(
        ValueError, "list of devices, .* got \\[\\]", lambda: wrapper.DataParallel(net, [])
    )
    refuses(ValueError, "list of devices, .* got 2", lambda: wrapper.DataParallel(net, 2))
    refuses(ValueError, "the batch is empty", lambda: model(x[:0]))
    refuses(ValueError, "batch of 3 cannot fill 4 devices", lambda: model(x[:3]))
    refuses(ValueError, r"different batch sizes: \[7, 8\]", lambda: model(x, x[:7]))
    refuses(ValueError, "scalar tensor has no batch", lambda: model(torch.zeros(())))
    refuses(ValueError, "scalar tensor", lambda: model(x, scale={"a": torch.zeros(())}))
    away = wrapper.DataParallel(nn.Linear(4, 2).to(d[1]), d)
    refuses(RuntimeError, r"virtual:0 \(device_ids\[0\]\) but found", lambda: away(x))
    mixed = nn.Sequential(nn.Linear(4, 4).to(d[0]), nn.BatchNorm1d(4))
    refuses(RuntimeError, "device: cpu", lambda: wrapper.DataParallel(mixed, d)(x))
