"""What is refused on every rank, what is sent and no more, and what is odd but right."""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Adam

from mgpu_tutorial.fully_shard import figures, files, units
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.sharding.zero import recompute
from tests.fully_shard.reference import new_model


def sharded_model():
    model = units.new_model()
    units.shard_blocks(model)
    return model


def share_24_sequences(rank, world_size):
    units.share_of_batch(rank, world_size)


def read(rank, world_size, path):
    files.read_weights(files.empty_model(units.new_model), path)


def with_an_early_optimizer(rank, world_size, use, path):
    model = units.new_model()
    optimizer = Adam(model.parameters())
    units.shard_blocks(model)
    use(model, optimizer, path)


def test_unequal_parts_of_the_batch_are_refused(refused):
    refused(5, ValueError("24", "5"), share_24_sequences)


def change(weights, how):
    if how == "less":
        del weights["norm.bias"]
    if how == "more":
        weights["norm.scale"] = weights["norm.bias"]
    if how == "other shape":  # which `copy_` would spread over all rows
        weights["position.weight"] = weights["position.weight"][:1]
    if how == "bfloat16":
        return {name: tensor.bfloat16() for name, tensor in weights.items()}
    return weights


@pytest.fixture
def file_of(tmp_path):
    def write(how="right"):
        path = str(tmp_path / f"{how}.pt")
        torch.save(change(new_model(torch.float32).state_dict(), how), path)
        return path

    return write


@pytest.mark.parametrize(
    "how, names",
    [
        ("less", ["norm.bias", "None", "[32]"]),
        ("more", ["norm.scale", "[32]", "None"]),
        ("other shape", ["position.weight", "[1, 32]", "[64, 32]"]),
    ],
)
def test_a_file_of_another_model_is_refused(refused, file_of, how, names):
    refused(2, ValueError(*names), read, file_of(how))


@pytest.mark.parametrize("use", [files.save, files.resume])
def test_an_optimizer_made_too_early_is_refused(refused, use, tmp_path):
    asked = ValueError("optimizer")
    refused(2, asked, with_an_early_optimizer, use, str(tmp_path / "early"))


# What is sent, and no more


def count_calls(rank, world_size, path):
    with CommDebugMode() as calls:  # sees what DTensors call, too
        read(rank, world_size, path)
    return calls.get_total_counts()


def test_a_mapped_file_sends_nothing(ranks, file_of):
    assert ranks(2, count_calls, file_of()).results == [0, 0]


# What is right


@pytest.mark.parametrize("world_size", [2])
def test_a_mapped_file_needs_no_whole_copy(ranks, file_of, world_size):
    _, _, mapped = ranks(world_size, figures.peaks, file_of()).results[0]
    assert mapped < 0.75 * figures.MODEL  # half a model is this rank's


def read_one(rank, world_size, path):
    model = files.empty_model(units.new_model)
    files.read_weights(model, path)
    return model.norm.weight.full_tensor()


def test_a_file_of_another_dtype_gives_the_models(ranks, file_of):
    for weight in ranks(2, read_one, file_of("bfloat16")).results:
        assert weight.dtype == torch.float32 and weight.tolist() == [1] * 32


class WithBuffers(units.SmallTransformer):
    """A table that is in no file, one that is saved, and a number of steps."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(vocabulary=64, width=32, heads=4, depth=3)
        self.register_buffer("rotations", torch.arange(4.0), persistent=False)
        self.register_buffer("means", torch.arange(4.0))
        self.register_buffer("steps", torch.tensor(7))


def read_buffers(rank, world_size, path):
    model = files.empty_model(WithBuffers)
    empty = [torch.isnan(p.to_local()).all().item() for p in model.parameters()]
    files.read_weights(model, path)
    return all(empty), model.rotations, model.means, model.steps


def test_what_is_not_filled_is_nan_and_saved_buffers_are_read(ranks, tmp_path):
    path = str(tmp_path / "buffers.pt")
    torch.save(WithBuffers().state_dict(), path)
    for empty, rotations, means, steps in ranks(2, read_buffers, path).results:
        assert empty and rotations.isnan().all()
        assert means.tolist() == [0, 1, 2, 3] and steps == 7


def two_forwards(rank, world_size, how):
    """The gradients of two batches, gone through before one backward or one by one."""
    model = units.new_model(torch.float64)
    if how == "recomputed":
        for block in model.blocks:
            recompute(block)
    units.shard_blocks(model)
    losses = (units.loss_of(model, units.share_of_batch(rank, world_size, i)) for i in (0, 1))
    if how == "one by one":
        for loss in losses:
            loss.backward()
    else:
        sum(losses).backward()
    return [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("how", ["as it is", "recomputed", "one by one"])
def test_two_forwards_before_a_backward_are_right(ranks, how):
    model = new_model()
    losses = (units.loss_of(model, units.share_of_batch(0, 1, i)) for i in (0, 1))
    sum(losses).backward()
    expected = [p.grad for p in model.parameters()]
    assert largest_difference(ranks(2, two_forwards, how).results, [expected] * 2) < 1e-12
