"""What the roofline, the replay of a step and the threshold of data parallelism must do."""

from collections.abc import Callable

from mgpu_tutorial.instruments.price.machine import machine_of
from mgpu_tutorial.lab.teach.build import Builder, expect
from mgpu_tutorial.shared.cost_model.links import Link
from mgpu_tutorial.the_machine import plain
from mgpu_tutorial.the_machine.plain import Kernel, Message, Wait


def is_flat_where_it_computes(attainable: Callable) -> None:
    """give the peak where an operation computes much for its bytes"""
    found = attainable(8000.0, 10.0, 100.0, 5.0)
    expect(found, 100.0, "800 operations a byte, peak 100, 5 bytes per second: the rate")


def is_sloped_where_it_moves(attainable: Callable) -> None:
    """give what the bytes allow where it computes little for them"""
    found = attainable(30.0, 10.0, 100.0, 5.0)
    expect(found, 15.0, "30 operations on 10 bytes, peak 100, 5 bytes per second: the rate")
    found = attainable(300.0, 100.0, 100.0, 5.0)
    what = "ten times the operations and ten times the bytes: the same rate"
    expect(found, 15.0, what)
    found = attainable(1.0, 10.0, 100.0, 5.0)
    expect(found, 0.5, "1 operation on 10 bytes, as an addition has few: the rate")


def meets_at_the_ridge(attainable: Callable) -> None:
    """meet at the ridge, and give 0 to a copy, which computes nothing"""
    found = attainable(200.0, 10.0, 100.0, 5.0)
    expect(found, 100.0, "20 operations a byte, which is peak / bandwidth: the rate")
    found = attainable(5000.0, 10.0, 1000.0, 1.0)
    expect(found, 500.0, "500 operations a byte, peak 1,000, 1 byte per second: the rate")
    expect(attainable(0.0, 10.0, 100.0, 5.0), 0.0, "no operation on 10 bytes: the rate")


# 100 operations, 10 bytes of memory and 5 bytes of link per second, a latency of 1 s
SLOW = machine_of("8 x H100")._replace(
    flops=100.0, memory_rate=10.0, inside=Link(1.0, 5.0), kernel=0.0
)


def lasts(replay_step: Callable, tape: list, seconds: float, what: str) -> None:
    """Replay a tape on the slow machine."""
    expect(replay_step(list(tape), SLOW), seconds, f"{what}: the seconds", 1e-9)


def adds_kernels(replay_step: Callable) -> None:
    """let kernels follow each other, each for the longer of its two roads"""
    lasts(replay_step, [Kernel(300, 10)], 3.0, "a kernel of 3 s of operations, 1 s of bytes")
    lasts(replay_step, [Kernel(100, 40)], 4.0, "a kernel of 1 s of operations, 4 s of bytes")
    tape = [Kernel(300, 10), Kernel(100, 40)]
    lasts(replay_step, tape, 7.0, "both, one after the other")


def sends_while_it_computes(replay_step: Callable) -> None:
    """let a message run beside the kernels that follow"""
    send = Message(10, 2)  # 2 s of latency and 2 s of bytes
    lasts(replay_step, [send], 4.0, "a message of 2 latencies of 1 s and 2 s of bytes")
    what = "a kernel of 3 s, a message of 4 s, a kernel of 3 s"
    lasts(replay_step, [Kernel(300, 0), send, Kernel(300, 0)], 7.0, what)
    what = "a kernel of 3 s, a message of 4 s, a kernel of 6 s"
    lasts(replay_step, [Kernel(300, 0), send, Kernel(600, 0)], 9.0, what)


def queues_on_the_link(replay_step: Callable) -> None:
    """let a message begin when it is issued and the link is free, while the GPU goes on"""
    send = Message(10, 2)
    what = "a message of 4 s, a kernel of 1 s, a message of 4 s"
    lasts(replay_step, [send, Kernel(100, 0), send], 8.0, what)
    what = "a message of 4 s, a kernel of 6 s, a message of 4 s"
    lasts(replay_step, [send, Kernel(600, 0), send], 10.0, what)
    what = "two messages of 4 s, a kernel of 9 s"
    lasts(replay_step, [send, send, Kernel(900, 0)], 9.0, what)


def stands_still_in_a_wait(replay_step: Callable) -> None:
    """let a wait hold the kernels until its own message has arrived, and no longer"""
    send = Message(10, 2)
    what = "a message of 4 s, a wait for it, a kernel of 3 s"
    lasts(replay_step, [send, Wait(0), Kernel(300, 0)], 7.0, what)
    what = "a message of 4 s, a kernel of 6 s, a wait for the message, a kernel of 3 s"
    lasts(replay_step, [send, Kernel(600, 0), Wait(0), Kernel(300, 0)], 9.0, what)
    what = "two messages of 4 s, a wait for the first, a kernel of 5 s"
    lasts(replay_step, [send, send, Wait(0), Kernel(500, 0)], 9.0, what)
    what = "two messages of 4 s and a wait for the first"
    lasts(replay_step, [send, send, Wait(0)], 8.0, what)
    what = "a kernel of 1 s, a message of 4 s, a wait for place 1, a kernel of 3 s"
    lasts(replay_step, [Kernel(100, 0), send, Wait(1), Kernel(300, 0)], 8.0, what)


def balances(tokens_to_hide: Callable) -> None:
    """give the tokens at which 4 operations take as long as a ring sends, per parameter"""
    found = tokens_to_hide(4000.0, 1.0, 4, 5)
    what = (
        "4,000 operations and 1 byte per second, gradients of 5 bytes, 4 ranks, so that a "
        "ring sends 1.5 times the tensor: the tokens"
    )
    expect(found, 7500.0, what, 1e-6)
    found = tokens_to_hide(4000.0, 10.0, 4, 5)
    expect(found, 750.0, "with ten times the bandwidth: the tokens", 1e-6)
    found = tokens_to_hide(40_000.0, 10.0, 4, 5)
    expect(found, 7500.0, "on a device ten times as fast: the tokens", 1e-6)


def counts_the_ring(tokens_to_hide: Callable) -> None:
    """count a ring's bytes on N ranks, which for one rank are none"""
    expect(tokens_to_hide(4000.0, 1.0, 1, 4), 0.0, "one rank: the tokens", 1e-6)
    expect(tokens_to_hide(4000.0, 1.0, 8, 4), 7000.0, "8 ranks: the tokens", 1e-6)


def counts_bytes(tokens_to_hide: Callable) -> None:
    """take two bytes per gradient where nothing is said"""
    what = "4,000 operations and 1 byte per second, 2 ranks: the tokens"
    expect(tokens_to_hide(4000.0, 1.0, 2), 2000.0, what, 1e-6)


build = Builder(
    "the_machine",
    {
        plain.attainable: [
            is_flat_where_it_computes,
            is_sloped_where_it_moves,
            meets_at_the_ridge,
        ],
        plain.replay_step: [
            adds_kernels,
            sends_while_it_computes,
            queues_on_the_link,
            stands_still_in_a_wait,
        ],
        plain.tokens_to_hide: [balances, counts_the_ring, counts_bytes],
    },
)
