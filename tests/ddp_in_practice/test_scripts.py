"""The two scripts train what one process trains, and one rank stores it."""

import os
import re
import socket

import pytest
import torch
from torch.nn.functional import nll_loss
from torch.utils.data import DataLoader

from mgpu_tutorial.ddp_in_practice import train_ddp, train_single
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet


def train_by_hand(batches):
    """SmallConvNet after plain SGD over these (images, labels), in one process."""
    torch.manual_seed(0)
    model = SmallConvNet()
    for images, labels in batches:
        loss = nll_loss(model(images), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p -= 0.05 * gradient
    return model.state_dict()


def count_saves(rank, world_size, worker, *args):
    """What `worker` returns on this rank, and how often it calls torch.save."""
    saves, save = [], torch.save
    torch.save = lambda *given, **options: saves.append(given) or save(*given, **options)
    return worker(rank, world_size, *args), len(saves)


def run_script(rank, world_size, folder, port):
    """The script as torchrun starts it: the environment tells who it is."""
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.manual_seed(rank + 7)  # the script has a seed of its own
    os.environ.update(here, LOCAL_WORLD_SIZE=str(world_size), CUDA_VISIBLE_DEVICES="")
    train_ddp.main(folder)


@pytest.mark.slow
def test_the_ranks_train_what_one_process_trains_and_one_stores_it(ranks, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    call = run_script, str(tmp_path), port
    report = ranks(3, count_saves, *call, backend="none", device="cpu")
    assert [saves for _, saves in report.results] == [1, 0, 0]
    for rank, out in enumerate(report.stdout):
        assert re.fullmatch(rf"rank {rank}: PID \d+, cpu: 12 batches an epoch\n", out)

    data, batches = digits(), []
    for epoch in (0, 1):
        generator = torch.Generator().manual_seed(epoch)  # another order in each epoch
        order = torch.randperm(len(data), generator=generator)
        order = torch.cat([order, order[: -len(data) % 3]])  # equal shares
        batches += [(data.images[i], data.labels[i]) for i in order.split(120)]
    # 24 steps in float32: rounding is 1e-5 on one processor, a forgotten set_epoch 2e-3.
    stored = torch.load(tmp_path / "model.pt")
    torch.testing.assert_close(stored, train_by_hand(batches), rtol=0, atol=2e-4)


@pytest.mark.slow
def test_the_script_for_one_process_shuffles_trains_and_stores(tmp_path, capsys, monkeypatch):
    seen = []

    class Seen(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                seen.append(batch)
                yield batch

    monkeypatch.setattr(train_single, "DataLoader", Seen)
    torch.manual_seed(7)  # the script has a seed of its own
    train_single.main(str(tmp_path), epochs=2)
    assert re.match(r"\w+: 12 batches", capsys.readouterr().out)
    stored = torch.load(tmp_path / "model.pt", map_location="cpu")
    torch.testing.assert_close(stored, train_by_hand(seen), rtol=0, atol=2e-4)
    labels = torch.cat([labels for _, labels in seen]).split(len(digits()))
    for each in labels:
        assert torch.equal(each.bincount(), digits().labels.bincount())
        assert not torch.equal(each, digits().labels)
    assert not torch.equal(*labels)
