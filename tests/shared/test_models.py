"""The two networks by hand; the transformer looks back and not ahead."""

import pytest
import torch
from torch.nn import functional as F

from mgpu_tutorial.shared.models import SmallConvNet, SmallTransformer


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("norm", ["", "batch", "group"])
def test_the_small_network_by_hand(dropout, norm):
    torch.manual_seed(0)
    network, images = SmallConvNet(dropout, norm), torch.randn(4, 1, 28, 28)
    p = dict(network.named_parameters())
    torch.manual_seed(1)
    log_probabilities = network(images)
    torch.manual_seed(1)
    x = F.conv2d(images, p["conv1.weight"], p["conv1.bias"])
    if norm == "batch":
        x = F.batch_norm(x, None, None, p["norm.weight"], p["norm.bias"], training=True)
    if norm == "group":
        x = F.group_norm(x, 2, p["norm.weight"], p["norm.bias"])
    x = F.max_pool2d(x, 2).relu()
    x = F.dropout(F.conv2d(x, p["conv2.weight"], p["conv2.bias"]), dropout)
    x = F.max_pool2d(x, 2).relu().flatten(1)
    x = F.dropout((x @ p["fc1.weight"].T + p["fc1.bias"]).relu(), dropout)
    expected = (x @ p["fc2.weight"].T + p["fc2.bias"]).log_softmax(1)
    torch.testing.assert_close(log_probabilities, expected)
    assert count(network) == 21_840 + (20 if norm else 0)


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.fixture
def tokens():
    return torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(0))


def model(**more):
    torch.manual_seed(0)
    return SmallTransformer(11, width=8, heads=4, depth=2, max_length=6, **more).double()


def test_the_parameters_by_hand():
    block = 2 * (8 + 8) + 4 * 8 * 8 + (8 * 32 + 32) + (32 * 8 + 8)
    assert count(model()) == 11 * 8 + 6 * 8 + 2 * block + 2 * 8
    assert count(model(tied=False)) == count(model()) + 11 * 8
    assert count(model(kv_heads=2)) == count(model()) - 2 * 2 * 4 * 8


def test_a_tied_head_is_the_embedding():
    tied = model()
    assert tied.head.weight is tied.token.weight
    assert model(tied=False).head.weight is not model(tied=False).token.weight


def test_a_place_does_not_see_what_comes_later(tokens):
    later = tokens.clone()
    later[:, 4:] = (later[:, 4:] + 1) % 11
    network = model()
    before, after = network(tokens), network(later)
    assert before.shape == (2, 6, 11)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.isclose(before[:, 4:], after[:, 4:]).all()


def test_a_place_sees_what_came_before_and_where_it_stands(tokens):
    earlier = tokens.clone()
    earlier[:, 0] = (earlier[:, 0] + 1) % 11
    network = model()
    assert not torch.allclose(network(tokens)[:, 5], network(earlier)[:, 5])
    same = torch.zeros(1, 6, dtype=torch.long)
    assert not torch.allclose(network(same)[0, 0], network(same)[0, 1])


def test_attention_by_hand(tokens):
    network = model(kv_heads=2)
    attention = network.blocks[0].attention
    x = torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q = attention.query(x).view(2, 6, 4, 2)
    k = attention.key(x).view(2, 6, 2, 2)
    v = attention.value(x).view(2, 6, 2, 2)
    expected = torch.zeros(2, 6, 4, 2, dtype=torch.float64)
    for head in range(4):
        shared = head // 2  # two heads share their keys and values
        for place in range(6):
            seen = slice(0, place + 1)
            scores = (q[:, place, None, head] * k[:, seen, shared]).sum(-1) / 2**0.5
            weights = scores.softmax(-1)[..., None]
            expected[:, place, head] = (weights * v[:, seen, shared]).sum(1)
    torch.testing.assert_close(attention(x), attention.out(expected.flatten(2)))


@pytest.mark.parametrize("heads", [(3, None), (4, 3), (4, 8)])
def test_heads_must_divide(heads):
    with pytest.raises(ValueError, match="heads must divide a width of 8"):
        SmallTransformer(11, 8, *heads[:1], kv_heads=heads[1])


def test_a_block_adds_attention_and_perceptron_to_its_input():
    """Written out for one head, with the block's numbers and none of its code."""
    torch.manual_seed(0)
    block = SmallTransformer(64, width=8, heads=1, depth=1).blocks[0].double()
    for parameter in block.parameters():  # no two of them alike
        torch.nn.init.normal_(parameter)
    p = {name: value.detach() for name, value in block.named_parameters()}
    x = torch.randn(5, 8, dtype=torch.float64)

    def normed(x, name):
        apart = (x - x.mean(-1, keepdim=True)) / (
            x.var(-1, False, keepdim=True) + 1e-5
        ).sqrt()
        return apart * p[f"{name}.weight"] + p[f"{name}.bias"]

    n = normed(x, "attention_norm")
    q, k, v = (n @ p[f"attention.{name}.weight"].T for name in ("query", "key", "value"))
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    scores = (q @ k.T / 8**0.5).masked_fill(~seen, float("-inf"))
    x_then = x + scores.softmax(-1) @ v @ p["attention.out.weight"].T
    up = normed(x_then, "mlp_norm") @ p["mlp.up.weight"].T + p["mlp.up.bias"]
    gelu = up * 0.5 * (1 + torch.erf(up / 2**0.5))
    expected = x_then + gelu @ p["mlp.down.weight"].T + p["mlp.down.bias"]
    torch.testing.assert_close(block(x[None])[0], expected)
