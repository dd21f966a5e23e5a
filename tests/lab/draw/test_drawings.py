"""The drawings show the run they are made from, and the same run looks the same."""

from xml.etree import ElementTree

import pytest

from mgpu_tutorial import nonblocking
from mgpu_tutorial import point_to_point as p2p
from mgpu_tutorial.collectives import calls, ring
from mgpu_tutorial.lab import RanksHung, launch, sequence_chart, stepper, timeline, traffic
from mgpu_tutorial.lab.draw.sequence_chart import message_log
from mgpu_tutorial.lab.record.intervals import events_of


def silent(rank, world_size):
    pass


def elements(drawing, tag):
    root = ElementTree.fromstring(drawing.svg())
    return root.findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


@pytest.mark.parametrize(
    "worker, world_size",
    [
        (p2p.pass_along, 4),
        (p2p.tags, 2),
        (nonblocking.exchange_with_neighbours, 4),
        (calls.pairs, 5),
        (ring.ring_step_by_step, 3),
    ],
)
def test_a_chart_is_the_same_from_run_to_run(ranks, worker, world_size):
    reports = [ranks(world_size, worker, trace=True)]
    reports += [launch(worker, world_size, trace=True) for _ in range(2)]
    charts = [sequence_chart(report) for report in reports]
    assert len({chart.svg() for chart in charts}) == 1
    assert len({repr(chart) for chart in charts}) == 1


def test_a_chart_has_one_arrow_a_message(ranks):
    chart = sequence_chart(ranks(4, p2p.pass_along, trace=True))
    assert len(elements(chart, "polygon")) == 4
    assert repr(chart).splitlines()[-1] == "rank 3 → rank 0  4 B"


def test_nothing_arrives_above_the_row_it_was_sent_in(ranks):
    log = message_log(ranks(4, ring.ring_step_by_step, trace=True))
    assert len(log.messages) == 24
    assert all(log.rows[source] <= log.rows[target] for source, target in log.messages)


def test_collectives_of_different_groups_are_not_drawn_over_each_other(ranks):
    log = message_log(ranks(4, calls.pairs, trace=True))
    assert [log.rows[keys[0]] for keys in log.collectives] == [0, 1]


def test_a_deadlock_is_drawn_with_its_open_ends():
    with pytest.raises(RanksHung) as caught:
        launch(p2p.both_send_first, 2, timeout=1, trace=True)
    chart = sequence_chart(caught.value.report)
    assert [text.text for text in elements(chart, "text")].count("?") == 2
    assert repr(chart) == "rank 0 waits in send for rank 1\nrank 1 waits in send for rank 0"


def test_drawing_what_was_not_recorded_is_refused(ranks):
    report = ranks(2, silent)
    for draw in (sequence_chart, timeline, traffic, stepper):
        with pytest.raises(ValueError, match="launch with trace=True"):
            draw(report)


def test_the_stepper_has_a_frame_for_each_step_and_a_still_form(ranks):
    steps = stepper(ranks(4, ring.ring_step_by_step, trace=True))
    assert len(steps.frames) == 7  # the start, and 2 (4 - 1) steps
    assert "1111 1111 1111 1111" in repr(steps).splitlines()[-1]
    bundle = steps._repr_mimebundle_()
    assert bundle["text/html"].count("<img") == 7
    slider = steps.widget().children[0].children[1]
    assert (slider.min, slider.max) == (0, 6)


def test_a_timeline_of_one_span_leaves_out_what_began_elsewhere(ranks):
    report = ranks(2, nonblocking.send_and_compute, 50, True, trace=True)
    assert {e.op for e in events_of(report)} == {"barrier", "isend", "irecv", "span", "wait"}
    with pytest.raises(ValueError, match="nothing was recorded inside a span 'compute'"):
        timeline(report, during="compute")
    with pytest.raises(ValueError, match="nothing was recorded inside a span 'dinner'"):
        timeline(report, during="dinner")
