"""What no plain tape and no batch can be is refused in one sentence."""

import pytest

from mgpu_tutorial.instruments.price import price
from mgpu_tutorial.instruments.price.tape import Call, Mark
from mgpu_tutorial.instruments.price.tape import Wait as Waited
from mgpu_tutorial.the_machine import laptop, memory, plain, together


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: plain.plain_tape([Call("broadcast", 8, (0, 1))]), "expected all_reduce"),
        (lambda: plain.plain_tape([Mark(1), Waited(0)]), "a mark of a stream"),
    ],
)
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    "words, worker, given",
    [
        ("2 sequences", memory.train_alone, (str, 1, 3)),
        ("steps", memory.train_alone, (str, 1, 1, 0)),
        ("1000", together.train_together, (1, 1000)),
    ],
)
def test_a_worker_refuses_before_it_sends(refused, words, worker, given):
    refused(2, ValueError(words), worker, *given)


def test_one_rank_has_nobody_to_send_to(refused):
    refused(1, ValueError("1"), laptop.first_look)


@pytest.mark.slow
def test_a_price_hands_the_refusal_on():
    with pytest.raises(RuntimeError, match="2 sequences have no 4 equal parts"):
        price(memory.train_alone, 1, micro_batches=4)
