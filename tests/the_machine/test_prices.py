"""What the page says of a step's time and memory, against plain references."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.collectives import ring
from mgpu_tutorial.instruments.price.machine import machine_of
from mgpu_tutorial.instruments.price.pricing import Priced, tape_all
from mgpu_tutorial.instruments.price.tape import Operation
from mgpu_tutorial.shared.cost_model import links
from mgpu_tutorial.the_machine import figures, laptop, memory, plain, together
from mgpu_tutorial.the_machine.plain import Kernel, Message, Wait

NODE = machine_of("8 x H100")
rates = st.floats(1e6, 1e16)


@given(st.just(0.0) | st.floats(1, 1e15), st.floats(1, 1e15), rates, rates)
def test_no_operation_is_faster_than_either_road(flops, nbytes, peak, bandwidth):
    rate = plain.attainable(flops, nbytes, peak, bandwidth)
    if rate:
        seconds = flops / rate
        assert seconds == pytest.approx(max(flops / peak, nbytes / bandwidth))


@given(rates, rates, st.integers(2, 4096), st.sampled_from([1, 2, 4]))
def test_at_the_threshold_backward_and_the_ring_take_as_long(flops, bandwidth, ranks, size):
    parameters, link = 8_000_000, links.Link(0.0, bandwidth)
    tokens = plain.tokens_to_hide(flops, bandwidth, ranks, size)
    backward = 4 * parameters * tokens / flops
    assert backward == pytest.approx(links.ring_seconds(size * parameters, ranks, link))


def test_messages_hide_from_the_threshold_on():
    """A layer a kernel: with a tenth more tokens the last message alone sticks out."""
    tokens = plain.tokens_to_hide(NODE.flops, NODE.inside.bandwidth, 8)
    free = NODE._replace(inside=NODE.inside._replace(latency=0.0))
    seconds = {}
    for share in (0.5, 1.1):
        tape = []
        for _ in range(100):
            tape += [Kernel(4 * 1e8 * share * tokens, 0), Message(2 * 7 / 8 * 2e8, 14)]
        tape += [Wait(place) for place in range(1, 200, 2)]
        seconds[share] = plain.replay_step(tape, free), 4e10 * share * tokens / NODE.flops
    one = 2 * 7 / 8 * 2e8 / NODE.inside.bandwidth
    assert seconds[1.1][0] == pytest.approx(seconds[1.1][1] + one)
    assert seconds[0.5][0] == pytest.approx(seconds[0.5][1] / 100 + 100 * one)


@pytest.fixture(scope="module")
def steps():
    """Both orders of two layers on 8 ranks, and the second with twice the layers."""
    given = [{"early": False}, {}, {"layers": 4}]
    jobs = [(8, (), {"layers": 2, "tokens": 1024} | more) for more in given]
    tapes = tape_all(together.train_together, jobs, timeout=120)
    return [
        Priced(together.train_together, 8, (), job[2], taped, NODE)
        for job, taped in zip(jobs, tapes, strict=True)
    ]


@pytest.mark.slow
def test_the_readers_replay_agrees_with_the_instrument(steps):
    for found in steps:
        tape = plain.plain_tape(found.tapes[0].events)
        seconds = plain.replay_step(tape, NODE._replace(kernel=0.0))
        without = found.on(NODE._replace(kernel=0.0))
        assert seconds == pytest.approx(without.seconds, rel=1e-9)


@pytest.mark.slow
def test_early_messages_hide_and_late_ones_do_not(steps):
    late, early, _ = steps
    parameters = 2 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14_336 + 2 * 4096)
    assert late.sent() == early.sent() == 2 * 7 / 8 * 2 * parameters
    sending = 2 * 7 / 8 * 2 * parameters / NODE.inside.bandwidth
    assert late.exposed > sending > early.exposed
    assert late.seconds - late.exposed == pytest.approx(early.seconds - early.exposed)


@pytest.mark.slow
def test_the_tape_counts_what_paper_does(steps):
    for layers, found in ((2, steps[1]), (4, steps[2])):
        events = found.tapes[0].events
        taped = sum(event.flops for event in events if isinstance(event, Operation))
        parameters = layers * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14_336)
        scores = layers * 3 * 4 * 1024 * 1024 / 2 * 4096
        assert taped == pytest.approx(6 * parameters * 1024 + scores, rel=0.01)


KEPT = {
    "everything": {},
    "halves": {"micro_batches": 2},
    "products": {"keeping": memory.only_products},
    "inputs": {"keeping": memory.only_inputs},
    "host": {"keeping": memory.on_the_host},
    "one layer": {"layers": 1},
    "three layers": {"layers": 3},
}


@pytest.fixture(scope="module")
def kept():
    variants = {name: {"layers": 2} | given for name, given in KEPT.items()}
    return figures.price_each(memory.train_alone, variants, "1 x A100-40GB")


@pytest.mark.slow
def test_each_switch_trades_time_for_memory(kept):
    everything = kept["everything"]
    for name in ("halves", "products", "inputs", "host"):
        assert kept[name].fullest().total() < everything.fullest().total(), name
        assert kept[name].seconds > everything.seconds, name
    order = ["everything", "products", "inputs", "host"]
    full = [kept[name].fullest()["activations"] for name in order]
    assert full == sorted(full, reverse=True)
    state = everything.fullest()["parameters"], everything.fullest()["optimizer"]
    assert state[1] == pytest.approx(2 * state[0], rel=1e-6)


@pytest.mark.slow
def test_offloading_waits_for_each_byte_twice(kept):
    """In forward and again in backward; the rest of the step stays as it was."""
    events = kept["host"].tapes[0].events
    sleeps = [e.seconds for e in events if isinstance(e, Operation) and e.seconds]
    half = len(sleeps) // 2
    assert sorted(sleeps[:half]) == sorted(sleeps[half:])
    longer = kept["host"].seconds - kept["everything"].seconds
    assert longer == pytest.approx(sum(sleeps), rel=0.02)


@pytest.mark.slow
def test_few_layers_tell_how_much_more_layers_hold(kept):
    few = {1: kept["one layer"], 2: kept["everything"]}
    three = kept["three layers"].fullest().total() / 1e9
    assert figures.full_size(few, layers=3) == pytest.approx(three, rel=1e-3)


@pytest.mark.slow
def test_the_second_step_holds_more_than_the_first():
    tapes = tape_all(memory.train_alone, [(1, (), {"layers": 1, "steps": 2})], timeout=120)
    both = Priced(memory.train_alone, 1, (), {}, tapes[0], machine_of("1 x H100"))
    curve = both.memory()
    middle = next(moment for moment, kinds in curve if kinds["optimizer"])
    first, second = (
        max(kinds.total() for moment, kinds in curve if (moment >= middle) == later)
        for later in (False, True)
    )
    moments = 2 * both.fullest()["parameters"]
    assert second - first == pytest.approx(moments, rel=0.01)


def test_recomputation_and_offloading_leave_the_gradients_as_they_are():
    """In small, with numbers: all that is wrapped computes what was not wrapped."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(8, 8), torch.randn(3, 8)
    forward = lambda x: torch.relu(layer(x))  # noqa: E731
    found = []
    for keeping in (memory.everything, memory.only_inputs, memory.only_products):
        layer.zero_grad()
        keeping(forward)(x.clone().requires_grad_()).sum().backward()
        found.append(layer.weight.grad.clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_eight_times_the_gpus_take_nearly_the_same_time():
    some, more = (figures.ways(ranks)["by nodes"](1e9) for ranks in (128, 1024))
    assert some == pytest.approx(12.4e-3, abs=1e-4)
    assert more == pytest.approx(13.9e-3, abs=1e-4)


@pytest.mark.parametrize("ranks, place", figures.PLACES.items())
def test_a_frame_names_the_fastest_way_for_each_size(ranks, place):
    frame = figures.ring_or_tree().frames[list(figures.PLACES).index(ranks)]
    found = figures.ways(ranks)
    said = frame.text.split("The fastest: ")[1].split(". 1 GB")[0]
    for nbytes, place_of_name in ((1e3, 0), (1e10, -1)):
        fastest = min(found, key=lambda name: found[name](nbytes))
        assert said.split("; ")[place_of_name].startswith(fastest), (said, place)


def test_each_way_has_a_stroke_of_its_own():
    """Ring, tree and by nodes can be told apart without their colours."""
    frame = figures.ring_or_tree().frames[-1]
    strokes = {}
    for name, (colour, _) in figures.LOOKS.items():
        curve = [
            part for part in frame.parts if f"stroke='{colour}' stroke-width='2.6'" in part
        ]
        strokes[name] = {part.partition("stroke-dasharray=")[2] for part in curve}
        assert len(curve) == len(figures.SIZES) - 1
    assert len(set(map(frozenset, strokes.values()))) == 3, strokes


def test_this_machine_is_measured(ranks):
    rates = ranks(1, laptop.products, 8, 64).results[0]
    intensity = {name: found[0] for name, found in rates.items()}
    assert intensity == pytest.approx({8: 8 / 6, 64: 64 / 6, "addition": 1 / 12})
    assert all(rate > 0 for _, rate in rates.values())
    call = ring.ring_all_reduce, 8, 400_000
    assert len(ranks(2, laptop.reduce_two, *call).results[0]) == 2
    looks = ranks(2, laptop.first_look, 16, 2**14).results
    assert all(len(rates) == 5 and min(rates.values()) > 0 for rates in looks)
