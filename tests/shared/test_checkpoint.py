"""A checkpoint is replaced whole, or not at all."""

import torch
from torch import nn

from mgpu_tutorial.lab import launch
from mgpu_tutorial.shared import checkpoint


def crash_while_saving(rank, world_size, path):
    """Save ones; save twos, but the disk is full after half of it; load what is there."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.init.ones_(model.weight)
    checkpoint.save(path, model, optimizer, epoch=1)
    nn.init.constant_(model.weight, 2.0)
    whole_save = torch.save

    def half_save(state, file):
        whole_save(state, file)
        file.truncate(100)
        raise OSError("no space left on device")

    torch.save = half_save
    try:
        checkpoint.save(path, model, optimizer, epoch=2)
    except OSError as error:
        said = str(error)
    torch.save = whole_save  # a broadcast of objects uses it too
    also = checkpoint.load(path, model, optimizer)
    return said, also, model.weight.tolist()


def test_a_crash_while_saving_leaves_the_old_file(tmp_path):
    results = launch(crash_while_saving, 1, str(tmp_path / "run.pt")).results
    assert results == [("no space left on device", {"epoch": 1}, [[1.0, 1.0, 1.0]])]
