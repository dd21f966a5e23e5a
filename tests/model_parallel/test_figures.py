"""What a cut costs, against the ledger and arithmetic by hand; and when a device works."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from mgpu_tutorial.lab import Ledger, devices
from mgpu_tutorial.model_parallel import figures, micro_batches
from mgpu_tutorial.model_parallel.resnet_cuts import UNITS
from mgpu_tutorial.model_parallel.split_resnet import ModelParallelResNet50
from mgpu_tutorial.model_parallel.tasks import Task, in_order
from tests.model_parallel.reference import SIDE, gradients_of
from tests.model_parallel.test_micro_batches import Stages, batch
from tests.model_parallel.test_resnet_cuts import PLACES


@pytest.mark.slow
def test_units_are_where_torchvision_has_them(data, whole):
    """What each block really puts out, in the order of the forward."""
    shapes = {}
    for name in UNITS:
        if name not in ("conv1", "avgpool"):  # these units end in another module
            whole.get_submodule(name).register_forward_hook(
                lambda _, __, output, name=name: shapes.update({name: list(output.shape)})
            )
    whole(data[0])
    measured = {unit.name: unit.shape for unit in figures.measure(4, SIDE)}
    assert list(shapes) == [name for name in UNITS if name in shapes]
    assert shapes == {name: measured[name] for name in shapes}


def test_units_add_up_to_the_network(whole):
    measured = figures.measure(128, 64)
    assert [unit.name for unit in measured] == list(UNITS)
    count = sum(parameter.numel() for parameter in whole.parameters())
    assert sum(unit.parameters for unit in measured) == count
    few = figures.measure(8, 64)
    assert all(a.flops == 16 * b.flops for a, b in zip(measured, few, strict=True))
    by_name = {unit.name: unit for unit in few}
    assert by_name["fc"].flops == 2 * 8 * 2048 * 1000
    assert by_name["conv1"].flops == 2 * 8 * 64 * 32 * 32 * 3 * 7 * 7


@pytest.mark.slow
@pytest.mark.parametrize("places", [["layer3.0"], ["layer1.0", "layer4.1"], ["fc"]])
def test_memory_predicted_from_shapes_is_what_the_ledger_counts(data, weights, places):
    several = devices(len(places) + 1)
    with torch.device("meta"):
        model = ModelParallelResNet50(several, cuts=places)
    model.load_state_dict(weights)
    with Ledger().saved_for_backward(model) as ledger:
        model(data[0].to(several[0]))
    predicted = figures.stage_costs(figures.measure(batch=4, image_size=SIDE), places)
    for device, stage in zip(several, predicted, strict=True):
        assert ledger[device]["parameters"] == 4 * stage.parameters
        assert ledger[device]["activations"] == stage.activation_bytes


def some_units(parameters, flops, sides, saved):
    """Units with given numbers; neighbours save a storage of 5 bytes together."""
    return [
        figures.Unit(name, [1, side], p, f, {i: kept, f"{i // 2} shared": 5})
        for i, (name, p, f, side, kept) in enumerate(
            zip(UNITS, parameters, flops, sides, saved, strict=True)
        )
    ]


TWENTY = some.lists(some.integers(1, 100), min_size=20, max_size=20)
MEASURED = some.builds(some_units, TWENTY, TWENTY, TWENTY, TWENTY)


@given(MEASURED, PLACES)
def test_a_stage_needs_what_its_units_need(measured, places):
    ends = [0, *(UNITS.index(name) for name in places), 20]
    work = []
    for stage, begin, end in zip(
        figures.stage_costs(measured, places), ends[:-1], ends[1:], strict=True
    ):
        units = measured[begin:end]
        assert stage.parameters == sum(unit.parameters for unit in units)
        shared = {i // 2 for i in range(begin, end)}  # counted once in a stage
        own = sum(unit.saved[begin + i] for i, unit in enumerate(units))
        assert stage.activation_bytes == own + 5 * len(shared)
        assert stage.memory == 12 * stage.parameters + stage.activation_bytes
        assert stage.output_bytes == 4 * units[-1].shape[1]
        work.append(sum(unit.flops for unit in units))
        assert stage.flops == work[-1]
    assert figures.most_work(measured, places) == max(work) / sum(work)


@settings(max_examples=20)
@given(MEASURED)
def test_the_best_cuts_are_best(measured):
    pairs = {name: figures.stage_costs(measured, [name]) for name in UNITS[1:]}
    worst = {
        "memory": {name: max(stage.memory for stage in pairs[name]) for name in pairs},
        "balance": {name: max(stage.flops for stage in pairs[name]) for name in pairs},
        "traffic": {name: pairs[name][0].output_bytes for name in pairs},
    }
    best = figures.best_cuts(measured)
    assert best.keys() == worst.keys()
    assert all(values[best[aim]] == min(values.values()) for aim, values in worst.items())


@pytest.mark.parametrize("places", [["layer3.0"], ["maxpool", "layer2.1", "fc"]])
def test_a_cut_is_drawn_with_its_numbers(monkeypatch, places):
    monkeypatch.setattr(figures, "Plot", lambda figure, text: (figure, text))
    measured = figures.measure(8, 64)
    figure, text = figures.cut_picture(measured, places)
    costs = figures.stage_costs(measured, places)
    assert text.splitlines()[0] == f"cut before {', '.join(places)}"
    assert len(text.splitlines()) == 1 + len(costs)
    starts = [0, *map(UNITS.index, places)]
    stage_of = [sum(begin <= i for begin in starts) - 1 for i in range(20)]
    *panels, sends = figure.axes
    for axes, field in zip(panels, ("parameters", "activation_bytes", "flops"), strict=True):
        drawn = [0] * len(costs)
        for i, bar in enumerate(axes.patches):
            drawn[stage_of[i]] += bar.get_height()
        assert drawn == [getattr(cost, field) for cost in costs]
        assert len({bar.get_facecolor() for bar in axes.patches}) == len(costs)
        at = [line.get_xdata()[0] for line in axes.lines]
        assert at == [UNITS.index(name) - 0.5 for name in places]
    assert [bar.get_height() for bar in sends.patches] == [
        unit.output_bytes for unit in measured[:-1]
    ]
    full = [i for i, bar in enumerate(sends.patches) if bar.get_facecolor()[-1]]
    assert full == [UNITS.index(name) - 1 for name in places]


# When each device works


@given(
    some.lists(
        some.lists(some.integers(1, 9), min_size=4, max_size=4), min_size=1, max_size=4
    ),
    some.lists(
        some.lists(some.integers(1, 9), min_size=4, max_size=4), min_size=4, max_size=4
    ),
)
def test_tasks_begin_when_their_row_is_free_and_what_they_wait_for_is_done(forward, backward):
    """`forward[s][i]` and `backward[s][i]` are the seconds of stage s and micro-batch i."""
    stages = range(len(forward))
    order = [("F", s, i) for i in range(4) for s in stages]
    order += [("B", s, i) for i in range(4) for s in reversed(stages)]
    seconds = {
        (kind, s, i): {"F": forward, "B": backward}[kind][s][i] for kind, s, i in order
    }
    tasks = [Task(s, s, kind, i, 50.0, 50.0 + seconds[kind, s, i]) for kind, s, i in order]
    ends, clocks = {}, [0.0] * len(forward)
    for kind, s, i in order:
        neighbour = ends.get((kind, s - 1 if kind == "F" else s + 1, i), 0.0)
        ends[kind, s, i] = clocks[s] = max(clocks[s], neighbour) + seconds[kind, s, i]
    placed = figures.lay_out(tasks)
    assert {(t.kind, t.stage, t.micro): t.end for t in placed} == ends
    assert all(t.begin == t.end - seconds[t.kind, t.stage, t.micro] for t in placed)
    total = sum(seconds.values())
    assert figures.work_seconds(placed) == total and figures.end_of(placed) == max(clocks)
    busy = [sum(forward[s]) + sum(backward[s]) for s in stages]
    slots = total / (len(stages) * 4) * (4 + len(stages) - 1)
    (row,) = figures.step_table({"small": {4: placed}}).rows
    in_ms = [*(1000 * b for b in busy), round(1000 * slots), 1000 * max(clocks)]
    assert row == ["small", 4, *in_ms]


@pytest.mark.parametrize("micro", [1, 4])
def test_a_step_alone_computes_what_the_devices_do(micro):
    model, alone = Stages(3), Stages(3)
    micro_batches.forward_backward(model, *batch(), micro)
    tasks = figures.step_alone(alone, *batch(), micro)
    torch.testing.assert_close(gradients_of(alone), gradients_of(model), rtol=0, atol=0)
    order = [f"{kind}{i}" for kind in "FB" for i in range(micro)]
    assert all(in_order(tasks, row) == order for row in range(3))
    assert min(task.begin for task in tasks) == 0 and len(tasks) == 3 * 2 * micro


def test_steps_are_taken_in_turns_and_the_least_work_counts(monkeypatch):
    model, turns = Stages(), []

    def step(model, images, labels, micro):
        assert all(p.grad is None for p in model.parameters()), "of the step before"
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        turns.append(micro)
        return [Task(0, 0, "F", 0, 1.0, 10.0 - len(turns) + 0.1 * micro)]

    monkeypatch.setattr(figures, "step_alone", step)
    steps = figures.steps_alone(model, *batch(), (2, 4, 8), repeats=2)
    assert turns == [2, 4, 8, 2, 4, 8]
    assert {micro: tasks[0].end for micro, tasks in steps.items()} == {
        2: pytest.approx(6.2),  # the fourth of the steps
        4: pytest.approx(5.4),
        8: pytest.approx(4.8),
    }
