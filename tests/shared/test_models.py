"""The transformer by hand: it looks back and not ahead."""

import pytest
import torch

from mgpu_tutorial.shared.models import SmallTransformer


def normed(x, weight, bias):
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_the_transformer_by_hand(heads, tied):
    """Written out place by place and head by head: each place sees itself and the past."""
    network = SmallTransformer(11, width=8, heads=heads, depth=2, tied=tied).double()
    for parameter in network.parameters():  # no two of them alike
        torch.nn.init.normal_(parameter)
    p = dict(network.named_parameters())
    tokens = torch.randint(11, (6,))
    x = p["token.weight"][tokens] + p["position.weight"][:6]
    for at in ("blocks.0.", "blocks.1."):
        n = normed(x, p[at + "attention_norm.weight"], p[at + "attention_norm.bias"])
        q, k, v = (
            (n @ p[f"{at}attention.{name}.weight"].T).split(8 // heads, -1)
            for name in ("query", "key", "value")
        )
        mixed = torch.zeros(6, 0)
        for head in range(heads):
            scores = q[head] @ k[head].T / (8 / heads) ** 0.5
            scores[torch.ones(6, 6, dtype=torch.bool).triu(1)] = float("-inf")
            mixed = torch.cat([mixed, scores.softmax(-1) @ v[head]], -1)
        x = x + mixed @ p[at + "attention.out.weight"].T
        n = normed(x, p[at + "mlp_norm.weight"], p[at + "mlp_norm.bias"])
        up = n @ p[at + "mlp.up.weight"].T + p[at + "mlp.up.bias"]
        gelu = up * 0.5 * (1 + torch.erf(up / 2**0.5))
        x = x + gelu @ p[at + "mlp.down.weight"].T + p[at + "mlp.down.bias"]
    head = p["token.weight"] if tied else p["head.weight"]
    expected = normed(x, p["norm.weight"], p["norm.bias"]) @ head.T
    torch.testing.assert_close(network(tokens[None])[0], expected)


def test_heads_share_a_width_and_tokens_have_positions():
    with pytest.raises(ValueError, match="5 heads cannot share 24 features evenly"):
        SmallTransformer(10, width=24, heads=5)
    with pytest.raises(ValueError, match="65 tokens, and there are 64 positions"):
        SmallTransformer(10, width=8)(torch.zeros(1, 65, dtype=torch.long))
