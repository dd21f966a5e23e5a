"""The two scripts train what one process trains, and one rank stores it."""

import os

import pytest
import torch
from torch.distributed import run
from torch.nn.functional import nll_loss
from torch.utils.data import DataLoader, TensorDataset

from mgpu_tutorial.ddp_in_practice import train_ddp, train_single
from mgpu_tutorial.processes_and_ranks.meeting import free_port
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet


def assert_trained(file, batches):
    """The file has SmallConvNet after plain SGD over these (images, labels)."""
    torch.manual_seed(0)
    model = SmallConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for images, labels in batches:
        optimizer.zero_grad()
        nll_loss(model(images), labels).backward()
        optimizer.step()
    # 24 steps in float32: rounding is 1e-5 on one processor, a forgotten set_epoch 2e-3
    stored = torch.load(file, map_location="cpu")
    torch.testing.assert_close(stored, model.state_dict(), rtol=0, atol=2e-4)


def run_script(rank, world_size, folder, port):
    """The script as three torchruns of one rank start it; returns how often it saves."""
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.environ.update(here | node)
    torch.manual_seed(rank + 7)  # the script has a seed of its own
    saves, save = [], torch.save
    torch.save = lambda *given, **how: saves.append(given) or save(*given, **how)
    train_ddp.main(folder)
    return len(saves)


@pytest.mark.slow
def test_the_ranks_train_what_one_process_trains_and_one_stores_it(ranks, tmp_path):
    call = run_script, str(tmp_path), free_port()
    assert ranks(3, *call, backend="none", device="cpu").results == [1, 0, 0]
    data, batches = digits(), []
    for epoch in (0, 1):
        generator = torch.Generator().manual_seed(epoch)  # another order in each epoch
        order = torch.randperm(len(data), generator=generator)
        order = torch.cat([order, order[: -len(data) % 3]])  # equal shares
        batches += [(data.images[i], data.labels[i]) for i in order.split(120)]
    assert_trained(tmp_path / "model.pt", batches)


@pytest.mark.slow
def test_the_script_for_one_process_shuffles_trains_and_stores(tmp_path):
    torch.manual_seed(7)  # the script has a seed of its own
    train_single.main(str(tmp_path))
    torch.manual_seed(0)
    SmallConvNet()  # its weights are drawn before the order
    data = TensorDataset(digits().images, digits().labels)
    loader = DataLoader(data, 120, shuffle=True)
    assert_trained(tmp_path / "model.pt", [batch for _ in range(2) for batch in loader])


@pytest.mark.parametrize("options", [[], ["--standalone"]])
def test_torchrun_on_one_machine_takes_a_free_port(monkeypatch, options):
    """If this is red, torchrun has changed; the notebook and docs/machines.md tell of it."""
    started = []

    def start(config, entrypoint):
        started.append(config)
        return lambda *arguments: None

    monkeypatch.setattr(run, "elastic_launch", start)
    words = ["--nproc-per-node", "2", "--local-addr", "127.0.0.1", "script.py"]
    run.run(run.parse_args([*options, *words]))
    (config,) = started
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "localhost:0")
    assert config.local_addr == "127.0.0.1"
