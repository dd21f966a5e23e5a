"""The transformer by hand: it looks back and not ahead."""

import pytest
import torch

from mgpu_tutorial.shared.models import SmallTransformer


def model(**more):
    torch.manual_seed(0)
    return SmallTransformer(11, width=8, depth=2, max_length=6, **{"heads": 4} | more)


@pytest.mark.parametrize("heads", [(3, None), (4, 3), (4, 8)])
def test_heads_must_divide(heads):
    with pytest.raises(ValueError, match="heads must divide a width of 8"):
        model(heads=heads[0], kv_heads=heads[1])


def normed(x, weight, bias):
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, None), (4, None), (4, 2), (4, 1)])
@pytest.mark.parametrize("tied", [True, False])
def test_the_transformer_by_hand(heads, kv_heads, tied):
    """Written out place by place and head by head: each place sees itself and the past."""
    network = model(heads=heads, kv_heads=kv_heads, tied=tied).double()
    for parameter in network.parameters():  # no two of them alike
        torch.nn.init.normal_(parameter)
    p = dict(network.named_parameters())
    tokens = torch.randint(11, (6,))
    x = p["token.weight"][tokens] + p["position.weight"]
    for at in ("blocks.0.", "blocks.1."):
        n = normed(x, p[at + "attention_norm.weight"], p[at + "attention_norm.bias"])
        q, k, v = (
            (n @ p[f"{at}attention.{name}.weight"].T).split(8 // heads, -1)
            for name in ("query", "key", "value")
        )
        mixed = torch.zeros(6, 0)
        for head in range(heads):
            shared = head * len(k) // heads  # neighbours share their keys and values
            scores = q[head] @ k[shared].T / (8 / heads) ** 0.5
            scores[torch.ones(6, 6, dtype=torch.bool).triu(1)] = float("-inf")
            mixed = torch.cat([mixed, scores.softmax(-1) @ v[shared]], -1)
        x = x + mixed @ p[at + "attention.out.weight"].T
        n = normed(x, p[at + "mlp_norm.weight"], p[at + "mlp_norm.bias"])
        up = n @ p[at + "mlp.up.weight"].T + p[at + "mlp.up.bias"]
        gelu = up * 0.5 * (1 + torch.erf(up / 2**0.5))
        x = x + gelu @ p[at + "mlp.down.weight"].T + p[at + "mlp.down.bias"]
    head = p["token.weight"] if tied else p["head.weight"]
    expected = normed(x, p["norm.weight"], p["norm.bias"]) @ head.T
    torch.testing.assert_close(network(tokens[None])[0], expected)
