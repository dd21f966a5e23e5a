"""The cache changes nothing: the model writes what it would write without one."""

import pytest
import torch

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.language_model import ask, checkpoint
from mgpu_tutorial.language_model.model import decode, encode, new_model


def written_by_hand(prompt, count):
    model = new_model()
    checkpoint.load(checkpoint.SHIPPED, model)
    characters = encode(prompt)
    for _ in range(count):
        best = model(characters[None])[0, -1].argmax()
        characters = torch.cat([characters, best[None]])
    return decode(characters)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 4])
def test_ranks_write_what_one_process_writes_without_a_cache(ranks, world_size):
    for found, margin in ranks(world_size, ask.write, "Returns ", 12).results:
        assert found == written_by_hand("Returns ", 12)
        assert margin > 1e-4


def test_a_text_that_is_too_long_is_refused_and_one_that_just_fits_is_not(ranks):
    with pytest.raises(RankFailed, match="60 \\+ 10 characters: the model sees 64"):
        ranks(1, ask.write, "x" * 60, 10)
    text, _ = ranks(1, ask.write, "x" * 60, 4).results[0]
    assert len(text) == 64
