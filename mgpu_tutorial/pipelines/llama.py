"""Two steps of a model of Llama's kind in a pipeline: `sizes.train` with stages."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab import span
from mgpu_tutorial.pipelines.work import require_untied


def cut(model: nn.Sequential, layers: Sequence[int]) -> list[nn.Sequential]:
    """So many of the layers for each stage; the embedding goes first, norm and head last.

    Raises ValueError where the stages would have more or fewer layers than the model, or a
    parameter of each other.
    """
    ends = list(accumulate(layers, initial=1))  # the embedding is number 0
    if min(layers) < 0 or ends[-1] != len(model) - 2:
        raise ValueError(
            f"stages of {[*layers]} layers are {sum(layers)}, and the model has "
            f"{len(model) - 3}: each layer needs one stage"
        )
    ends = [0, *ends[1:-1], len(model)]
    stages = [model[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]
    require_untied(stages)
    return stages


class LlamaStages:
    """A Work: this rank's stage of a model, and sequences, each token's target the next."""

    def __init__(
        self, model: nn.Sequential, layers: Sequence[int], rank: int, tokens: Tensor
    ) -> None:
        self.widths = [None, *[model[0].embedding_dim] * (len(layers) - 1)]
        self.widths.append(model[-1].out_features)
        self.stage = {rank: cut(model, layers)[rank]}  # and lets go of the others
        self.tokens, self.dtype = tokens, model[-1].weight.dtype

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits.mT, targets)

    def module(self, index: int) -> nn.Module:
        return self.stage[index]  # at each step the same

    def shape(self, index: int, micro: int) -> list[int]:
        sequences, length = len(self.tokens) // micro, self.tokens.shape[1] - 1
        width = [self.widths[index]] if index else []  # the first stage takes tokens
        return [sequences, length, *width]

    def batch(self, micro: int) -> tuple[Tensor, Tensor]:
        return self.tokens[:, :-1], self.tokens[:, 1:]


def train_stages(
    rank: int,
    world_size: int,
    run: Callable,
    layers: Sequence[int],
    model_of: Callable[[], nn.Sequential],
    tokens: Tensor,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> Tensor | None:
    """Two steps in the order of `run`, a micro-batch a sequence; the last rank has a loss."""
    if len(layers) != world_size:
        raise ValueError(f"{len(layers)} stages need as many ranks, got {world_size}")
    model = model_of()
    work = LlamaStages(model, layers, rank, tokens)
    del model
    stepping = optimizer(work.module(rank).parameters(), foreach=True)
    for step in range(2):
        with span(f"step {step}"):
            losses, _ = run(rank, world_size, work, len(tokens))
            stepping.step()
            stepping.zero_grad()
    return sum(losses) if losses else None
