"""What cannot be shared is refused; BatchNorm is right far from zero, and in half."""

import pytest
import torch
from torch import nn

from mgpu_tutorial.data_parallel import wrapper


def test_what_pytorch_joins_and_ours_does_not_is_a_type_error(d):
    with pytest.raises((TypeError, AttributeError), match="tuple"):
        wrapper.DataParallel(Returns(), d)(torch.ones(4, 2))


class Returns(nn.Module):
    def forward(self, rows):
        return rows, rows


def test_a_batch_norm_is_one_message_forward_and_one_backward(ranks):
    report = ranks(2, normalise, trace=True)
    assert [event.op for event in report.events if event.rank == 0] == ["all_reduce"] * 2


def normalise(rank, world_size):
    images = torch.ones(1, 2, 3, 3, requires_grad=True)
    wrapper.sync_batch_norm(images).sum().backward()


def far(rank, world_size, dtype, samples):
    generator = torch.Generator().manual_seed(0)
    images = (100 + torch.randn(samples, 2, 4, 4, generator=generator)).to(dtype)
    share = images.tensor_split(world_size)[rank].to(memory_format=torch.channels_last)
    return wrapper.sync_batch_norm(share)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("world_size, samples", [(1, 3), (2, 3), (2, 1)])
def test_far_from_zero_it_is_that_of_one_process(ranks, world_size, samples, dtype):
    generator = torch.Generator().manual_seed(0)
    images = (100 + torch.randn(samples, 2, 4, 4, generator=generator)).to(dtype)
    expected = nn.BatchNorm2d(2, affine=False).double()(images.double())
    found = torch.cat(ranks(world_size, far, dtype, samples).results)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("enabled, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_threads_compute_under_the_autocast_of_the_caller(enabled, dtype):
    model, rows = nn.Linear(3, 2), torch.ones(2, 3)
    with torch.autocast("cpu", torch.bfloat16, enabled):
        expected = model(rows)
        found = wrapper.parallel_apply([model, model], [(rows,), (rows,)])
    assert expected.dtype == dtype
    assert all(torch.equal(output, expected) for output in found)
