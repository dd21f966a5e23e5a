"""Jobs with one fault each. A docstring says what a job should do."""

import gc
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mgpu_tutorial.lab import span
from mgpu_tutorial.when_it_breaks.data import Run


def average_labelled(rank: int, world_size: int, labels_of: Callable) -> None:
    """Should average one gradient over all ranks for each of four batches."""
    for labels in labels_of(rank):
        known = labels[labels >= 0]
        if len(known) == 0:
            continue
        gradient = known.float().mean()
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)


def count_classes(rank: int, world_size: int) -> list[int]:
    """Should count on all ranks together how many samples each class has."""
    classes = torch.tensor([0, 3, 1, 2, 3, 0, 1, 3, 2, 0, 3, 1])
    counts = torch.bincount(classes[rank::world_size])
    dist.all_reduce(counts)
    return counts.tolist()


def agree_on_settings(rank: int, world_size: int) -> None:
    """Should add up the ranks' samples, and tell all ranks the learning rate of rank 0."""
    samples = torch.tensor([100.0 + rank])
    learning_rate = torch.tensor([0.1 if rank == 0 else 0.0])
    if rank == 0:
        dist.all_reduce(samples)
        dist.broadcast(learning_rate, src=0)
    else:
        dist.broadcast(learning_rate, src=0)
        dist.all_reduce(samples)


def average_in_pairs(rank: int, world_size: int, limit: float = 3.0) -> float:
    """Should average over ranks 0 and 1, and over 2 and 3; then all meet before they save."""
    if world_size != 4:
        raise ValueError(f"two pairs are four ranks, not {world_size}: launch it on 4")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    gradient = torch.tensor([float(rank)])
    dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=pairs[rank // 3])
    dist.monitored_barrier(timeout=timedelta(seconds=limit), wait_all_ranks=True)
    return gradient.item()


def average_file(rank: int, world_size: int) -> float:
    """Should average the numbers of a file; each rank reads its own part of it."""
    path = Path(tempfile.gettempdir(), "numbers.bin")
    if rank == 0:
        torch.ones(2**18).numpy().tofile(path)
    dist.barrier()
    numbers = torch.from_file(str(path), shared=True, size=2**18)
    dist.barrier()
    if rank == 0:
        torch.ones(2**17).numpy().tofile(path)
    dist.barrier()
    mean = numbers.chunk(world_size)[rank].mean()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


def train_on_sequences(rank: int, world_size: int) -> None:
    """Should give every rank as much work as the others, three steps long."""
    lengths = [12, 70, 9, 31, 8, 66, 40, 26]  # tokens of each sequence
    if len(lengths) % world_size:
        raise ValueError(f"8 sequences cannot be dealt evenly to {world_size} ranks")
    share = len(lengths) // world_size
    mine = sorted(lengths)[rank * share : (rank + 1) * share]
    pairs = sum(length**2 for length in mine)  # attention compares every two tokens
    for _ in range(3):
        with span("compute"):
            time.sleep(2e-5 * pairs)
        gradient = torch.ones(1)
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)


def spread_points(
    rank: int, world_size: int, points_of: Callable, detect: bool = False
) -> list[list[float]]:
    """Should train a weight for three steps; returns this rank's loss and the weight."""
    weight = torch.ones(2, requires_grad=True)
    seen = []
    for step in range(3):
        with torch.autograd.detect_anomaly() if detect else nullcontext():
            points = points_of(rank, step) * weight
            gaps = (points[1:] - points[:-1]).square().sum(dim=1).sqrt()
            loss = (gaps - 1).square().mean()
            (gradient,) = torch.autograd.grad(loss, weight)
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
        with torch.no_grad():
            weight -= 0.01 * gradient
        seen.append([round(loss.item(), 2), round(weight[0].item(), 2)])
    return seen


def draw_epoch(rank: int, world_size: int, per_rank: bool) -> dict[str, list[int]]:
    """Should deal 12 samples to the ranks, each to one of them, and draw noise for each."""
    torch.manual_seed(rank if per_rank else 0)
    order = torch.randperm(12)
    mine = order[rank::world_size]
    noise = torch.randint(100, [len(mine)])
    return {"order": order.tolist(), "mine": mine.tolist(), "noise": noise.tolist()}


def loss_and_gradient(
    weight: torch.Tensor, batch: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean squared error; features count from those of the batch's first sample."""
    features, targets = batch.to(dtype).split([3, 1], dim=1)
    features = features - features[0]
    errors = features @ weight.to(dtype) - targets[:, 0]
    return errors.square().mean(), 2 * errors @ features / len(errors)


def replay(gradient_of: Callable, batch: torch.Tensor) -> list[int]:
    """The ranks whose gradient the next rank doesn't reproduce to the last bit.

    A gradient that is NaN on both of them is reproduced. Raises ValueError on one rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size < 2:
        raise ValueError("one rank has no other one to replay its batch")
    batches, pairs = [None] * world_size, [None] * world_size
    dist.all_gather_object(batches, batch.cpu())
    of_others = batches[rank - 1].to(batch.device)
    mine = gradient_of(batch).cpu(), gradient_of(of_others).cpu()
    dist.all_gather_object(pairs, mine)
    own, again = zip(*pairs, strict=True)
    again = again[1:] + again[:1]  # rank 0 has replayed the last one's batch
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    same = [own[r].allclose(again[r], **exactly) for r in range(world_size)]
    return [r for r in range(world_size) if not same[r]]


def train_until_it_jumps(
    rank: int, world_size: int, run: Run, replay: Callable
) -> list[list]:
    """Seven steps; for each the loss, the gradient's norm, in float64 too, and `replay`."""
    if world_size < 3:
        raise ValueError(f"ranks 1 and 2 have the faults: take 3 ranks, not {world_size}")
    weight, seen = torch.zeros(3), []

    def gradient_of(batch: torch.Tensor) -> torch.Tensor:
        _, gradient = loss_and_gradient(weight, batch)
        return run.on_gpu(gradient, rank, len(seen))

    for step in range(7):
        batch = run.batch(rank, step)
        gradient = gradient_of(batch)
        loss, _ = loss_and_gradient(weight, batch)
        _, exact = loss_and_gradient(weight, batch, torch.float64)
        disagree = replay(gradient_of, batch)
        seen.append([loss, gradient.norm(), exact.norm(), disagree])
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
        weight -= run.rate(step) * gradient
    return seen


def pause_for_garbage(rank: int, world_size: int, way: str) -> list[int]:
    """Eight steps; each rank looks for garbage in two of them, which it returns.

    `way` is "alone", in steps of this rank's own, or "together", all in the same steps, or
    "frozen": together, and what the program keeps anyway is not looked at.
    """
    kept = [[i] for i in range(200_000)]  # a real program holds modules, data, graphs
    gc.disable()
    if way == "frozen":
        gc.freeze()
    dist.barrier()
    paused = []
    for step in range(8):
        with span("compute"):
            time.sleep(0.02)
        if step % 4 == (rank if way == "alone" else 0):
            with span("collect"):
                gc.collect()
            paused.append(step)
        dist.all_reduce(torch.ones(1))
    gc.unfreeze()
    gc.enable()
    del kept
    return paused
