"""Our DataParallel does what PyTorch's does and what one device does; its limits hold."""

import copy
import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.data_parallel import experiments, wrapper
from mgpu_tutorial.lab import devices, place
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


class Sees(nn.Module):
    """Notes its thread, device, number of samples and gradient mode; returns 2 x."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        thread = os.getpid(), threading.current_thread().name
        y = 2 * x
        self.seen.append(
            (*thread, x.device, len(x), torch.is_grad_enabled(), y.requires_grad)
        )
        return y


# The stages


@given(samples=st.integers(1, 40), count=st.integers(1, 8))
def test_each_device_gets_a_piece_in_order_and_too_few_samples_are_refused(samples, count):
    module, several = Sees(), devices(count)
    model, x = wrapper.DataParallel(module, several), torch.arange(float(samples))
    if samples < count:
        with pytest.raises(ValueError, match=f"a batch of {samples} cannot fill {count} dev"):
            model(x)
        return
    y = model(x)
    size = -(-samples // count)  # as many in each as it takes, and the rest in the last
    pieces = [len(x[i : i + size]) for i in range(0, samples, size)]
    found = sorted((device.index, length) for _, _, device, length, *_ in module.seen)
    assert found == list(enumerate(pieces))
    assert y.device == several[0] and torch.equal(y.cpu(), 2 * x)


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
@pytest.mark.parametrize("count", [1, 2, 3])
def test_scatter_cuts_as_pytorchs_does(monkeypatch, value, count):
    """PyTorch's own walk through containers; only the cut of one tensor is ours here."""
    from torch.nn.parallel import scatter_gather

    class Cut:
        @staticmethod
        def apply(targets, sizes, dim, tensor):
            pieces = tensor.chunk(len(targets), dim)
            return tuple(place(p, t) for p, t in zip(pieces, targets, strict=False))

    monkeypatch.setattr(scatter_gather, "Scatter", Cut)
    several = devices(count)
    expected = list(scatter_gather.scatter(value, several))
    assert repr(wrapper.scatter(value, several)) == repr(expected)  # devices too


def test_replicas_are_on_their_devices_and_the_first_shares_memory(d):
    net = experiments.PixelNet(hidden=4).to(d[0])
    net.eval()
    replicas = wrapper.replicate(net, d)
    for r, replica in enumerate(replicas):
        tensors = [*replica.parameters(), *replica.buffers()]
        assert {t.device for t in tensors} == {d[r]} and len(tensors) == 9
        shared = replica.conv.weight.data_ptr() == net.conv.weight.data_ptr()
        assert shared == (r == 0) and replica.conv is not net.conv
        assert not replica.conv.weight.is_leaf and not replica.norm.training
    assert replicas[0].norm.running_mean is net.norm.running_mean
    assert isinstance(net.conv.weight, nn.Parameter) and net.conv.weight.is_leaf


def test_tied_and_frozen_parameters_stay_so_and_hooks_are_inherited(d):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    net[2].weight.requires_grad_(False)
    net.to(d[0])
    replica = wrapper.replicate(net, d[1:2])[0]
    assert replica[0].weight is replica[1].weight
    assert not replica[2].weight.requires_grad and replica[2].bias is None
    alone, seen = copy.deepcopy(net), []
    net[1].register_forward_hook(lambda module, x, y: seen.append(y.device))
    inputs = torch.randn(8, 4)
    wrapper.DataParallel(net, d)(inputs).sum().backward()
    alone(inputs.to(d[0])).sum().backward()
    torch.testing.assert_close(net[0].weight.grad, alone[0].weight.grad)
    assert net[2].weight.grad is None and set(seen) == set(d)


@pytest.mark.parametrize("enabled", [True, False])
def test_each_replica_has_a_thread_which_records_gradients_where_the_caller_does(d, enabled):
    module = Sees()
    with torch.set_grad_enabled(enabled):
        wrapper.DataParallel(module, d)(torch.zeros(8, requires_grad=True))
    expected = [(os.getpid(), str(device), device, 2, enabled, enabled) for device in d]
    assert sorted(module.seen, key=str) == expected


def test_all_threads_work_at_the_same_time(d):
    class Meets(nn.Module):
        everybody = threading.Barrier(4)

        def forward(self, x):
            self.everybody.wait(timeout=10)  # raises where the others have not begun
            return x

    assert len(wrapper.DataParallel(Meets(), d)(torch.zeros(8))) == 8


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_batch_by_keyword_alone_uses_as_many_devices_as_there_are_pieces(count):
    several, seen = devices(count), []

    class Scales(nn.Module):
        def forward(self, scale=1, *, x):
            seen.append(str(x.device))
            return scale * x

    x = torch.arange(10.0)
    for call in ({"x": x}, {"x": x, "scale": 2}):
        seen.clear()
        y = wrapper.DataParallel(Scales(), several)(**call)
        assert sorted(seen) == [f"virtual:{i}" for i in range({2: 2, 4: 4, 8: 5}[count])]
        assert torch.equal(y.cpu(), call.get("scale", 1) * x)


