"""What is sent is what arrives, and the mistakes are the ones we describe."""

import pytest
import torch

from mgpu_tutorial import point_to_point as p2p
from mgpu_tutorial.lab import RankFailed, RanksHung, launch


def test_the_receiver_ends_with_the_senders_value():
    assert launch(p2p.blocking, 2).stdout == [
        "before: 1\nafter:  1\n",
        "before: 0\nafter:  1\n",
    ]


def test_a_short_message_leaves_the_rest_of_the_buffer():
    said = launch(p2p.unequal_sizes, 2, sent=2, room=4).stdout[1]
    assert said == "tensor([ 1.,  1., -1., -1.])\n"


def test_a_wrong_dtype_delivers_bits():
    bits = torch.tensor([1.0]).view(torch.int32).item()
    assert launch(p2p.wrong_dtype, 2).stdout[1].startswith(f"{bits} ")


def test_a_message_that_is_too_long_ends_the_receiver():
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGABRT") as caught:
        launch(p2p.unequal_sizes, 2, sent=4, room=2)
    assert "16 vs 8" in str(caught.value)


@pytest.mark.parametrize("world_size", [2, 4])
def test_messages_from_anybody_are_told_apart(world_size):
    expected = {r: r**2 for r in range(1, world_size)}
    assert launch(p2p.from_anybody, world_size).stdout[0] == f"{expected}\n"


def test_tags_select_the_message():
    assert launch(p2p.tags, 2).stdout[1] == "tag 2: 20\ntag 1: 10\n"


@pytest.mark.parametrize("elements", [1, 1_000_000])
def test_a_send_waits_for_its_receiver(elements):
    in_send, _ = launch(p2p.late_receiver, 2, delay=0.8, elements=elements).results
    assert in_send > 0.5


def test_a_send_does_not_wait_until_the_receiver_looks():
    in_send, in_recv = launch(p2p.late_receiver, 2, delay=0, busy=0.8).results
    assert in_send < 0.4 and in_recv > 0.7


def test_two_sends_that_both_come_first_wait_for_each_other():
    with pytest.raises(RanksHung, match="deadlock: 0 → 1 → 0"):
        launch(p2p.both_send_first, 2, timeout=1, trace=True)


def test_a_group_with_a_limit_gives_up():
    said = launch(p2p.send_first_with_limit, 2, seconds=1).results
    assert any("Timed out waiting 1000ms for send operation" in text for text in said)
    assert all("received" not in text for text in said)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_token_returns_as_the_sum(world_size):
    assert launch(p2p.pass_along, world_size).results[0] == sum(range(world_size))
