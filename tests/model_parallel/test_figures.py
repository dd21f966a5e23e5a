"""What a cut costs is added up by hand; idle time is counted, each task drawn."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.model_parallel import figures
from mgpu_tutorial.model_parallel.micro_batches import Task

BLOCKS = [f"layer{i}.{j}" for i, n in enumerate([3, 4, 6, 3], 1) for j in range(n)]
UNITS = ["conv1", "maxpool", *BLOCKS, "avgpool", "fc"]
PLACES = some.lists(some.sampled_from(UNITS[1:]), unique=True).map(
    lambda names: sorted(names, key=UNITS.index)
)


@pytest.mark.slow
def test_units_add_up_to_the_network():
    measured, few = figures.measure(128, 64), figures.measure(8, 64)
    assert list(measured) == UNITS
    assert sum(unit.parameters for unit in measured.values()) == 25_557_032
    assert all(measured[name].flops == 16 * few[name].flops for name in UNITS)


@pytest.mark.slow
def test_the_best_cut_for_memory_depends_on_the_batch():
    small, large = (
        {
            name: max(stage.memory for stage in figures.stage_costs(measured, [name]))
            for name in UNITS[1:]
        }
        for measured in (figures.measure(4, 64), figures.measure(128, 224))
    )
    assert min(small, key=small.get) == "layer4.1"
    assert min(large, key=large.get) == "layer2.0"
    fitting = [name for name, memory in large.items() if memory <= 8 * 2**30]
    assert fitting == UNITS[UNITS.index("layer1.2") : UNITS.index("layer3.1")]
    assert (round(min(large.values()) / 2**30, 2), round(large["layer3.0"] / 2**30, 2)) == (
        5.95,
        7.74,
    )


def some_units(parameters, flops, sides, saved):
    """Units with given numbers; neighbours save a storage of 5 bytes together."""
    columns = enumerate(zip(parameters, flops, sides, saved, strict=True))
    units = [
        figures.Unit(p, f, {i: kept, f"{i // 2} shared": 5}, 4 * side)
        for i, (p, f, side, kept) in columns
    ]
    return dict(zip(UNITS, units, strict=True))


TWENTY = some.lists(some.integers(1, 100), min_size=20, max_size=20)
MEASURED = some.builds(some_units, TWENTY, TWENTY, TWENTY, TWENTY)


@given(MEASURED, PLACES)
def test_a_stage_needs_what_its_units_need(measured, places):
    ends = [0, *(UNITS.index(name) for name in places), 20]
    stages = figures.stage_costs(measured, places)
    for stage, begin, end in zip(stages, ends[:-1], ends[1:], strict=True):
        units = list(measured.values())[begin:end]
        assert stage.parameters == sum(unit.parameters for unit in units)
        assert stage.flops == sum(unit.flops for unit in units)
        shared = {i // 2 for i in range(begin, end)}  # counted once in a stage
        own = sum(unit.saved[begin + i] for i, unit in enumerate(units))
        assert sum(stage.saved.values()) == own + 5 * len(shared)
        assert stage.memory == 12 * stage.parameters + own + 5 * len(shared)
        assert stage.output_bytes == units[-1].output_bytes


LENGTHS = some.lists(some.integers(1, 5), min_size=1, max_size=6)


@given(some.lists(LENGTHS, min_size=1, max_size=4), some.integers(1, 3), some.integers(0, 9))
def test_the_idle_share_counts_what_is_between_the_boxes(rows, stages, start):
    """Each row works without a pause and then waits for the longest; its stages alternate."""
    tasks = []
    for row, lengths in enumerate(rows):
        ends = [start + sum(lengths[: i + 1]) for i in range(len(lengths))]
        tasks += [
            Task(end - length, end, row, row + len(rows) * (i % stages), "F", i)
            for i, (length, end) in enumerate(zip(lengths, ends, strict=True))
        ]
    longest = max(map(sum, rows))
    assert figures.duration(tasks) == longest
    idle = sum(longest - sum(lengths) for lengths in rows)
    assert figures.idle_share(tasks) == pytest.approx(idle / (len(rows) * longest))


def test_the_tasks_of_a_launch_are_read_from_its_spans():
    notes = ["first", "F 1 0", "B 1 0", "load", "second", "F 1 12", "B 1 12"]
    ends = [2.9, 1.5, 2.5, 3.5, 7.0, 5.5, 6.5]
    events = [
        Event(0, t, "span", t, end, note=note)
        for t, (note, end) in enumerate(zip(notes, ends, strict=True))
    ]
    events.append(Event(0, 9, "note", 9.0, 9.0, note="F 1 14"))
    report = Report(1, events=events)
    first = [Task(t, t + 0.5, 0, 1, kind, 0) for t, kind in enumerate("FB", 1)]
    second = [Task(t, t + 0.5, 0, 1, kind, 12) for t, kind in enumerate("FB", 5)]
    assert figures.tasks_of(report, "first") == first
    assert figures.tasks_of(report, "second") == second
    assert figures.tasks_of(report) == first + second


def test_each_task_has_a_box_where_and_when_it_was(monkeypatch):
    """Two rows of two stages; times in seconds since the first task began; a prime for each
    row's second stage."""
    monkeypatch.setattr(figures, "Plot", lambda figure, text: (figure, text))
    places = [
        (0, 0, "F", 0),
        (0, 2, "F", 1),
        (0, 2, "B", 2),
        (1, 1, "F", 0.5),
        (1, 3, "B", 4.5),
    ]
    tasks = [Task(2 + at, 2.5 + at, row, s, kind, 7) for row, s, kind, at in places]
    figure, text = figures.pipeline_chart(tasks, "title", row_name="device")
    assert text == "title\ndevice 0: F7 F7 B7\ndevice 1: F7 B7"
    axes = figure.axes[0]
    # 2.5 of 2 rows times 5 seconds
    assert axes.get_title(loc="left") == "title: 5000 ms, idle 75%"
    bars = axes.patches[2:]  # after the grey of the two rows
    boxes = sorted((b.get_x(), b.get_x() + b.get_width(), b.get_y() + 0.42) for b in bars)
    expected = [(at, at + 0.5, row) for row, s, _, at in places]
    assert boxes == [pytest.approx(box) for box in sorted(expected)]
    names = [text.get_text() for text in axes.texts if text.get_text()]
    assert sorted(names) == ["7", "7", "7'", "7'", "7'"]


