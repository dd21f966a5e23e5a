"""What can't be sharded, adapted, loaded or saved is refused on every rank."""

import pytest
import torch
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


def accumulate(rank, world_size, parts):
    units.accumulate_gradients(
        sharded_model(), torch.zeros(5, 8, dtype=int).chunk(parts)[:parts]
    )


def accumulate_lengths(rank, world_size):
    parts = (torch.zeros(2, tokens, dtype=int) for tokens in (8, 3))
    units.accumulate_gradients(sharded_model(), parts)


def accumulate_nothing(rank, world_size):
    units.accumulate_gradients(sharded_model(), [])


def accumulate_one_tensor(rank, world_size):
    units.accumulate_gradients(sharded_model(), torch.zeros(4, 2, 8, dtype=torch.long))


def shard_on_too_few(rank, world_size):
    units.shard_on_a_mesh(units.new_model(), 1, 1)


def adapt_by(rank, world_size, number):
    units.adapt(units.new_model(), number)


def adapt_late(rank, world_size):
    units.adapt(sharded_model())


def adapt_twice(rank, world_size):
    units.adapt(model := units.new_model())
    units.adapt(model)


def read(rank, world_size, path):
    files.read_weights(files.empty_model(units.new_model), path)


def read_whole(rank, world_size, path):
    files.read_weights(units.new_model(), path)


def read_on_meta(rank, world_size, path):
    with torch.device("meta"):
        model = sharded_model()
    files.read_weights(model, path)


def with_an_early_optimizer(rank, world_size, use, path):
    model = units.new_model()
    optimizer = Adam(model.parameters())
    units.shard_blocks(model)
    use(model, optimizer, path)


def resume_from_nothing(rank, world_size, path):
    model = sharded_model()
    files.resume(model, Adam(model.parameters()), path)


REFUSED = {
    "unequal micro-batches": ("unequal ones have another mean", accumulate, 2),
    "shorter sequences": ("unequal ones have another mean", accumulate_lengths),
    "a tensor of micro-batches": ("micro-batches are one tensor", accumulate_one_tensor),
    "no micro-batch": ("unequal ones have another mean", accumulate_nothing),
    "a mesh of too few": ("1 × 1 does not hold 2 ranks", shard_on_too_few),
    "adapters of rank 0": ("an adapter of rank 0", adapt_by, 0),
    "adapters of rank -1": ("an adapter of rank -1", adapt_by, -1),
    "adapters of rank 2.5": ("an adapter of rank 2.5", adapt_by, 2.5),
    "adapters after sharding": ("adapt first, then shard", adapt_late),
    "adapters twice": ("has its adapters already", adapt_twice),
}


@pytest.mark.parametrize("case", REFUSED)
def test_every_rank_refuses_it(refused, case):
    refused(
        2, *REFUSED[case], sent=True
    )  # sharding itself broadcasts nothing, but makes groups


def test_unequal_parts_of_the_batch_are_refused(refused):
    refused(5, ValueError("24", "5"), share_24_sequences)


SHORT = {"integers": torch.int64, "bfloat16": torch.bfloat16, "float64": torch.float64}


def change(weights, how):
    if how == "less":
        del weights["norm.bias"]
    if how == "more":
        weights["norm.scale"] = weights["norm.bias"]
    if how == "other shape":  # which `copy_` would spread over all rows
        weights["position.weight"] = weights["position.weight"][:1]
    if how == "untied":
        weights["head.weight"] = weights["head.weight"] + 1
    if how in SHORT:
        weights["norm.bias"] = weights["norm.bias"].to(SHORT[how])
    if how == "checkpoint":
        return {"model": weights, "optimizer": {}}
    return weights


@pytest.fixture
def file_of(tmp_path):
    def write(how="right"):
        path = str(tmp_path / f"{how}.pt")
        torch.save(change(new_model(torch.float32).state_dict(), how), path)
        return path

    return write


@pytest.mark.parametrize(
    "how, words",
    [
        ("less", "has no `norm.bias`"),
        ("more", "the model has no `norm.scale`"),
        ("other shape", "`position.weight` is (1, 32)"),
        ("integers", "`norm.bias` is torch.int64 in"),
        ("bfloat16", "`norm.bias` is torch.bfloat16 in"),
        ("float64", "`norm.bias` is torch.float64 in"),
        ("untied", "`token.weight` and `head.weight` are one tensor in the model"),
        ("checkpoint", "it holds model, optimizer"),
    ],
)
def test_a_file_of_another_model_is_refused(refused, file_of, how, words):
    refused(2, words, read, file_of(how))


@pytest.mark.parametrize("worker", [read_whole, read_on_meta])
def test_a_model_that_is_not_ready_is_refused(refused, file_of, worker):
    refused(2, "is not sharded, or without memory", worker, file_of())


@pytest.mark.parametrize("use", [files.save, files.resume, files.write_whole])
def test_an_optimizer_made_too_early_is_refused(refused, use, tmp_path):
    words = "the optimizer steps tensors that are not in the model"
    refused(2, words, with_an_early_optimizer, use, str(tmp_path / "early"))


def test_a_folder_without_a_checkpoint_is_refused(refused, tmp_path):
    refused(2, "holds no checkpoint", resume_from_nothing, str(tmp_path / "none"))


# What is right


@pytest.mark.parametrize("world_size", [2])
def test_a_mapped_file_needs_no_whole_copy(ranks, file_of, world_size):
    _, _, mapped = ranks(world_size, figures.peaks, file_of()).results[0]
    assert mapped < 0.75 * figures.MODEL  # half a model is this rank's


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
