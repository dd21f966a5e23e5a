"""Each setup trains what its name says; the slowest rank counts; the result is read."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import comparison as benchmark
from mgpu_tutorial.comparison import estimates, measurements, results, training
from mgpu_tutorial.ddp_buckets.measurements import payload
from mgpu_tutorial.lab import launch, span
from mgpu_tutorial.shared.data import pictures
from mgpu_tutorial.shared.vision import torchvision

NETWORK, BATCH, SIDE, ITERATIONS = "shufflenet_v2_x0_5", 8, 48, 2
TINY = training.Experiment(NETWORK, BATCH, SIDE, ITERATIONS)
NUMBERS = 352_042  # parameters, with ten classes

# Which pictures of a global batch each device takes: DDP's ranks in turns, DataParallel's
# devices one after the other.
SHARES = {
    "one device": [slice(0, 8)],
    "one device + autocast": [slice(0, 8)],
    "DataParallel": [slice(0, 4), slice(4, 8)],
    "DDP": [slice(0, 8, 2), slice(1, 8, 2)],
    "DDP + autocast": [slice(0, 8, 2), slice(1, 8, 2)],
    "DDP + compression hook": [slice(0, 8, 2), slice(1, 8, 2)],
}


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


@pytest.fixture(scope="module")
def measured():
    """By setup: what each rank found, and the bytes that rank 0 handed to collectives."""

    everything = {}
    for ranks in (1, 2):
        names = [n for n, s in training.SETUPS.items() if (s.wrapper == "DDP") + 1 == ranks]
        report = launch(
            training.train_each, ranks, names, TINY, device="cpu", timeout=100, trace=True
        )
        for name in names:
            ranks_found = [result[name] for result in report.results]
            everything[name] = ranks_found, payload(report, name)
    return everything


@pytest.mark.parametrize("name", SHARES)
def test_all_setups_train_the_network_of_one_process(measured, name):
    rounded = "hook" in name
    expected = losses_of_one_process(SHARES[name], "autocast" in name, rounded)
    ranks = [rank.losses for rank in measured[name][0]]
    mean = [sum(step) / len(ranks) for step in zip(*ranks, strict=True)]
    assert mean == pytest.approx(expected, abs=1e-4)


def test_a_hook_that_is_registered_hands_over_half_the_bytes(measured):
    """DDP's own averages are C++ and not traced; those of a hook are."""
    for name, (_, handed) in measured.items():
        expected = 2 * NUMBERS * (ITERATIONS + 1) if name == "DDP + compression hook" else 0
        assert handed == expected, name


@pytest.mark.parametrize("name", SHARES)
def test_every_device_is_counted(measured, name):
    ranks, _ = measured[name]
    memory = [device for rank in ranks for device in rank.memory]
    assert len(memory) == len(SHARES[name])
    assert {device["parameters"] for device in memory} == {4 * NUMBERS}
    for device in memory if name != "DataParallel" else memory[:1]:
        assert device["gradients"] == device["optimizer state"] == 4 * NUMBERS
    if name == "DataParallel":
        assert not {"gradients", "optimizer state"} & set(memory[1])
    assert all(len(rank.seconds) == ITERATIONS for rank in ranks)


def test_autocast_keeps_less_for_backward(measured):
    kept = {n: ranks[0].memory[0]["activations"] for n, (ranks, _) in measured.items()}
    for name in ("one device", "DDP"):
        assert kept[f"{name} + autocast"] < kept[name]


def test_the_slowest_rank_counts_and_its_median():
    def rank(seconds, pid):
        return training.Measured(seconds, [], [{"parameters": pid}], [], pid)

    row = results.summarise([rank([1.0, 6.0, 2.0], 8), rank([3.0, 1.0, 4.0], 9)])
    assert row["seconds"] == 20 * 4.0  # the slowest take 3, 6 and 4 seconds
    assert row["processes"] == 2 and row["memory"] == [{"parameters": 8}, {"parameters": 9}]


def test_a_row_is_run_in_processes_of_its_own():
    setup, experiment = training.SETUPS["DDP"], TINY._replace(iterations=1)
    row = benchmark.measure_row(setup, experiment, gpus=0, timeout=100)
    assert row["devices"] == row["processes"] == len(row["memory"]) == 2


def test_the_parts_of_a_step_are_processor_seconds_of_every_way():
    experiment = TINY._replace(iterations=1)
    parts = benchmark.measure_parts([experiment], turns=1)["rows"][NETWORK]
    assert len(parts) == 5 and all(len(row) == 3 for row in parts.values())
    assert all(seconds > 0 for row in parts.values() for seconds in row)


def time_both(rank, world_size):
    setup = training.SETUPS["DDP + compression hook"]  # what a hook sends is traced
    for average in (True, False):
        with span(f"average {average}"):
            measurements.time_parts(rank, world_size, setup, TINY, average)


def test_ranks_that_do_not_average_send_nothing():
    report = launch(time_both, 2, device="cpu", trace=True)
    assert payload(report, "average True") == 2 * NUMBERS * (ITERATIONS + 1)
    assert payload(report, "average False") == 0


def test_rows_for_several_gpus_are_not_guessed_on_one():
    for name, setup in training.SETUPS.items():
        if setup.wrapper:
            assert benchmark.measure_row(setup, TINY, gpus=1) == "not measured", name


# What is counted without computing it