def test_the_legend_has_one_colour_that_of_the_first_row(monkeypatch):
    """A pale and a strong one, though the last row begins the backwards."""
    monkeypatch.setattr(figures, "Plot", lambda figure, text: figure)
    places = ("F", 0, 0), ("F", 1, 1), ("B", 2, 1), ("B", 3, 0)
    tasks = [Task(at, at + 1, row, row, kind, 0) for kind, at, row in places]
    figure = figures.pipeline_chart(tasks, "title")
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["idle", "F: forward", "B: backward"]
    shown = [patch.get_facecolor() for patch in legend.get_patches()]
    boxes = {bar.get_x(): bar.get_facecolor() for bar in figure.axes[0].patches[2:]}
    assert shown[1:] == [boxes[0], boxes[3]]


def test_two_charts_share_an_axis(monkeypatch):
    monkeypatch.setattr(figures, "Plot", lambda figure, text: (figure, text))
    short, long = [Task(0, 2, 0, 0, "F", 0)], [Task(1, 7, 0, 0, "F", 0)]
    figure, text = figures.pipeline_chart(long, "long", above=(short, "short"), slot=2)
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim() == (0, 6)
    assert text.split("\n") == [
        *("short: 1 slots, idle 0%", "rank 0: F0"),
        *("long: 3 slots, idle 0%", "rank 0: F0"),
    ]
