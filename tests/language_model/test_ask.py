"""The cache changes nothing: the model writes what it would write without one."""

import pytest
import torch

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.language_model import PARTS, ask
from mgpu_tutorial.language_model.model import SHIPPED, encode, load_checkpoint

_, _, (WHOLE,) = load_checkpoint(SHIPPED)


def written_by_hand(prompt, count):
    characters = encode(prompt)
    for _ in range(count):
        best = WHOLE.float()(characters[None])[0, -1].argmax()
        characters = torch.cat([characters, best[None]])
    return characters


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 4])
def test_ranks_write_what_one_process_writes_without_a_cache(ranks, world_size):
    given = WHOLE.float(), encode("Returns "), 56, PARTS  # 64 together, as many as it sees
    for found, margin in ranks(world_size, ask.write, *given).results:
        assert torch.equal(found, written_by_hand("Returns ", 56))
        assert margin > 1e-4


def test_more_characters_than_the_model_sees_are_refused(ranks):
    with pytest.raises(RankFailed, match="55 \\+ 10 characters: the model sees 64"):
        ranks(1, ask.write, WHOLE.float(), encode("x" * 55), 10, PARTS)
