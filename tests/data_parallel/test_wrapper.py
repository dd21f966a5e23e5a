"""Our DataParallel does what one device does; test_gpu.py compares it with PyTorch's."""

import copy
import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.data_parallel import wrapper
from mgpu_tutorial.lab import devices


def batch(count=24, side=8):
    """Images that become brighter along the batch, so that pieces have other statistics."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(count, 3, side, side, generator=generator)
    labels = torch.randint(20, (count, side, side), generator=generator)
    return images * torch.linspace(1, 4, count).view(-1, 1, 1, 1), labels


def pixel_net(norm=False):
    torch.manual_seed(0)
    middle = nn.BatchNorm2d(4) if norm else nn.ReLU()
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), middle, nn.Conv2d(4, 20, 1))


def doubles(seen):
    """A module that returns 2 x, and notes process, thread, device, samples and mode."""

    class Doubles(nn.Module):
        def forward(self, x):
            where = os.getpid(), threading.get_ident(), x.device
            seen.append((*where, len(x), torch.is_grad_enabled()))
            return 2 * x

    return Doubles()


# The stages


@given(samples=st.integers(1, 40), count=st.integers(1, 8))
def test_each_device_gets_a_piece_in_order_and_as_many_as_chunk_says(samples, count):
    seen, several = [], devices(count)
    x = torch.arange(float(samples))
    y = wrapper.DataParallel(doubles(seen), several)(x)
    size = -(-samples // count)  # as many in each as it takes, and the rest in the last
    pieces = [len(x[i : i + size]) for i in range(0, samples, size)]
    if len(pieces) > 1:
        found = sorted((device.index, length) for _, _, device, length, _ in seen)
        assert found == list(enumerate(pieces))
        assert y.device == several[0]
    assert torch.equal(y.cpu(), 2 * x)


def test_replicas_are_on_their_devices_and_the_first_shares_memory(d):
    net = pixel_net(norm=True).to(d[0]).eval()
    replicas = wrapper.replicate(net, d)
    for r, replica in enumerate(replicas):
        tensors = [*replica.parameters(), *replica.buffers()]
        assert {t.device for t in tensors} == {d[r]} and len(tensors) == 9
        for name in ("0.weight", "1.running_mean"):
            found, original = (m.state_dict(keep_vars=True)[name] for m in (replica, net))
            assert (found.data_ptr() == original.data_ptr()) == (r == 0)
        assert not replica[0].weight.is_leaf and not replica[1].training
    assert isinstance(net[0].weight, nn.Parameter) and net[0].weight.is_leaf


def test_tied_and_frozen_parameters_stay_so_and_hooks_are_inherited(d):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    net[2].weight.requires_grad_(False)
    net.to(d[0])
    (replica,) = wrapper.replicate(net, d[1:2])
    assert replica[0].weight is replica[1].weight
    assert not replica[2].weight.requires_grad and replica[2].bias is None
    alone, seen = copy.deepcopy(net), []
    net[1].register_forward_hook(lambda module, x, y: seen.append(y.device))
    inputs = torch.randn(8, 4)
    wrapper.DataParallel(net, d)(inputs).sum().backward()
    alone(inputs.to(d[0])).sum().backward()
    torch.testing.assert_close(net[0].weight.grad, alone[0].weight.grad)
    assert net[2].weight.grad is None and set(seen) == set(d)


@pytest.mark.parametrize("grad", [True, False])
def test_threads_of_one_process_record_gradients_where_the_caller_does(d, grad):
    seen = []
    with torch.set_grad_enabled(grad):
        wrapper.DataParallel(doubles(seen), d)(torch.zeros(8, requires_grad=True))
    assert {(process, mode) for process, _, _, _, mode in seen} == {(os.getpid(), grad)}
    assert threading.get_ident() not in {thread for _, thread, *_ in seen}


def test_the_replicas_work_at_the_same_time(d):
    together = threading.Barrier(4, timeout=20)  # passes when all four have come

    class Waits(nn.Module):
        def forward(self, x):
            together.wait()
            return x

    assert len(wrapper.DataParallel(Waits(), d)(torch.zeros(8))) == 8


@pytest.mark.parametrize("failing", [0, 3])
def test_what_a_thread_raises_is_raised_here(d, failing):
    class Fails(nn.Module):
        def forward(self, x):
            if x.device.index == failing:
                raise KeyError("nothing there")
            return x

    with pytest.raises(KeyError, match="nothing there"):
        wrapper.DataParallel(Fails(), d)(torch.zeros(8, 1))


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
    net, (images, _) = pixel_net(norm=True), batch()
    alone = [copy.deepcopy(net) for _ in d]
    output = wrapper.DataParallel(net.to(d[0]), d)(images)
    pieces = [plain(piece) for plain, piece in zip(alone, images.chunk(4), strict=True)]
    torch.testing.assert_close(output.cpu(), torch.cat(pieces))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        found, expected = getattr(net[1], name).cpu(), getattr(alone[0][1], name)
        torch.testing.assert_close(found, expected)
