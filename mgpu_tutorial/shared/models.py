"""Networks that several chapters share."""

import torch
from torch import nn
from torch.nn.functional import log_softmax, max_pool2d, relu, scaled_dot_product_attention

NORMS = {
    "": nn.Identity,
    "batch": lambda: nn.BatchNorm2d(10),
    "group": lambda: nn.GroupNorm(2, 10),
}


class SmallConvNet(nn.Module):
    """A small convolutional network for MNIST's digits: 21 840 parameters.

    Takes images (N, 1, 28, 28) and returns log probabilities (N, 10). `dropout` is 0 where
    two runs shall be equal: dropout draws other numbers on every rank. `norm` puts a
    normalisation behind the first convolution: "batch", "group", or "" for none.
    """

    def __init__(self, dropout: float = 0.0, norm: str = "") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.norm = NORMS[norm]()
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.drop = nn.Dropout(dropout)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = relu(max_pool2d(self.norm(self.conv1(images)), 2))
        x = relu(max_pool2d(self.drop(self.conv2(x)), 2))
        x = relu(self.fc1(x.flatten(1)))
        return log_softmax(self.fc2(self.drop(x)), dim=1)


class SmallTransformer(nn.Module):
    """A small language model: embedding, a stack of blocks, norm, and a head.

    Takes token numbers (batch, sequence) and returns logits (batch, sequence, vocabulary).
    With `tied` the head's weights are those of the embedding, as in GPT-2.
    """

    def __init__(
        self, vocabulary: int, width: int, heads: int = 4, depth: int = 2, tied: bool = True
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(64, width)  # so long a sequence may be
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] > self.position.num_embeddings:
            most = self.position.num_embeddings
            raise ValueError(f"{tokens.shape[1]} tokens, and there are {most} positions")
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    """One layer of a transformer: attention, then an MLP, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Each place looks at itself and at those before it; (batch, sequence, width) both ways.

    How many heads it has follows from its weights, so that a rank may hold a part of them.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads cannot share {width} features evenly")
        self.per_head = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # (batch, heads, sequence, per head)
        q, k, v = (
            part(x).unflatten(-1, (-1, self.per_head)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))
