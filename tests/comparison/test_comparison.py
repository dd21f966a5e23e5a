"""Each setup trains what its name says; the slowest rank counts; the result is read."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import comparison as benchmark
from mgpu_tutorial.comparison import estimates, figures, training
from mgpu_tutorial.lab import span
from mgpu_tutorial.lab.record.intervals import payload
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


def train_all(ranks, name):
    """All setups that run on as many ranks as this one, in one launch."""
    size = len(SHARES[name]) if "DDP" in name else 1
    names = [n for n in SHARES if ("DDP" in n) == (size == 2)]
    how = {"device": "cpu", "timeout": 100, "trace": True}
    return ranks(size, training.train_each, names, TINY, **how)


@pytest.mark.parametrize("name", SHARES)
def test_all_setups_train_the_network_of_one_process(ranks, name):
    expected = losses_of_one_process(SHARES[name], "autocast" in name, "hook" in name)
    losses = [result[name].losses for result in train_all(ranks, name).results]
    mean = [sum(step) / len(losses) for step in zip(*losses, strict=True)]
    assert mean == pytest.approx(expected, abs=1e-4)
    assert list(SHARES) == list(training.SETUPS)


@pytest.mark.parametrize("name", SHARES)
def test_a_hook_that_is_registered_hands_over_half_the_bytes(ranks, name):
    """DDP's own averages are C++ and not traced; those of a hook are."""
    expected = 2 * NUMBERS * (ITERATIONS + 1) if "hook" in name else 0
    assert payload(train_all(ranks, name), name) == expected


@pytest.mark.parametrize("name", SHARES)
def test_every_device_is_counted(ranks, name):
    results = [result[name] for result in train_all(ranks, name).results]
    memory = [device for result in results for device in result.memory]
    assert len(memory) == len(SHARES[name])
    assert {device["parameters"] for device in memory} == {4 * NUMBERS}
    for device in memory if name != "DataParallel" else memory[:1]:
        assert device["gradients"] == device["optimizer state"] == 4 * NUMBERS
    if name == "DataParallel":
        assert not {"gradients", "optimizer state"} & set(memory[1])
    assert all(len(result.seconds) == ITERATIONS for result in results)
    assert all(0 < seconds < 100 for result in results for seconds in result.seconds)
    assert len({result.pid for result in results}) == len(results)
    assert [result.peaks for result in results] == [[]] * len(results)  # no GPU


@pytest.mark.parametrize("name", ["one device", "DDP"])
def test_autocast_keeps_less_for_backward(ranks, name):
    results = train_all(ranks, name).results[0]
    kept = [results[n].memory[0]["activations"] for n in (name, f"{name} + autocast")]
    assert kept[1] < 0.9 * kept[0]


def clocked_steps(rank, world_size):
    """The clock is asked twice an iteration and says 0, 1, 4, 9, …; twice that on rank 1."""
    ticks = iter(range(100))
    training.now = lambda: next(ticks) ** 2 * (1.0 + rank)
    return training.train_setup(rank, world_size, training.SETUPS["DDP"], TINY).seconds


def test_the_first_iteration_does_not_count_and_the_clock_is_asked_around_each(ranks):
    assert ranks(2, clocked_steps, device="cpu").results == [[5.0, 9.0], [10.0, 18.0]]


def test_the_slowest_rank_counts_and_its_median():
    def rank(seconds, pid):
        return training.SetupResult(seconds, [], [{"parameters": pid}], [pid], pid)

    row = figures.summarise([rank([1.0, 6.0, 2.0], 8), rank([3.0, 1.0, 4.0], 9)])
    assert row["seconds"] == 20 * 4.0  # the slowest take 3, 6 and 4 seconds
    assert row["memory"] == [{"parameters": 8}, {"parameters": 9}]
    assert (row["processes"], row["peaks"]) == (2, [8, 9])
    assert figures.summarise([rank([1.0], 8), rank([1.0], 8)])["processes"] == 1


@pytest.mark.slow
def test_a_row_is_run_in_processes_of_its_own():
    setup, experiment = training.SETUPS["DDP"], TINY._replace(iterations=1)
    row = benchmark.measure_row(setup, experiment, gpus=0, timeout=100)
    assert row["devices"] == row["processes"] == len(row["memory"]) == 2


def test_rows_for_several_gpus_are_not_guessed_on_one():
    for name, setup in training.SETUPS.items():
        if setup.wrapper:
            assert benchmark.measure_row(setup, TINY, gpus=1) == "not measured", name


# The parts of a step


