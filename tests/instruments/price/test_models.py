"""The models compute what their papers say, on real numbers and in small."""

import pytest
import torch

from mgpu_tutorial.instruments.price.models import (
    llama,
    llama_3_8b,
    mpt_7b,
    rotated,
    turns_of,
)


def test_rotary_embedding_turns_each_pair_by_its_angle():
    x = torch.randn(2, 5, 3, 8)  # (batch, tokens, heads, per head)
    found = rotated(x, turns_of(tokens=7, per_head=8))
    for token in range(5):
        for pair in range(4):
            angle = torch.tensor(token * 500_000 ** (-2 * pair / 8))
            a, b = x[:, token, :, 2 * pair], x[:, token, :, 2 * pair + 1]
            expected = (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos())
            for i, each in enumerate(expected):
                torch.testing.assert_close(found[:, token, :, 2 * pair + i], each)


def test_a_token_sees_only_those_before_it():
    model = llama(2, 32, 4, 64, 2, 100, 16)
    tokens = torch.randint(100, (1, 10))
    changed = tokens.clone()
    changed[0, 6] = (tokens[0, 6] + 1) % 100
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize("layers", [-1, 0, 1.5, "2"])
@pytest.mark.parametrize("model", [llama_3_8b, mpt_7b])
def test_a_model_has_some_layers_or_is_refused(model, layers):
    with pytest.raises(ValueError, match=f"layers must be a whole number, .*{layers!r}"):
        model(layers)


def test_heads_must_divide():
    with pytest.raises(ValueError, match="12 heads and 8 of keys and values: each number"):
        llama(1, 96, 12, 64, kv_heads=8)
