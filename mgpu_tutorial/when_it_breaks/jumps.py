"""A loss that jumps and stays finite, and a tool that tells a bad card from the rest."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from mgpu_tutorial.when_it_breaks.data import card_of, rate_of, readings


def loss_and_gradient(
    weight: torch.Tensor, batch: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean squared error; features count from those of the batch's first sample."""
    features, targets = batch.to(dtype).split([3, 1], dim=1)
    features = features - features[0]
    errors = features @ weight.to(dtype) - targets[:, 0]
    return errors.square().mean(), 2 * errors @ features / len(errors)


def replay(gradient_of: Callable, batch: torch.Tensor) -> list[int]:
    """The ranks whose gradient the next rank doesn't reproduce to the last bit."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = [None] * world_size
    dist.all_gather_object(batches, batch)
    pairs = [None] * world_size
    mine = gradient_of(batch), gradient_of(batches[rank - 1])
    dist.all_gather_object(pairs, mine)
    own, replayed = zip(*pairs, strict=True)
    return [r for r in range(world_size) if not own[r].equal(replayed[r + 1 - world_size])]


def on_card(card: Callable, weight: torch.Tensor) -> Callable:
    """What this rank's card makes of the gradient of any batch, at these weights."""
    return lambda batch: card(loss_and_gradient(weight, batch)[1])


def train_until_it_jumps(rank: int, world_size: int, cause: str) -> list[list]:
    """Seven steps; for each the loss, the gradient's norm, in float64 too, and `replay`."""
    weight, seen = torch.zeros(3), []
    for step in range(7):
        batch, card = readings(rank, step, cause), card_of(rank, step, cause)
        compute = on_card(card, weight)
        gradient = compute(batch)
        loss, _ = loss_and_gradient(weight, batch)
        _, exact = loss_and_gradient(weight, batch, torch.float64)
        disagree = replay(compute, batch)
        seen.append([loss, gradient.norm(), exact.norm(), disagree])
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
        weight -= rate_of(step, cause) * gradient
    return seen
