"""Documents that stand end to end in one sequence, and must not see each other."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mgpu_tutorial.long_sequences.ring import is_later


def packed(lengths: Sequence[int]) -> tuple[Callable, Tensor, Tensor]:
    """Who hides from whom, and the position and weight of each token.

    `hides(queries, keys)`, of their places in the sequence, is for `ring_attention`.
    Positions begin at 0 in each document. A token's loss is multiplied by its weight. Each
    document's weights have the same sum, and all together 1. A document's last token, which
    has no label, has 0.
    """
    document, positions, weights = [], [], []
    for number, length in enumerate(lengths):
        document += [number] * length
        positions += range(length)
        labels = length - 1
        weights += [1 / labels for _ in range(labels)] + [0.0]
    document, weights = torch.tensor(document), torch.tensor(weights)

    def hides(queries: Tensor, keys: Tensor) -> Tensor:
        own = document.to(keys.device)
        elsewhere = own[queries][:, None] != own[keys]
        return is_later(queries, keys) | elsewhere

    return hides, torch.tensor(positions), weights / weights.sum()
