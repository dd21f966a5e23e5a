"""What a picture shows is what it was given: its marks, its bars, its axes and its names.

A notebook's stored PNG is compared with nothing, so here the artists are looked at.
"""

import re
from pathlib import Path

import pytest
import torch

import mgpu_tutorial
from mgpu_tutorial.comparison import figures as comparison
from mgpu_tutorial.ddp_reducer import figures as reducer
from mgpu_tutorial.lab.draw import plot
from mgpu_tutorial.long_sequences import figures as long
from mgpu_tutorial.mixed_precision import figures as precision
from mgpu_tutorial.model_parallel import figures as model_parallel
from mgpu_tutorial.tensor_parallel_in_practice import figures as practice
from mgpu_tutorial.wrong_gradient import figures as wrong

ROOMS = plot, comparison, long, precision, model_parallel, practice, wrong
ELSEWHERE = {"memory_bars", "timeline", "draw_trace"}  # tests/lab/draw
ELSEWHERE |= {"calls_picture", "step_by_dimension"}  # when_it_breaks, language_model


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """Each picture is its figure, before it becomes a PNG."""
    for room in ROOMS:
        monkeypatch.setattr(room, "Plot", lambda figure, text: figure)


def series(axes):
    """The points of each line by its label."""
    return {
        line.get_label(): list(zip(*map(list, line.get_data()), strict=True))
        for line in axes.lines
    }


def bars(axes):
    """Place, left end and width of each bar that lies."""
    return [
        (round(bar.get_y() + bar.get_height() / 2, 6), bar.get_x(), bar.get_width())
        for bar in axes.patches
    ]


def test_curves_have_the_points_the_names_and_the_scale_that_they_were_given():
    (axes,) = plot.curves({"a": ([1, 2], [3, 4])}, {"b": ([5, 6], [7, 8])}, "x", "y").axes
    assert series(axes) == {"a": [(1, 3), (2, 4)], "b": [(5, 7), (6, 8)]}
    marks = {line.get_label(): line.get_linestyle() for line in axes.lines}
    assert marks == {"a": "None", "b": "-"}
    names = axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale(), axes.get_yscale()
    assert names == ("x", "y", "log", "log")


def test_a_mark_has_its_label_beside_it():
    series_and_fit = {"a": ([1, 2], [3, 4])}, {"b": ([5, 6], [7, 8])}
    (axes,) = plot.curves(*series_and_fit, "x", "y", labels={"a": [16, 32]}).axes
    found = [(text.get_text(), text.xy) for text in axes.texts]
    assert found == [("16", (1, 3)), ("32", (2, 4))]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]


def test_losses_stand_at_their_steps():
    (axes,) = wrong.losses_plot({"SGD": {1: [3.0, 2.0], 4: [3.5, 2.5]}}).axes
    assert [*series(axes).values()] == [[(1, 3.0), (2, 2.0)], [(1, 3.5), (2, 2.5)]]
    runs = {"one": [3.0, 2.0], "two": [3.5, 2.5]}
    (axes,) = reducer.loss_curves(runs).axes
    assert series(axes) == {"one": [(0, 3.0), (1, 2.0)], "two": [(0, 3.5), (1, 2.5)]}


def test_query_0_is_at_the_top_with_one_square_and_its_rank_s_name():
    ways = [0, 0, 1, 1], [0, 1, 1, 0]
    for axes, owners in zip(long.squares(*ways).axes, ways, strict=True):
        low, high = axes.get_ylim()
        assert low > high
        assert sorted(bars(axes)) == [(q, key, 1) for q in range(4) for key in range(q + 1)]
        names = {text.get_position()[1]: text.get_text() for text in axes.texts}
        assert names == {query: f"rank {rank}" for query, rank in enumerate(owners)}
        colours = {(bar.get_y(), bar.get_facecolor()) for bar in axes.patches}
        assert len(colours) == 4 and len({colour for _, colour in colours}) == 2


def test_each_mark_is_of_its_own_series():
    measured = {
        name: {"right": [10.0**-i], "without mask": [10.0**-i / 2]}
        for i, name in enumerate("ab", 5)
    }
    strips = practice.orders_picture(measured).axes
    for axes, name in zip(strips, "abb", strict=True):
        assert len(axes.collections) == 2
        for dots in axes.collections:
            which = dots.get_label().partition(",")[0]
            assert dots.get_offsets()[:, 0].tolist() == measured[name][which]


