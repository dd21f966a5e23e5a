"""The split model is the unsplit one, and pipelines do what their chart says."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab import (
    Ledger,
    RankFailed,
    devices,
    idle_share,
    in_flight,
    in_order,
    launch,
    minimum_plot,
    pipeline_chart,
    quickest,
    steps,
    traffic,
)
from mgpu_tutorial.lab.draw.pipeline_chart import Task, seconds
from mgpu_tutorial.lab.draw.sequence_chart import bytes_text
from mgpu_tutorial.model_parallel import micro_batches, pipeline
from mgpu_tutorial.model_parallel import resnet_cuts as cuts
from mgpu_tutorial.model_parallel import split_resnet as resnet
from mgpu_tutorial.shared import cost_model as cost
from mgpu_tutorial.shared.vision import torchvision

PACKAGE = Path(resnet.__file__).parent
PARTS = ["micro_batches", "pipeline", "resnet_cuts", "cost_model"]
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture(scope="module", autouse=True)
def one_core_for_each_device():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data():
    return resnet.random_images(4)


def run(model, images, labels):
    out = model(images)
    loss = cross_entropy(out, labels.to(out.device))
    loss.backward()
    return out.detach().cpu(), loss.detach().cpu(), resnet.gradients(model)


# The split model


@pytest.mark.parametrize(
    "places", [("layer3.0",), ("fc",), ("maxpool", "layer3.4", "avgpool")]
)
def test_a_split_model_computes_what_the_unsplit_one_does(data, places):
    whole = torchvision.models.resnet50(num_classes=1000)
    model = resnet.ModelParallelResNet50(devices(len(places) + 1), cuts=places)
    model.load_state_dict(whole.state_dict())
    torch.testing.assert_close(run(model, *data), run(whole, *data), rtol=0, atol=0)
    torch.testing.assert_close(
        {n: b.cpu() for n, b in model.named_buffers()}, dict(whole.named_buffers())
    )


def test_weights_go_to_torchvision_and_back():
    model = resnet.ModelParallelResNet50(devices(2), num_classes=10)
    whole = torchvision.models.resnet50(num_classes=10)
    assert list(model.state_dict()) == list(whole.state_dict())
    whole.load_state_dict(model.state_dict())
    again = resnet.ModelParallelResNet50(devices(2), num_classes=10)
    again.load_state_dict(whole.state_dict())
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other) and one.device == other.device


@pytest.mark.parametrize("made_on", ["cpu", "meta"])
def test_each_stage_lies_on_its_device(made_on):
    where = devices(2)
    with torch.device(made_on):
        model = resnet.ModelParallelResNet50(where)
    assert {p.device for p in model.layer2.parameters()} == {where[0]}
    assert {p.device for p in model.layer3.parameters()} == {where[1]}
    assert model.fc.weight.device == where[1] and model.conv1.weight.device == where[0]


def test_a_model_made_on_the_meta_device_takes_its_weights_later(data):
    whole = torchvision.models.resnet50()
    with torch.device("meta"):
        model = resnet.ModelParallelResNet50(devices(2))
    model.load_state_dict(whole.state_dict())
    torch.testing.assert_close(run(model, *data), run(whole, *data), rtol=0, atol=0)


def test_one_device_named_twice_is_enough(data):
    model = resnet.ModelParallelResNet50(("cpu", "cpu"))
    whole = torchvision.models.resnet50()
    whole.load_state_dict(model.state_dict())
    torch.testing.assert_close(run(model, *data), run(whole, *data), rtol=0, atol=0)


@pytest.mark.parametrize(
    "given, places, says",
    [
        (("cpu",), ("layer3.0",), "at least two in all"),
        (("cpu",), (), "at least two in all"),
        ("cpu", ("layer3.0",), "at least two in all"),
        (("cpu", "cpu", "cpu"), ("layer3.0",), "1 cut.s. make 2 stages"),
        (("cpu", "cpu"), ("layer5.0",), "cuts must be a list of maxpool, layer1.0"),
        (("cpu", "cpu"), ("conv1",), "cuts must be a list"),
        (("cpu", "cpu"), "fc", "cuts must be a list"),
        (("cpu",) * 3, ("layer3.0", "layer1.0"), "order of the network"),
        (("cpu",) * 3, ("layer3.0", "layer3.0"), "order of the network"),
    ],
)
def test_what_cannot_be_cut_is_refused(given, places, says):
    with pytest.raises(ValueError, match=says):
        resnet.ModelParallelResNet50(given, cuts=places)


# What a cut costs


@pytest.mark.parametrize("places", [["layer3.0"], ["layer1.0", "layer4.1"], ["fc"]])
def test_memory_predicted_from_shapes_is_what_the_ledger_counts(data, places):
    where = devices(len(places) + 1)
    model = resnet.ModelParallelResNet50(where, cuts=places)
    with Ledger().saved_for_backward(model) as ledger:
        model(data[0].to(where[0]))
    predicted = cuts.weigh(cuts.measure(batch=4, image_size=64), places)
    for device, stage in zip(where, predicted, strict=True):
        assert ledger[device]["parameters"] == 4 * stage.parameters
        assert ledger[device]["activations"] == stage.kept


def test_units_add_up_to_the_network():
    measured = cuts.measure(2, 64)
    whole = torchvision.models.resnet50()
    assert [u.name for u in measured] == list(cuts.UNITS)
    assert sum(u.parameters for u in measured) == sum(p.numel() for p in whole.parameters())
    batch = cuts.measure(4, 64)
    assert all(2 * a.flops == b.flops for a, b in zip(measured, batch, strict=True))


@pytest.mark.parametrize("image_size", [64, 75, 224])
def test_shapes_are_those_of_the_network(image_size):
    with torch.device("meta"):
        model, x = torchvision.models.resnet50(), torch.empty(2, 3, image_size, image_size)
    shapes = [list(x.shape)]
    for unit in cuts.units(model).values():
        x = unit(x)
        shapes.append(list(x.shape))
    assert cuts.stage_shapes(cuts.UNITS[1:], 2, image_size) == shapes
    chosen = [shapes[0], shapes[cuts.UNITS.index("layer3.2")], shapes[-1]]
    assert cuts.stage_shapes(["layer3.2"], 2, image_size) == chosen


def test_a_rank_makes_its_own_stage_only():
    whole, part = (
        resnet.new_model(seed=3),
        resnet.new_model(3, cuts.cut_units(["layer4.1"])[1]),
    )
    assert part.conv1.weight.is_meta and not part.layer4[1].conv1.weight.is_meta
    assert torch.equal(part.fc.weight, whole.fc.weight)
    assert not torch.equal(resnet.new_model(seed=4).fc.weight, whole.fc.weight)
    zeros = resnet.zero_model().state_dict()
    assert list(zeros) == list(whole.state_dict())
    assert not any(values.any() for values in zeros.values())


@pytest.mark.parametrize("place", ["layer2.0", "layer3.0", "avgpool", "fc"])
def test_the_bytes_over_a_cut_are_those_of_the_activations(data, place):
    model = resnet.new_model()
    sent = cuts.cut(model, [place])[0](data[0])
    first, second = cuts.weigh(cuts.measure(4, 64), [place])
    assert first.sends == sent.numel() * sent.element_size()
    assert second.sends == 4 * 1000 * 4


def test_the_best_cuts_are_best():
    measured = cuts.measure(8, 64)
    best = cuts.best_cuts(measured)
    pairs = {name: cuts.weigh(measured, [name]) for name in cuts.UNITS[1:]}
    for name, pair in pairs.items():
        chosen = {aim: pairs[place] for aim, place in best.items()}
        assert max(w.memory for w in chosen["memory"]) <= max(w.memory for w in pair), name
        assert max(w.flops for w in chosen["balance"]) <= max(w.flops for w in pair), name
        assert chosen["traffic"][0].sends <= pair[0].sends, name
    assert len(set(best.values())) == 3
    rows = cuts.cut_table(measured).rows
    assert len(rows) == 19 and rows[0][5] == bytes_text(pairs["maxpool"][1].memory)


def test_larger_batches_want_an_earlier_cut():
    small, large = (
        cuts.best_cuts(cuts.measure(8, 64)),
        cuts.best_cuts(cuts.measure(128, 64)),
    )
    assert cuts.UNITS.index(large["memory"]) < cuts.UNITS.index(small["memory"])
    assert large["balance"] == small["balance"]


def test_a_cut_is_drawn_with_its_numbers():
    drawing = cuts.cut_picture(cuts.measure(8, 64), ["layer3.0"])
    assert repr(drawing).splitlines()[1] == (
        "device 0: 1.44 M parameters, 40.4 MiB of activations, 2.37 GFLOP, sends 1 MiB"
    )
    assert drawing.svg() == cuts.cut_picture(cuts.measure(8, 64), ["layer3.0"]).svg()
    assert drawing.svg() != cuts.cut_picture(cuts.measure(8, 64), ["layer3.1"]).svg()
    with pytest.raises(ValueError, match="cuts must be a list"):
        cuts.cut_picture(cuts.measure(8, 64), ["layer9"])


# Micro-batches in one process


@pytest.mark.parametrize("micro", [1, 4])
def test_micro_batches_on_two_devices_equal_the_same_on_one(data, micro):
    model, whole = resnet.ModelParallelResNet50(devices(2)), resnet.new_model()
    model.load_state_dict(whole.state_dict())
    loss, tasks = micro_batches.micro_batched(model, *data, micro)
    resnet.unsplit_step(whole, *data, micro)
    torch.testing.assert_close(
        resnet.gradients(model), resnet.gradients(whole), rtol=0, atol=0
    )
    assert int(model.bn1.num_batches_tracked) == micro
    for device in (0, 1):
        order = [f"F{i}" for i in range(micro)] + [f"B{i}" for i in range(micro)]
        assert in_order(tasks, device) == order
    assert loss == pytest.approx(mean_loss(data, micro), rel=1e-5)


def mean_loss(data, micro):
    model = resnet.new_model()
    parts = micro_batches.split(*data, micro)
    return sum(cross_entropy(model(x), y).item() for x, y in parts) / micro


def test_batchnorm_sees_the_pieces_and_other_networks_the_batch(data):
    found = {}
    for micro in (1, 4):
        for kind in (micro_batches.ConvStack, resnet.ModelParallelResNet50):
            torch.manual_seed(0)
            model = kind(devices(2))
            micro_batches.micro_batched(model, *data, micro)
            found[kind, micro] = resnet.gradients(model)
    stack, network = micro_batches.ConvStack, resnet.ModelParallelResNet50
    torch.testing.assert_close(found[stack, 1], found[stack, 4], rtol=1e-3, atol=1e-6)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found[network, 1], found[network, 4], rtol=0.1, atol=1e-2)


def test_two_devices_never_work_at_once_without_micro_batches(data):
    model = micro_batches.ConvStack(("cpu", "cpu"))
    _, tasks = micro_batches.micro_batched(model, *data, 1)
    assert idle_share(tasks) > 0.49
    assert overlaps(tasks) == 0
    images, labels = resnet.random_images(16)
    assert overlaps(micro_batches.micro_batched(model, images, labels, 8)[1]) > 0


def overlaps(tasks):
    return sum(
        a.lane < b.lane and a.begin < b.end and b.begin < a.end for a in tasks for b in tasks
    )


@pytest.mark.parametrize("micro", [0, 3, 5, 8])
def test_a_batch_that_does_not_divide_is_refused(data, micro):
    model = micro_batches.ConvStack(("cpu", "cpu"))
    with pytest.raises(ValueError, match="does not divide .* Use 1, 2, 4"):
        micro_batches.micro_batched(model, *data, micro)


def test_an_error_in_a_stage_comes_out_and_nothing_hangs(data):
    model = micro_batches.ConvStack(("cpu", "cpu"))
    model.stages[1] = torch.nn.Linear(7, 7)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        micro_batches.micro_batched(model, *data, 2)


def test_a_sweep_measures_each_setting_in_turns(data):
    times = micro_batches.sweep(
        micro_batches.ConvStack(("cpu", "cpu")), *data, (1, 2, 4), repeats=2
    )
    assert {m: len(repeats) for m, repeats in times.items()} == {1: 2, 2: 2, 4: 2}
    assert all(t > 0 for repeats in times.values() for t in repeats)


# Across processes


@pytest.mark.parametrize(
    "places, micro", [(("layer3.0",), 1), (("layer2.2",), 4), (("layer1.1", "fc"), 2)]
)
def test_stages_on_ranks_equal_the_unsplit_model(data, places, micro):
    report = launch(resnet.across, len(places) + 1, places, micro, batch=4, timeout=60)
    whole = resnet.new_model()
    resnet.unsplit_step(whole, *data, micro)
    merged = {n: g for _, mine in report.results for n, g in mine.items()}
    torch.testing.assert_close(merged, resnet.gradients(whole), **CLOSE)
    assert sum(report.results[-1][0]) == pytest.approx(mean_loss(data, micro), rel=1e-5)
    assert sum(len(mine) for _, mine in report.results) == 161


def test_activations_and_gradients_cross_once_each():
    report = launch(resnet.across, 2, micro=2, batch=4, trace=True, timeout=60)
    sent = cuts.weigh(cuts.measure(4, 64), ["layer3.0"])[0].sends
    table = traffic(report)
    assert [row[2:] for row in table.rows] == [[3, sent + 32], [2, sent]]
    assert in_order(steps(report)[0], 1) == ["F0", "F1", "B0", "B1"]


def test_stages_that_disagree_on_shapes_stop_at_once():
    with pytest.raises(RankFailed) as caught:
        launch(resnet.at_odds, 2)
    assert "stage 0 sends [4, 512, 8, 8], and stage 1 expects [4, 1024, 4, 4]" in str(
        caught.value
    )


def test_stages_and_ranks_must_be_as_many():
    with pytest.raises(RankFailed, match="1 cut.s. make 2 stages, and each needs"):
        launch(resnet.across, 3)
    work = resnet.ResNetStages(None, ("layer2.0", "layer3.0"))
    with pytest.raises(ValueError, match="cannot be joined to 2 stages"):
        work.stage(0, 2, 1)


def test_a_batch_that_does_not_divide_is_refused_on_every_rank():
    with pytest.raises(RankFailed, match="a batch of 4 does not divide into 3"):
        launch(resnet.across, 2, micro=3, batch=4)


def test_pytorchs_schedules_compute_the_same_on_the_same_stages():
    names = ["GPipe", "1F1B", "interleaved 1F1B", "zero bubble"]
    threads, whole = torch.get_num_threads(), resnet.new_model()
    weights = {name: values.clone() for name, values in whole.state_dict().items()}
    torch.set_num_threads(1)  # as the ranks: other kernels round differently
    resnet.unsplit_step(whole, *resnet.random_images(), micro=4)
    torch.set_num_threads(threads)
    report = launch(
        resnet.same_stages, 2, names, weights, resnet.gradients(whole), timeout=60
    )
    for result in report.results:
        assert list(result) == names
        assert [apart for apart, _, _ in result.values()] == [0.0] * 4  # the same bits
    for rank in (0, 1):  # 4 micro-batches, and 2 - rank
        gpipe, one = (report.results[rank][name][1] for name in names[:2])
        assert one < gpipe * (2 - rank) / 4 * 1.05


@pytest.mark.parametrize("ranks, micro", [(2, 2), (4, 8), (3, 5)])
def test_1f1b_keeps_as_many_micro_batches_as_stages_follow(ranks, micro):
    report = launch(
        pipeline.scheduled, ranks, "1F1B", micro, pipeline.Pauses(0.001), 1, trace=True
    )
    (tasks,) = steps(report)
    assert [in_flight(tasks, r) for r in range(ranks)] == [
        min(micro, ranks - r) for r in range(ranks)
    ]
    piece = 16 * 64 * 4
    kept = [result["kept"] for result in report.results]
    assert kept[1:-1] == [2 * piece * (ranks - r) for r in range(1, ranks - 1)]
    assert kept[0] == piece * ranks and kept[-1] == 3 * piece


def test_gpipe_keeps_them_all():
    report = launch(pipeline.scheduled, 3, "GPipe", 6, pipeline.Pauses(0.001), 1, trace=True)
    (tasks,) = steps(report)
    assert [in_flight(tasks, r) for r in range(3)] == [6, 6, 6]
    piece = 16 * 64 * 4
    assert [r["kept"] for r in report.results] == [6 * piece, 12 * piece, 18 * piece]


@pytest.mark.parametrize("schedule", pipeline.SCHEDULES)
def test_every_schedule_has_the_same_loss(schedule):
    report = launch(pipeline.scheduled, 2, schedule, 4, pipeline.Pauses(0.001), trace=True)
    stages = {t.stage for t in steps(report)[0]}
    held = len(pipeline.stages_of(0, 2, schedule))
    assert stages == set(range(2 * held))
    assert sum(r["loss"] for r in report.results) == pytest.approx(
        paused_loss(2 * held, 4), rel=1e-5
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_shortest_pipeline_computes_what_its_layers_do(ranks):
    x = torch.linspace(-1, 1, 128).view(16, 8)
    for rank in range(ranks):
        torch.manual_seed(rank)
        x = torch.nn.Linear(8, 8)(x)
    *others, losses = launch(pipeline.shortest, ranks).results
    assert others == [[]] * (ranks - 1)
    expected = [piece.square().mean().item() for piece in x.chunk(4)]
    assert losses == pytest.approx(expected, rel=1e-5)


def paused_loss(count, micro):
    work = pipeline.Pauses()
    x, target = work.batch(micro)
    for index in range(count):
        torch.manual_seed(index)
        x = torch.nn.Linear(work.width, work.width)(x).relu()
    return work.loss(x, target).item()


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_the_bubble_is_the_formulas(schedule):
    report = launch(pipeline.scheduled, 3, schedule, 4, pipeline.Pauses(0.03), 3, trace=True)
    measured = idle_share(quickest(steps(report)))
    assert pipeline.bubble(3, 4) - 0.03 < measured < pipeline.bubble(3, 4) + 0.2


def test_fewer_micro_batches_than_ranks_are_refused_by_1f1b():
    with pytest.raises(RankFailed, match="Number of microbatches"):
        launch(pipeline.scheduled, 3, "1F1B", 2, pipeline.Pauses(0.001))


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="schedule must be one of GPipe, 1F1B"):
        pipeline.stages_of(0, 2, "2F2B")


def test_bubbles_by_hand():
    assert pipeline.bubble(1, 4) == 0 and pipeline.bubble(2, 1) == 0.5
    assert pipeline.bubble(4, 8) == pytest.approx(3 / 11)
    assert pipeline.bubble(4, 8, held=2) == pytest.approx(3 / 19)


def test_race_times_every_plan():
    times = launch(resnet.race, 2, (1, 2), samples=2, timeout=60).results[0]
    assert set(times) == {
        *("4 B", "4 MB", "one sample", "one rank", "replicas"),
        *("stages, m = 1", "stages, m = 2"),
    }
    assert all(t > 0 for t in times.values())


# The charts


def tasks_of(*rows):
    return [Task(lane, lane, kind, micro, a, b) for lane, kind, micro, a, b in rows]


TWO = tasks_of((0, "F", 0, 0, 1), (1, "F", 0, 1, 2), (1, "B", 0, 2, 4), (0, "B", 0, 4, 6))


def test_the_idle_share_counts_what_is_between_the_boxes():
    assert seconds(TWO) == 6 and idle_share(TWO) == pytest.approx(0.5)
    assert in_order(TWO, 1) == ["F0", "B0"] and in_flight(TWO, 0) == 1
    assert quickest([[*TWO, *tasks_of((0, "W", 0, 6, 7))], TWO]) is TWO


def test_a_pipeline_chart_says_the_order_and_no_time():
    plot = pipeline_chart(TWO, "two stages")
    assert repr(plot) == "two stages\nrank 0: F0 B0\nrank 1: F0 B0"
    assert plot.png.startswith(b"\x89PNG")
    assert "device 0: F0 B0" in repr(pipeline_chart(TWO, "two", lane="device"))
    split = [t._replace(kind="I") if t.kind == "B" else t for t in TWO]
    assert pipeline_chart(split, "two stages").png != plot.png


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="no task"):
        pipeline_chart([], "empty")
    report = launch(pipeline.scheduled, 2, "GPipe", 2, pipeline.Pauses(0.001), 1)
    with pytest.raises(ValueError, match="launch with trace=True"):
        steps(report)
    with pytest.raises(ValueError, match="at least one measurement"):
        minimum_plot({1: []}, {1: 1.0}, "m", "seconds")


def test_the_minimum_is_that_of_the_medians():
    from mgpu_tutorial.lab.draw.minimum_plot import fastest

    measured = {1: [3.0, 3.1, 9.0], 2: [0.1, 4.0, 5.0], 4: [5.0, 5.0, 5.0]}
    assert fastest(measured) == 1
    plot = minimum_plot(measured, dict.fromkeys(measured, 3.0), "m", "seconds")
    assert repr(plot) == "seconds against m: 1, 2, 4" and plot.png.startswith(b"\x89PNG")


# The cost model


NET = cost.Net(seconds=0.01, overhead=0.02, parameters=1e6, kept=1e6, sends=1e5)
LINK = cost.Link(1e-3, 1e9)


def test_a_step_by_hand():
    assert cost.step_seconds(NET, LINK, 8, cost.Plan()) == pytest.approx(0.10)
    slot = (0.02 + 0.01 * 2) / 2 + 2 * (1e-3 + 2e5 / 1e9)
    assert cost.step_seconds(NET, LINK, 8, cost.Plan(1, 2, 4)) == pytest.approx(5 * slot)
    reduce = 2 * 1e-3 + 4e6 / 1e9
    assert cost.step_seconds(NET, LINK, 8, cost.Plan(2)) == pytest.approx(0.06 + reduce)
    assert cost.memory(NET, 8, cost.Plan(1, 2, 4)) == pytest.approx(8e6 + 2 * 2e6 / 2)


def test_a_fit_finds_the_net_that_made_the_times():
    made = {
        m: [cost.step_seconds(NET, cost.FREE, 32, cost.Plan(1, 2, m))] for m in (1, 4, 32)
    }
    found = cost.fit(made, 32, stages=2)
    assert (found.seconds, found.overhead) == (pytest.approx(0.01), pytest.approx(0.02))


def test_calibration_takes_four_times():
    times = {"one sample": 0.03, "one rank": 0.1, "4 B": 0.002, "4 MB": 0.006}
    net, link = cost.calibrate(times, 8, 10, 20.0)
    assert (net.seconds, net.overhead) == (pytest.approx(0.01), pytest.approx(0.02))
    assert link == (pytest.approx(0.001), pytest.approx(1e9))


def test_the_best_plan_is_the_fastest_that_fits():
    fast, slow = cost.Link(1e-6, 1e12), cost.Link(1e-6, 1e6)
    assert cost.best_plan(NET, fast, 64, 8, 1e9)[0] == cost.Plan(8, 1, 1)
    assert cost.best_plan(NET, slow, 64, 8, 1e9)[0] == cost.Plan(1, 1, 1)
    plan, seconds = cost.best_plan(NET, fast, 64, 8, 6e6)
    assert plan.stages > 1 and cost.memory(NET, 64, plan) <= 6e6
    assert seconds == cost.step_seconds(NET, fast, 64, plan)
    assert cost.best_plan(NET, fast, 64, 8, 1e5) is None


def test_plans_are_written_as_people_say_them():
    assert str(cost.Plan()) == "one device" and str(cost.Plan(4)) == "4 replicas"
    assert str(cost.Plan(2, 4, 8)) == "2 replicas of 4 stages, m = 8"
    table = cost.plan_table({"net": NET}, {"slow": LINK}, 64, 8, 1e5)
    assert table.rows == [["net", "does not fit"]]
