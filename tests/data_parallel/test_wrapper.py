"""Our DataParallel does what one device does; test_gpu.py compares it with PyTorch's."""

import threading

import pytest
import torch
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


@pytest.mark.parametrize("grad", [True, False])
def test_replicas_work_at_once_in_threads_that_record_gradients_as_the_caller_does(d, grad):
    seen, together = {}, threading.Barrier(4, timeout=20)  # passes when all four have come

    class Waits(nn.Module):
        def forward(self, x):
            together.wait()
            seen[threading.get_ident()] = torch.is_grad_enabled()
            together.wait()
            return x

    with torch.set_grad_enabled(grad):
        wrapper.DataParallel(Waits(), d)(torch.zeros(8, requires_grad=True))
    assert list(seen.values()) == [grad] * 4 and threading.get_ident() not in seen


@pytest.mark.parametrize("count, samples", [(1, 24), (2, 24), (3, 25), (4, 5), (4, 10)])
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
