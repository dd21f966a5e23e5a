"""What no device, no tape and no batch can be is refused in one sentence."""

import pytest

from mgpu_tutorial.collectives import ring
from mgpu_tutorial.instruments.price import price
from mgpu_tutorial.instruments.price.machine import machine_of
from mgpu_tutorial.instruments.price.tape import Call, Mark
from mgpu_tutorial.instruments.price.tape import Wait as Waited
from mgpu_tutorial.the_machine import laptop, memory, plain, together
from mgpu_tutorial.the_machine.plain import Kernel, Message, Wait

NODE = machine_of("8 x H100")


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: plain.attainable(-1, 1, 1, 1), "does 0 operations or more"),
        (lambda: plain.attainable(1, 0, 1, 1), "moves more than 0 bytes"),
        (lambda: plain.attainable(float("nan"), 1, 1, 1), "does 0 operations or more"),
        (lambda: plain.attainable(1, 1, 0, 1), "peak must be above 0, got 0"),
        (lambda: plain.attainable(1, 1, 1, -2), "bandwidth must be above 0, got -2"),
        (lambda: plain.replay_step([Wait(0)], NODE), "event 0 waits for event 0"),
        (lambda: plain.replay_step([Kernel(1, 1), Wait(0)], NODE), "no earlier message"),
        (lambda: plain.replay_step([Wait(1), Message(1, 1)], NODE), "give the place of one"),
        (lambda: plain.replay_step([Kernel(-1e15, 1)], NODE), "event 0 is Kernel"),
        (lambda: plain.replay_step([Kernel(float("nan"), 1)], NODE), "numbers that are 0 or"),
        (lambda: plain.replay_step([Message(1e9, -2)], NODE), "event 0 is Message"),
        (lambda: plain.replay_step([Message("1", 2)], NODE), "event 0 is Message"),
        (lambda: plain.replay_step([1e12], NODE), "event 0 is 1000000000000.0: give a Ker"),
        (
            lambda: plain.replay_step([Kernel(1, 1)], "8 x H100"),
            "machine is '8 x H100': give",
        ),
        (lambda: plain.plain_tape([Call("broadcast", 8, (0, 1))]), "expected all_reduce"),
        (lambda: plain.plain_tape([Mark(1), Waited(0)]), "a mark of a stream"),
        (lambda: plain.tokens_to_hide(0, 1, 2), "flops must be above 0, got 0"),
        (lambda: plain.tokens_to_hide(1, 0, 2), "bandwidth must be above 0, got 0"),
        (lambda: plain.tokens_to_hide(1, 1, 0), "ranks must be a whole number"),
        (lambda: plain.tokens_to_hide(1, 1, 2.5), "ranks must be a whole number"),
        (lambda: plain.tokens_to_hide(1, 1, 2, 0), "nbytes must be above 0, got 0"),
    ],
)
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    "words, worker, given",
    [
        ("a product needs a size, 1 or more, got ()", laptop.products, ()),
        ("a product needs a size, 1 or more, got (16, 0)", laptop.products, (16, 0)),
        ("4 bytes or more and then more", laptop.reduce_two, (ring.ring_all_reduce, 2, 8)),
        ("4 bytes or more and then more", laptop.reduce_two, (ring.ring_all_reduce, 8, 8)),
        ("expected two ranks, a width", laptop.first_look, (0, 2**20)),
        ("4,096 bytes or more", laptop.first_look, (8, 16)),
        ("two sequences make 1 or 2 micro-batches, got 3", memory.train_alone, (str, 1, 3)),
        ("steps must be a whole number", memory.train_alone, (str, 1, 1, 0)),
        ("sequences of 1,024, got 1000", together.train_together, (1, 1000)),
        ("sequences of 1,024, got 0", together.train_together, (1, 0)),
    ],
)
def test_a_worker_refuses_before_it_sends(refused, words, worker, given):
    refused(2, words, worker, *given)


def test_one_rank_has_nobody_to_send_to(refused):
    refused(1, "expected two ranks", laptop.first_look)


@pytest.mark.slow
def test_a_price_hands_the_refusal_on():
    with pytest.raises(RuntimeError, match="1 or 2 micro-batches, got 4"):
        price(memory.train_alone, 1, micro_batches=4)
