"""The replay against plain references: sums, maxima, and a queue written out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.instruments.price.machine import bytes_sent, call_seconds, machine_of
from mgpu_tutorial.instruments.price.replay import replay
from mgpu_tutorial.instruments.price.tape import Call, Mark, Operation, Wait
from mgpu_tutorial.shared.cost_model.links import Link, ring_seconds

MACHINE = machine_of("8 x H100")
EVERYBODY = tuple(range(8))
SECONDS = st.floats(1e-5, 1)
SIZES = st.floats(0, 1e9)


def kernel(seconds, stream=0):
    return Operation("sleep", seconds=seconds, stream=stream)


def took(events, machine=MACHINE):
    return replay({0: events}, machine)[0].seconds


def alone(nbytes):
    return call_seconds(Call("all_reduce", nbytes, EVERYBODY), 0, MACHINE)


@given(st.lists(st.tuples(SECONDS, SIZES), min_size=1, max_size=9))
def test_calls_that_are_waited_for_at_once_add_up(steps):
    events = []
    for seconds, nbytes in steps:
        events += [kernel(seconds), Call("all_reduce", nbytes, EVERYBODY)]
        events.append(Wait(len(events) - 1))
    whole = sum(seconds + alone(nbytes) for seconds, nbytes in steps)
    player = replay({0: events}, MACHINE)[0]
    assert player.seconds == pytest.approx(whole)
    assert player.exposed == pytest.approx(sum(alone(nbytes) for _, nbytes in steps))


@given(SECONDS, SIZES)
def test_a_call_under_a_kernel_takes_the_longer_of_both(seconds, nbytes):
    events = [Call("all_reduce", nbytes, EVERYBODY), kernel(seconds), Wait(0)]
    assert took(events) == pytest.approx(max(seconds, alone(nbytes)))


@given(st.lists(st.tuples(SECONDS, SIZES), min_size=1, max_size=9))
def test_buckets_queue_for_the_link(layers):
    """As `ddp_buckets` has it: a bucket leaves when it is ready and the link is free."""
    events, ready, free = [], 0.0, 0.0
    for seconds, nbytes in layers:
        events += [kernel(seconds), Call("all_reduce", nbytes, EVERYBODY)]
        ready += seconds
        free = max(ready, free) + alone(nbytes)
    waits = [Wait(i) for i, event in enumerate(events) if isinstance(event, Call)]
    assert took(events + waits) == pytest.approx(max(ready, free))


@given(st.lists(SECONDS, min_size=1, max_size=5), st.lists(SECONDS, min_size=1, max_size=5))
def test_streams_run_beside_each_other_until_one_waits(first, second):
    beside = [kernel(s) for s in first] + [kernel(s, stream=1) for s in second]
    assert took(beside) == pytest.approx(max(sum(first), sum(second)))
    behind = [*(kernel(s) for s in first), Mark(0), Wait(len(first), stream=1)]
    behind += [kernel(s, stream=1) for s in second]
    assert took(behind) == pytest.approx(sum(first) + sum(second))


@given(SECONDS, SECONDS, SIZES)
def test_a_message_leaves_when_both_are_there(sender, receiver, nbytes):
    out = [kernel(sender), Call("send", nbytes, EVERYBODY, 1), Wait(1)]
    into = [kernel(receiver), Call("recv", nbytes, EVERYBODY, 0), Wait(1)]
    players = replay({0: out, 1: into}, MACHINE)
    inside = MACHINE.inside
    end = max(sender, receiver) + inside.latency + nbytes / inside.bandwidth
    assert [players[rank].seconds for rank in (0, 1)] == pytest.approx([end, end])


@given(st.lists(SECONDS, min_size=2, max_size=5), st.integers(1, 6))
def test_a_pipeline_is_as_long_as_its_slowest_stage_lets_it(stages, micro):
    """Forward only: the end of each piece is the later of two ends, plus its own time."""
    tapes, ends = {}, {}
    for rank, seconds in enumerate(stages):
        events = []
        for _ in range(micro):
            if rank:
                events += [Call("recv", 0, EVERYBODY, rank - 1), Wait(len(events))]
            events.append(kernel(seconds))
            if rank < len(stages) - 1:
                events.append(Call("isend", 0, EVERYBODY, rank + 1))
        tapes[rank] = events
        for i in range(micro):
            ready = max(ends.get((rank - 1, i), 0), ends.get((rank, i - 1), 0))
            ends[rank, i] = ready + seconds
    machine = MACHINE._replace(inside=Link(0, 1e9))
    players = replay(tapes, machine)
    last = players[len(stages) - 1]
    assert last.seconds == pytest.approx(ends[len(stages) - 1, micro - 1])


def test_ranks_that_wait_for_each_other_are_named():
    both = {r: [Call("recv", 8, EVERYBODY, 1 - r), Wait(0)] for r in (0, 1)}
    with pytest.raises(
        ValueError, match="rank 0 waits for a recv with rank 1 that never ends"
    ):
        replay(both, MACHINE)


@given(SIZES)
def test_an_all_reduce_in_a_node_is_a_ring(nbytes):
    ring = ring_seconds(nbytes, 8, MACHINE.inside)
    assert alone(nbytes) == pytest.approx(ring)
    halves = [
        call_seconds(Call(name, nbytes, EVERYBODY), 0, MACHINE)
        for name in ("reduce_scatter_single", "all_gather_single")
    ]
    assert sum(halves) == pytest.approx(ring)


def test_a_group_across_nodes_uses_the_network_and_one_in_a_node_does_not():
    machine = machine_of("64 x H100")
    columns, row = tuple(range(0, 64, 8)), EVERYBODY
    across = call_seconds(Call("all_reduce", 1e9, columns), 0, machine)
    inside = call_seconds(Call("all_reduce", 1e9, row), 0, machine)
    # each of a node's cards carries its own group
    assert across == pytest.approx(ring_seconds(1e9, 8, machine.between))
    assert inside == pytest.approx(ring_seconds(1e9, 8, machine.inside))


def test_links_inside_and_between_nodes_work_at_once():
    columns = tuple(range(0, 64, 8))
    calls = [Call("all_reduce", 1e9, group) for group in (columns, EVERYBODY)]
    machine = machine_of("64 x H100")
    each = [call_seconds(call, 0, machine) for call in calls]
    assert took(calls, machine) == pytest.approx(max(each))
    assert took([calls[0]] * 2, machine) == pytest.approx(2 * each[0])


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("all_reduce", 2 * 7 / 8),
        ("all_gather_single", 7 / 8),
        ("reduce_scatter_single", 7 / 8),
        ("all_to_all_single", 7 / 8),
        ("send", 1),
        ("recv", 0),
        ("barrier", 0),
    ],
)
def test_what_a_rank_puts_on_its_link(name, share):
    assert bytes_sent(Call(name, 800, EVERYBODY, 1)) == 800 * share


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8 x Z80", "of one of A100"),
        ("H100", 'like "8 x H100"'),
        ("0 x H100", "a whole number, 1 or more"),
        ("12 x H100", "no whole nodes of 8"),
        (8, 'like "8 x H100"'),
    ],
)
def test_no_such_machine(text, words):
    with pytest.raises(ValueError, match=words):
        machine_of(text)