def test_a_step_is_counted_as_the_formulas_say():
    """AlexNet's convolutions and linear layers, written out; a ReLU counts nothing."""
    experiment = training.Experiment("alexnet", batch=2, side=64, iterations=1)
    found = estimates.count_step(experiment)
    # (numbers out, products for each): five convolutions, then three linear layers
    layers = [(64 * 15 * 15, 3 * 11 * 11), (192 * 7 * 7, 64 * 5 * 5)]
    layers += [(384 * 3 * 3, 192 * 9), (256 * 3 * 3, 384 * 9), (256 * 3 * 3, 256 * 9)]
    layers += [(4096, 256 * 6 * 6), (4096, 4096), (10, 4096)]
    forward = 2 * 2 * sum(out * each for out, each in layers)
    first = 2 * 2 * layers[0][0] * layers[0][1]  # no gradient of the images
    assert found.operations == 3 * forward - first
    network = torchvision.models.alexnet(num_classes=10)
    assert found.parameters == sum(p.numel() for p in network.parameters())


def test_operations_are_those_of_pytorchs_counter_where_no_layer_is_depthwise():
    network, images = torchvision.models.resnet18(num_classes=10), torch.randn(2, 3, 64, 64)
    with FlopCounterMode(display=False) as counter:
        network(images).sum().backward()
    assert estimates.count_operations(network, images) == counter.get_total_flops()
    assert not any(module._forward_hooks for module in network.modules())


def test_a_depthwise_convolution_is_counted_once_forward_and_twice_backward():
    """Each of its numbers out is a sum over the nine weights of one channel."""
    first = torch.nn.Conv2d(3, 8, kernel_size=1)
    depthwise = torch.nn.Conv2d(8, 8, kernel_size=3, groups=8)
    network, images = torch.nn.Sequential(first, depthwise), torch.randn(2, 3, 5, 5)
    expected = 2 * (2 * 3 * 8 * 5 * 5) + 3 * (2 * 9 * 8 * 3 * 3)  # of one picture
    assert estimates.count_operations(network, images) == 2 * expected


def test_what_is_kept_is_what_a_real_step_keeps(measured):
    """The ledger counts the storages of a run; images and labels come with them."""
    (found,), _ = measured["one device"]
    kept = estimates.count_step(TINY).kept
    assert kept == pytest.approx(found.memory[0]["activations"], rel=0.02)


@pytest.mark.parametrize(("ranks", "share"), [(1, 0), (2, 1), (4, 1.5)])
def test_a_ring_sends_nearly_everything_twice(ranks, share):
    assert estimates.ring_seconds(100.0, ranks, 50.0) == pytest.approx(2 * share)


# The stored result


def a_result(device="a card"):
    first = {"seconds": 2.0, "memory": [{"parameters": 4}], "peaks": [], "processes": 1}
    second = {"seconds": 4.0, "memory": [{"parameters": 2048}] * 2, "peaks": []}
    second["processes"] = 1
    rows = {"one device": first, "DataParallel": second, "DDP": "not measured"}
    return {"device": device, "rows": {"net": rows}}


def test_the_table_has_a_row_per_setup():
    rows = results.table(a_result(), "net").rows
    assert rows[0] == ["one device", "2.0", "1.00", "4 B", 1]
    assert rows[1] == ["DataParallel", "4.0", "0.50", "2 KiB, 2 KiB", 1]
    assert rows[2] == ["DDP", *["not measured"] * 4]


def test_the_parts_are_added_up():
    table = results.parts_table({"rows": {"net": {"one device": [0.25, 0.5, 0.125]}}}, "net")
    assert table.rows == [["one device", "0.250", "0.500", "0.125", "0.875"]]


def test_the_chart_says_its_numbers_and_the_caveat_of_a_cpu():
    text = repr(results.chart(a_result()))
    assert "one device: 2.0\n" in text and "DDP: not measured\n" in text
    assert "DataParallel: 4.0\n" in text and "DataParallel: 20.4\n" in text
    text = repr(results.chart(a_result("CPU, one core per device")))
    assert "DataParallel: 4.0 (backward: one thread on a CPU)\n" in text
    assert "DataParallel: 20.4\n" in text  # not the field report's


def test_the_chart_is_a_png_with_a_bar_per_number():
    data, _ = results.chart(a_result())._repr_mimebundle_()
    assert set(data) == {"image/png", "text/plain"}
    assert data["text/plain"].splitlines()[0].startswith("Seconds of 20 iterations")


def test_the_stored_comparison_is_whole_and_names_no_process():
    result = results.load_stored("cpu")
    assert set(result["rows"]) == {"resnet101", "mobilenet_v2"}
    for rows in result["rows"].values():
        assert list(rows) == list(training.SETUPS)
    assert "pid" not in json.dumps(result) and set(result["versions"]) >= {"torch"}
    assert results.load_stored("abacus") is None


def test_a_missing_comparison_says_how_to_make_it(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "STORED", tmp_path / "comparison.json")
    with pytest.raises(FileNotFoundError, match="comparison.py --save"):
        results.load_stored()


def test_what_is_saved_is_loaded_and_the_other_kind_stays(monkeypatch, tmp_path):
    for module in (results, benchmark):
        monkeypatch.setattr(module, "STORED", tmp_path / "comparison.json")
    benchmark.save(a_result("CPU"), "cpu")
    benchmark.save(a_result("a card"), "cuda")
    assert results.load_stored("cpu") == a_result("CPU")
    assert results.load_stored("cuda") == a_result("a card")
