"""What cannot be shared is refused; BatchNorm is right far from zero, and in half."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.data_parallel import wrapper


def test_inputs_of_other_lengths_are_refused(d):
    model = wrapper.DataParallel(nn.Bilinear(2, 2, 1).to(d[0]), d)
    for inputs in ((torch.ones(10, 2), torch.ones(8, 2)), ()):
        rows = [len(each) for each in inputs]
        with pytest.raises(ValueError) as refused:
            model(*inputs)
        assert str(refused.value) == f"all inputs must have equally many rows, got {rows}"


@pytest.mark.parametrize("other", [0.5, (torch.ones(4, 2),), None, torch.tensor(1.0), "x"])
def test_an_input_that_is_no_tensor_of_rows_is_refused(d, other):
    kind = type(other).__name__
    for inputs in ((torch.ones(4, 2), other), (other,)):
        with pytest.raises(TypeError, match=f"an input of type {kind} can't be cut"):
            wrapper.DataParallel(nn.Bilinear(2, 2, 1).to(d[0]), d)(*inputs)


class Returns(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, rows):
        return {"dict": {"rows": rows}, "tuple": (rows, rows), "float": 0.5}[self.kind]


@pytest.mark.parametrize("kind", ["dict", "tuple", "float"])
def test_an_output_that_is_no_tensor_is_refused(d, kind):
    with pytest.raises(TypeError, match=f"of type {kind} can't be joined .*: let the module"):
        wrapper.DataParallel(Returns(kind), d)(torch.ones(4, 2))


@pytest.mark.parametrize("named", [[], ["cpu", "cpu"]])
def test_a_device_has_one_replica(named):
    """Two on one would share the running statistics of a BatchNorm and move them twice."""
    with pytest.raises(ValueError, match="name one device or more, and each once: got"):
        wrapper.DataParallel(nn.BatchNorm1d(2), [torch.device(name) for name in named])


@pytest.mark.parametrize("replicas, inputs", [(2, 3), (3, 2), (0, 0)])
def test_each_replica_has_an_input(replicas, inputs):
    pieces = [(torch.ones(1),)] * inputs
    with pytest.raises(ValueError, match=f"{replicas} replicas for {inputs} inputs"):
        wrapper.parallel_apply([nn.Identity()] * replicas, pieces)


def normalise(rank, world_size, shape, dtype):
    return wrapper.sync_batch_norm(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize(
    "shape, dtype",
    [((3, 4), torch.float32), ((2, 5, 5), torch.float32), ((1, 2, 3, 3), torch.int64)],
)
def test_what_are_no_images_is_refused_before_anything_is_sent(refused, shape, dtype):
    refused(2, f"(N, C, H, W), got {shape}, {dtype}", normalise, shape, dtype)


def normalise_with(rank, world_size, eps):
    return wrapper.sync_batch_norm(torch.ones(1, 2, 3, 3), eps=eps)


@pytest.mark.parametrize("eps", [-1.0, float("nan")])
def test_a_variance_below_zero_is_refused(refused, eps):
    refused(2, f"eps={eps} is added to a variance: give 0 or more", normalise_with, eps)


def normalise_outside(rank, world_size):
    other = [dist.new_group([r]) for r in range(2)][1 - rank]
    return wrapper.sync_batch_norm(torch.ones(1, 2, 3, 3), group=other)


def test_a_rank_that_is_not_in_the_group_is_told(refused):
    refused(2, "this rank is not in the group", normalise_outside, sent=True)


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
