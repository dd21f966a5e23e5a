"""Each setup trains what its name says."""

from itertools import count

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks import comparison as benchmark
from mgpu_tutorial.comparison import figures, stored, training
from mgpu_tutorial.shared.data import pictures
from mgpu_tutorial.shared.vision import torchvision

NETWORK, BATCH, SIDE, ITERATIONS = "shufflenet_v2_x0_5", 8, 48, 2
TINY = training.Experiment(NETWORK, BATCH, SIDE, ITERATIONS)
NUMBERS = 352_042  # parameters, with ten classes


def losses_of_one_process(shares, autocast, rounded):
    """The mean loss of each global batch; BatchNorm sees a share at a time, as a device does.

    `rounded`: each share's gradients are added in bfloat16.
    """
    torch.manual_seed(0)
    model = torchvision.models.shufflenet_v2_x0_5(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ITERATIONS + 1)
    losses, data = [], pictures()
    for step in range(ITERATIONS + 1):
        images, labels = data.batch(slice(BATCH * step, BATCH * step + BATCH), SIDE)
        total = [torch.zeros_like(p) for p in model.parameters()]
        losses.append(0.0)
        for share in shares:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = cross_entropy(model(images[share]), labels[share]) / len(shares)
            losses[-1] += loss.item()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for whole, part in zip(total, gradients, strict=True):
                whole += part.bfloat16() if rounded else part
        for parameter, whole in zip(model.parameters(), total, strict=True):
            parameter.grad = whole.bfloat16().float() if rounded else whole
        optimizer.step()
        schedule.step()
    return losses


# Which pictures of a global batch each device takes: DDP's ranks in turns, DataParallel's
# devices one after the other.
SHARES = {
    "one device + autocast": [slice(0, 8)],
    "DataParallel": [slice(0, 4), slice(4, 8)],
    "DDP + compression hook": [slice(0, 8, 2), slice(1, 8, 2)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARES)
def test_all_setups_train_the_network_of_one_process(ranks, name):
    expected = losses_of_one_process(SHARES[name], "autocast" in name, "hook" in name)
    given = pictures(), training.SETUPS[name], TINY
    size = 2 if "DDP" in name else 1
    results = ranks(size, training.train_setup, *given, device="cpu", timeout=100).results
    steps = zip(*(found["losses"] for found in results), strict=True)
    assert [sum(step) / size for step in steps] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_data_parallel_has_parameters_on_all_its_devices_and_the_rest_on_one(ranks):
    given = pictures(), training.SETUPS["DataParallel"], TINY, 3
    (found,) = ranks(1, training.train_setup, *given, device="cpu", timeout=100).results
    assert [device["parameters"] for device in found["memory"]] == [4 * NUMBERS] * 3
    first, *others = found["memory"]
    assert first["gradients"] == first["optimizer state"] == 4 * NUMBERS
    assert not any({"gradients", "optimizer state"} & set(device) for device in others)


def test_gradients_live_in_the_buckets_of_ddp(ranks):
    def is_a_view(rank, world_size):
        layer = torch.nn.Linear(2, 3)
        model = training.wrap(layer, training.SETUPS["DDP"], [])
        model(torch.ones(1, 2)).sum().backward()
        return layer.weight.grad.untyped_storage().nbytes() > layer.weight.grad.nbytes

    assert ranks(2, is_a_view).results == [True, True]


@pytest.mark.slow
def test_a_row_is_run_in_processes_of_its_own():
    setup, experiment = training.SETUPS["DDP"], TINY._replace(iterations=1)
    row = benchmark.measure_row(setup, experiment, gpus=0)
    assert row["processes"] == len(row["memory"]) == 2


@pytest.mark.slow
def test_the_first_iteration_is_not_timed():
    """Call number k of the clock says k squared; an iteration looks at it four times."""
    calls, given = count(), (pictures(), training.SETUPS["one device"], TINY)
    found = training.train_setup(0, 1, *given, clock=lambda: next(calls) ** 2)
    assert found["seconds"] == [[9, 11, 13], [17, 19, 21]]


def test_a_step_is_the_sum_of_its_parts(monkeypatch):
    found = {"seconds": [[1, 2, 3], [4, 5, 6]], "memory": [{"weights": 1, "saved": 2}]}
    monkeypatch.setattr(benchmark, "train_setup", lambda *_: found)
    assert benchmark.measure(0, 1) == {"seconds": [6, 15], "memory": [3]}


def test_the_slowest_rank_of_each_iteration_counts():
    ranks = [{"seconds": [33, 57], "memory": [1]}, {"seconds": [40, 50], "memory": [2]}]
    expected = {"seconds": 20 * (40 + 57) / 2, "memory": [1, 2], "processes": 2}
    assert benchmark.summarise(ranks) == expected


def test_backward_is_drawn_after_forward_with_the_share_of_one_device(monkeypatch):
    monkeypatch.setattr(figures, "Plot", lambda *drawn: drawn)
    measured = {"one device": [1.0, 2.5, 0.5], "half": [0.5, 1.0, 0.5]}
    rows = [{"network": "net", "setup": n, "seconds": s} for n, s in measured.items()]
    figure, _ = figures.parts_picture(rows)
    bars = [(bar.get_x(), bar.get_width()) for bar in figure.axes[0].patches]
    assert bars == [(0, 1.0), (1.0, 2.5), (0, 0.5), (0.5, 1.0)]


def test_a_stored_kind_leaves_the_others(monkeypatch, tmp_path):
    monkeypatch.setattr(stored, "STORED", tmp_path / "stored.json")
    stored.STORED.write_text("{}")
    for kind, seconds in (("cpu", 1), ("parts", [2, 3]), ("cpu", 4)):
        benchmark.save(kind, [{"device": kind}, {"seconds": seconds}])
    assert stored.load_stored("parts") == [{"device": "parts"}, {"seconds": [2, 3]}]
    assert stored.load_stored("cpu") == [{"device": "cpu"}, {"seconds": 4}]


def test_the_table_has_a_row_for_each_way_and_columns_for_each_network():
    rows = [
        {"network": n, "setup": s, "seconds": t, "memory": [2**30] * p, "processes": p}
        for n, s, t, p in (("a", "one", 8.0, 1), ("a", "DDP", 4.0, 2), ("b", "one", 3.0, 1))
    ]
    found = stored.table([*rows, rows[1] | {"network": "b", "seconds": 6.0}])
    assert found.header[:5] == ["20 steps", "processes", "a, s", "speed", "GiB per device"]
    assert found.rows[1] == [
        "DDP",
        2,
        "4.0",
        "2.00",
        "1.00, 1.00",
        "6.0",
        "0.50",
        "1.00, 1.00",
    ]