def test_gradients_stand_in_the_bins_of_their_powers_of_two():
    rows = {"few": torch.tensor([2.0**-10, 1.0]), "many": torch.full((5,), 2.0**-30)}
    grid = precision.gradient_picture(rows).axes
    for axes, counts in zip(grid, ({-10: 1, 0: 1}, {-30: 5}), strict=True):
        found = {
            bar.get_x(): bar.get_height() for bar in axes.patches if bar.get_width() == 1
        }
        assert {x: height for x, height in found.items() if height} == counts
    assert [axes.get_ylabel() for axes in grid] == ["few", "many"]


def test_a_bar_reaches_from_a_format_s_smallest_number_to_its_largest():
    (axes,) = precision.formats_picture([torch.float16, torch.float8_e4m3fn]).axes
    found = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    ends = [(-24, -14), (-14, 16), (-9, -6), (-6, 8.8)]
    assert [tuple(round(end, 1) for end in bar) for bar in found] == ends
    assert [text.get_text() for text in axes.texts] == ["10 bits", "3 bits"]


def test_a_colour_changes_where_a_scale_begins():
    served = {"row": (1, 256), "1 x 128": (1, 128), "128 x 128": (128, 128)}
    grid = precision.served_picture(served).axes
    assert [len(axes.patches) for axes in grid] == [16, 32, 4]
    first, second = grid[1].patches[:2]
    assert (second.get_x(), second.get_y(), second.get_width()) == (128, 0, 128)
    assert first.get_facecolor() != second.get_facecolor()


def test_errors_stand_at_the_size_of_their_numbers():
    x = torch.tensor([1.0, 1.5, -4.0])
    (axes,) = precision.error_picture(x, {"a": torch.tensor([1.1, 1.5, 0.0])}).axes
    assert [(a, round(b, 3)) for a, b in series(axes)["a"]] == [(0, 5.0), (2, 100.0)]


def test_a_bar_is_as_long_as_forward_and_backward():
    rows = [
        {"network": "n", "setup": "one device", "seconds": (1.0, 2.0, 1.0)},
        {"network": "n", "setup": "two ranks", "seconds": (1.5, 2.5, 2.0)},
    ]
    (axes,) = comparison.parts_picture(rows).axes
    assert bars(axes) == [(0, 0, 1.0), (0, 1.0, 2.0), (1, 0, 1.5), (1, 1.5, 2.5)]
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert labels == ["one device", "two ranks"]
    assert {"1.00", "1.50"} <= {text.get_text() for text in axes.texts}  # 6 s of 4


def test_a_task_is_drawn_when_and_where_it_ran():
    tasks = [
        model_parallel.Task(row=row, begin=begin, end=end, kind=kind, micro=micro, stage=row)
        for row, begin, end, kind, micro in (
            *((0, 1.0, 2.0, "F", 0), (1, 2.0, 3.0, "F", 0), (1, 3.0, 5.0, "B", 0)),
            *((0, 5.0, 7.0, "B", 0),),
        )
    ]
    (axes,) = model_parallel.pipeline_chart(tasks, "two stages").axes
    idle, tasks = bars(axes)[:2], bars(axes)[2:]
    assert idle == [(0, 0, 6.0), (1, 0, 6.0)]
    assert sorted(tasks) == [(0, 0, 1.0), (0, 4.0, 2.0), (1, 1.0, 1.0), (1, 2.0, 2.0)]
    low, high = axes.get_ylim()
    assert low > high and axes.get_title(loc="left") == "two stages: 6000 ms, idle 50%"


def test_no_picture_is_left_out():
    """Each function of the package that returns a Plot is called above or elsewhere."""
    files = Path(mgpu_tutorial.__file__).parent.rglob("*.py")
    text = "\n".join(file.read_text("utf-8") for file in files)
    drawing = set(re.findall(r"^def (\w+)\([^:]*?(?:: .*)?\) -> Plot:", text, re.M))
    drawing |= set(re.findall(r"^def (\w+)\((?:\n .*)*\n\) -> Plot:", text, re.M))
    called = set(re.findall(r"\w+\.(\w+)\(", Path(__file__).read_text("utf-8")))
    assert len(drawing) > 10 and drawing - called == ELSEWHERE