def test_the_parts_of_a_step_are_those_of_the_slowest_rank_and_the_least_of_all_turns(
    monkeypatch,
):
    calls = []

    def launch(worker, ranks, setup, experiment, average=True, **_):
        calls.append((worker, ranks, setup.wrapper, experiment.batch, average))
        return SimpleNamespace(results=[[0, 0], [len(calls), 20 - len(calls)]])

    monkeypatch.setattr(benchmark, "launch", launch)
    rows = benchmark.measure_parts([TINY], turns=2)["rows"][NETWORK]
    assert list(rows.values()) == [[1, 14], [2, 13], [3, 12], [4, 11], [5, 10]]
    assert (
        calls[:5]
        == calls[5:]
        == [
            (figures.time_parts, 1, "", BATCH, True),
            (figures.time_parts, 1, "", BATCH // 2, True),
            (figures.time_parts, 1, "DataParallel", BATCH, True),
            (figures.time_parts, 2, "DDP", BATCH, True),
            (figures.time_parts, 2, "DDP", BATCH, False),
        ]
    )


def time_both(rank, world_size):
    """What the network was called with; a hook's messages are traced."""
    shapes = []

    def new_network(*arguments):
        module, *others = training.new_network(*arguments)
        module.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
        return module, *others

    figures.new_network = new_network
    setup = training.SETUPS["DDP + compression hook"]
    for average in (True, False):
        with span(f"average {average}"):
            figures.time_parts(rank, world_size, setup, TINY, average)
    return {tuple(shape) for shape in shapes}


def test_each_rank_computes_its_share_and_sends_it_or_not(ranks):
    report = ranks(2, time_both, device="cpu", trace=True)
    assert report.results == [{(BATCH // 2, 3, SIDE, SIDE)}] * 2
    assert payload(report, "average True") == 2 * NUMBERS * (ITERATIONS + 1)
    assert payload(report, "average False") == 0


def clocked_parts(rank, world_size):
    """Processor seconds by a clock that stands still in the first step, then jumps."""
    ticks = iter([50, 50, 50, 50, 0, 1, 3, 7, 20, 22, 23, 30])
    figures.process_time = lambda: next(ticks)
    return figures.time_parts(rank, world_size, training.Setup(), TINY)


def test_the_least_of_each_part_counts_and_the_first_step_does_not(ranks):
    assert ranks(1, clocked_parts, device="cpu").results == [figures.Parts(1, 1, 4)]


# What is counted without computing it


def test_a_step_is_counted_as_the_formulas_say():
    """AlexNet's convolutions and linear layers, written out; a ReLU counts nothing."""
    experiment = training.Experiment("alexnet", batch=2, side=64, iterations=1)
    step = estimates.count_step(experiment)
    # (numbers out, products for each): five convolutions, then three linear layers
    layers = [(64 * 15 * 15, 3 * 11 * 11), (192 * 7 * 7, 64 * 5 * 5)]
    layers += [(384 * 3 * 3, 192 * 9), (256 * 3 * 3, 384 * 9), (256 * 3 * 3, 256 * 9)]
    layers += [(4096, 256 * 6 * 6), (4096, 4096), (10, 4096)]
    forward = 2 * 2 * sum(out * each for out, each in layers)
    first = 2 * 2 * layers[0][0] * layers[0][1]  # no gradient of the images
    assert step.operations == 3 * forward - first
    network = torchvision.models.alexnet(num_classes=10)
    assert step.parameters == sum(p.numel() for p in network.parameters())


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


def test_what_is_saved_is_what_a_real_step_saves(ranks):
    measured = train_all(ranks, "one device").results[0]["one device"].memory[0]
    assert estimates.count_step(TINY).saved == pytest.approx(
        measured["activations"], rel=0.01
    )


# The stored result


def a_result(device="a card"):
    first = {"seconds": 2.0, "memory": [{"parameters": 4}], "peaks": [], "processes": 1}
    second = {"seconds": 4.0, "memory": [{"parameters": 2048}] * 2, "peaks": []}
    second["processes"] = 1
    gpu = {"seconds": 1.0, "memory": [{"parameters": 4}], "peaks": [2**20], "processes": 2}
    rows = {"one device": first, "DataParallel": second, "DDP": "not measured"}
    return {"device": device, "rows": {"net": rows | {"DDP + autocast": gpu}}}


def test_the_table_has_a_row_per_setup():
    rows = figures.table(a_result(), "net").rows
    assert rows[0] == ["one device", "2.0", "1.00", "4 B", 1]
    assert rows[1] == ["DataParallel", "4.0", "0.50", "2 KiB, 2 KiB", 1]
    assert rows[2] == ["DDP", *["not measured"] * 4]
    assert rows[3] == ["DDP + autocast", "1.0", "2.00", "1 MiB", 2]  # CUDA's peak is more
    table = figures.parts_table({"rows": {"net": {"one device": [0.25, 0.5, 0.125]}}}, "net")
    assert table.rows == [["one device", "0.250", "0.500", "0.125", "0.875"]]


@pytest.mark.parametrize("device", ["a card", "CPU, one core per device"])
def test_the_chart_draws_its_numbers_on_one_scale_and_warns_of_a_cpu(monkeypatch, device):
    text = repr(figures.chart(a_result(device)))
    monkeypatch.setattr(figures, "Plot", lambda figure, text: figure)
    ours, old = figures.chart(a_result(device)).axes
    warning = " (backward: one thread on a CPU)" if device.startswith("CPU") else ""
    assert "one device: 2.0\n" in text and "DDP: not measured\n" in text
    assert f"DataParallel: 4.0{warning}\n" in text and "DataParallel: 20.4\n" in text
    assert [bar.get_width() for bar in ours.patches] == [2.0, 4.0, 0.0, 1.0]
    assert [bar.get_hatch() for bar in ours.patches] == ["", "", "", "//"]
    assert [bar.get_width() for bar in old.patches] == [20.4, 8.7, 7.2]
    assert ours.get_xlim() == old.get_xlim() and ours.get_xlim()[1] > 20.4


def test_the_stored_comparison_is_whole_and_names_no_process():
    result = figures.load_stored("cpu")
    assert set(result["rows"]) == {"resnet101", "mobilenet_v2"}
    for rows in result["rows"].values():
        assert list(rows) == list(training.SETUPS)
    assert "pid" not in json.dumps(result) and set(result["versions"]) >= {"torch"}
    assert figures.load_stored("abacus") is None


def test_what_is_saved_is_loaded_and_the_other_kind_stays(monkeypatch, tmp_path):
    for module in (figures, benchmark):
        monkeypatch.setattr(module, "STORED", tmp_path / "comparison.json")
    with pytest.raises(FileNotFoundError, match="comparison.py --save"):
        figures.load_stored()
    benchmark.save(a_result("CPU"), "cpu")
    benchmark.save(a_result("a card"), "cuda")
    assert figures.load_stored("cpu") == a_result("CPU")
    assert figures.load_stored("cuda") == a_result("a card")
