"""Virtual devices compute what the CPU computes, keep their labels and refuse to mix."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mgpu_tutorial.lab.devices import devices, place


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("MGPU_DEVICE", "cpu")


@pytest.fixture
def pair():
    return devices(2)


def test_gpus_are_taken_where_there_are_enough(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(d) for d in devices(2)] == ["virtual:0", "virtual:1"]
    monkeypatch.delenv("MGPU_DEVICE")
    assert [str(d) for d in devices(2)] == ["cuda:0", "cuda:1"]
    assert [str(d) for d in devices(3)] == ["virtual:0", "virtual:1", "virtual:2"]


def test_moving_copies_and_new_tensors_are_made_there(pair):
    plain = torch.arange(6.0).view(2, 3)
    there = plain.to(pair[0])
    other = there.to(pair[1])
    assert there.device == pair[0] and other.device == pair[1] and other.get_device() == 1
    assert type(other.cpu()) is torch.Tensor and torch.equal(other.cpu(), plain)
    assert len({t.untyped_storage().data_ptr() for t in (plain, there, other)}) == 3
    assert there.to(pair[0]) is there and place(there, pair[0]) is there
    assert there.to(pair[0], copy=True) is not there
    made = [
        torch.randn(2, device=pair[1]),
        torch.tensor([1, 2], device=pair[1]),
        torch.zeros_like(other).to(torch.float16),
        there.to(torch.ones(1, device=pair[1])),
    ]
    assert [t.device for t in made] == [pair[1]] * len(made)
    assert repr(made[1]) == "tensor([1, 2], device='virtual:1')"
    assert made[1].tolist() == [1, 2]


def test_a_copy_that_would_lose_the_gradient_is_refused(pair):
    with pytest.raises(RuntimeError, match=r"write place\(tensor, 'virtual:0'\)"):
        torch.ones(3, requires_grad=True).to(pair[0])


MIXED = [
    (lambda a, b: a + b, "got other is on virtual:1, different from other tensors on virt"),
    (lambda a, b: a + b.cpu(), "got other is on cpu, different from other tensors on vir"),
    (lambda a, b: a @ b, "got mat2 is on virtual:1, different from other tensors on virt"),
    (lambda a, b: torch.cat([a, b]), r"got tensors is on virtual:1, .* wrapper_virtual_cat"),
    (lambda a, b: a[b.long()], "got indices is on virtual:1"),
]


@pytest.mark.parametrize("operation, words", MIXED)
def test_two_devices_do_not_mix(pair, operation, words):
    a, b = (torch.ones(2, 2, device=device) for device in pair)
    start = "Expected all tensors to be on the same device, but "
    with pytest.raises(RuntimeError, match=start + words):
        operation(a, b)


def test_what_a_gpu_allows_is_allowed(pair):
    a, b = (torch.ones(2, 2, device=device) for device in pair)
    assert (a + torch.tensor(1.0)).device == pair[0]
    assert a[torch.tensor([0])].device == pair[0]
    assert a.copy_(b * 2).device == pair[0] and a.sum().item() == 8.0
    assert type(torch.zeros(2, 2).copy_(a)) is torch.Tensor
    with pytest.raises(TypeError, match="can't convert virtual:0 tensor"):
        a.numpy()


OPERATIONS = [
    lambda x: x[1:, ::2] * 2 + x[:3, torch.tensor([0, 2, 4])],
    lambda x: torch.cat([x, x.relu()]).softmax(dim=1).max(dim=1).values,
    lambda x: torch.where(x > 0, x, x.exp()).double().type_as(x).clamp(-1, 1),
    lambda x: F.scaled_dot_product_attention(*F.layer_norm(x, (6,)).expand(3, 1, 4, 6)),
    lambda x: F.cross_entropy(F.dropout(x, 0.5), x.argmax(dim=1), reduction="none"),
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_and_their_gradients_are_those_of_the_cpu(pair, operation):
    start = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    results = []
    for device in ("cpu", pair[1]):
        torch.manual_seed(3)
        x = place(start, device).clone().requires_grad_()
        y = operation(x)
        y.square().sum().backward()
        assert y.device == x.grad.device == torch.device(device)
        results.append((y.cpu(), x.grad.cpu()))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_deep_copy_stays_and_a_checkpoint_is_read_on_the_cpu(pair):
    net, file = nn.BatchNorm1d(4).to(pair[1]), io.BytesIO()
    other = copy.deepcopy(net)
    assert other.bias.device == pair[1] and isinstance(other.weight, nn.Parameter)
    assert other.weight.data_ptr() != net.weight.data_ptr()
    torch.save(net.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert all(type(value) is torch.Tensor for value in state.values())
    nn.BatchNorm1d(4).to(pair[0]).load_state_dict(state)