@pytest.mark.parametrize("failing, named", [([2], 2), ([0], 0), ([3], 3), ([1, 2, 3], None)])
def test_what_a_thread_raises_is_raised_here(d, failing, named):
    class Fails(nn.Module):
        def forward(self, x):
            if x.device.index in failing:
                raise KeyError("nothing there")
            return x

    with pytest.raises(KeyError, match="nothing there") as caught:
        wrapper.DataParallel(Fails(), d)(torch.zeros(8, 1))
    notes = [f"in replica {r} on virtual:{r}" for r in failing]
    assert len(caught.value.__notes__) == 1 and caught.value.__notes__[0] in notes


def test_scalars_come_back_as_a_vector_and_other_things_do_not(d):
    losses = wrapper.gather([torch.tensor(float(r), device=d[r]) for r in range(4)], d[2])
    assert losses.tolist() == [0, 1, 2, 3] and losses.device == d[2]
    rows = wrapper.gather([torch.full((r + 1, 2), r, device=d[r]) for r in range(3)], d[0])
    assert rows.tolist() == [[0, 0], [1, 1], [1, 1], [2, 2], [2, 2], [2, 2]]
    with pytest.raises(TypeError, match="gather joins tensors, got dict"):
        wrapper.gather([{}, {}], d[0])


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_step_is_that_of_pytorchs_data_parallel(monkeypatch, count):
    several = devices(count)
    reference.on_virtual_devices(monkeypatch)
    reference.compare_steps(several)


# One device and several


@pytest.mark.parametrize("count, samples", [(1, 24), (2, 24), (3, 25), (4, 4), (4, 10)])
def test_a_step_on_several_devices_is_a_plain_step(count, samples):
    several, (images, labels) = devices(count), batch(samples)
    net = pixel_net().to(several[0])
    loss = cross_entropy(wrapper.DataParallel(net, several)(images), labels.to(several[0]))
    loss.backward()

    plain = pixel_net()
    expected = cross_entropy(plain(images), labels)
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected)
    for parameter, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert parameter.grad.device == several[0]
        torch.testing.assert_close(parameter.grad.cpu(), other.grad)


def test_batch_norm_normalises_by_the_piece_and_keeps_the_first_ones_statistics(d):
    torch.manual_seed(0)
    net, (images, _) = experiments.PixelNet(hidden=4), batch()
    alone = [copy.deepcopy(net) for _ in d]
    output = wrapper.DataParallel(net.to(d[0]), d)(images)
    pieces = [plain(piece) for plain, piece in zip(alone, images.chunk(4), strict=True)]
    torch.testing.assert_close(output.cpu(), torch.cat(pieces))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        found, expected = getattr(net.norm, name).cpu(), getattr(alone[0].norm, name)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_inside_needs_the_sum_for_an_uneven_batch(d, reduction):
    images, labels = batch(10)
    net = pixel_net()
    with torch.no_grad():
        alone = cross_entropy(net(images), labels)
    net.to(d[0])
    losses = wrapper.DataParallel(experiments.WithLoss(net, reduction), d)(images, labels)
    loss = losses.mean() if reduction == "mean" else losses.sum() / labels.numel()
    assert losses.shape == (4,) and losses.device == d[0]
    assert torch.allclose(loss.cpu(), alone, rtol=1e-5) == (reduction == "sum")


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


@pytest.mark.parametrize(
    "device_ids, words",
    [
        (["virtual:0", "virtual:1", "virtual:1"], "names virtual:1 more than once"),
        (["virtual", "virtual:0"], "names virtual:0 more than once"),
        ([], r"list of devices, .* got \[\]"),
        (2, "list of devices, .* got 2"),
        ("virtual:0", "list of devices, .* got 'virtual:0'"),
    ],
)
def test_devices_that_cannot_work_are_refused(device_ids, words):
    with pytest.raises(ValueError, match=words):
        wrapper.DataParallel(nn.Linear(4, 2), device_ids)


@pytest.mark.parametrize(
    "inputs, words",
    [
        ([torch.zeros(0, 4)], "the batch is empty"),
        ([torch.zeros(3, 4)], "batch of 3 cannot fill 4 devices"),
        ([torch.zeros(8, 4), {"more": [torch.zeros(7, 4)]}], r"batch sizes: \[7, 8\]"),
        ([torch.zeros(())], "scalar tensor has no batch"),
        ([torch.zeros(8, 4), {"a": (torch.zeros(()),)}], "scalar tensor"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(d, inputs, words):
    with pytest.raises(ValueError, match=words):
        wrapper.DataParallel(nn.Linear(4, 2).to(d[0]), d)(*inputs)


def test_a_module_that_is_not_on_the_first_device_is_refused(d):
    x = torch.zeros(8, 4)
    with pytest.raises(RuntimeError, match=r"virtual:0 \(device_ids\[0\]\) but found"):
        wrapper.DataParallel(nn.Linear(4, 2).to(d[1]), d)(x)
    only_a_buffer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(d[0])
    only_a_buffer[1].running_mean = torch.zeros(4)
    with pytest.raises(RuntimeError, match="device: cpu"):
        wrapper.DataParallel(only_a_buffer, d)(x)
