"""What the reader's accumulation must do."""

from collections.abc import Callable

import torch

from mgpu_tutorial.ddp_buckets.experiments import Tower, shares
from mgpu_tutorial.ddp_in_practice.practice import accumulate, step_in_parts
from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.lab.teach.build import Builder, expect, launch


def equals_one_process(function: Callable) -> None:
    """leave the gradients of the whole batch on 1, 2 and 3 ranks, the same bits on each"""
    torch.manual_seed(0)
    alone = Tower(512, 6)
    alone(shares(0, 1, 1, width=512)[0]).square().mean().backward()  # the whole batch
    expected = [p.grad for p in alone.parameters()]
    within = 1e-4 * max(float(gradient.abs().max()) for gradient in expected)
    for world_size, micro in (1, 2), (2, 1), (3, 4):
        results = launch(step_in_parts, world_size, function, micro).results
        for rank, found in enumerate(results):
            what = f"rank {rank} of {world_size}, batch.tensor_split({micro}): the gradients"
            expect(found["gradients"], expected, what, within)
            expect(found["gradients"], results[0]["gradients"], f"beside rank 0, {what}")


def refuses_unequal_parts(function: Callable) -> None:
    """refuse parts of 3, 3, 2, 2 and 2 samples with a ValueError, or weigh them"""
    try:
        expected, found = (
            launch(step_in_parts, 2, method, micro).results[0]["gradients"]
            for method, micro in ((accumulate, 1), (function, 5))
        )
    except RankFailed as error:
        assert "ValueError" in str(error), str(error)
        return
    within = 1e-4 * max(float(gradient.abs().max()) for gradient in expected)
    expect(found, expected, "with unequal parts the gradients", within)


def sends_once(function: Callable) -> None:
    """send each of the six buckets once, in three parts as in one"""
    for micro, said in ((1, "one part"), (3, "three parts")):
        found = launch(step_in_parts, 2, function, micro).results[0]
        expect(found["calls"], 6, f"with {said}, the buckets that DDP sends")


def keeps_one_part(function: Callable) -> None:
    """keep the activations of one part at a time"""
    whole, third = (
        launch(step_in_parts, 2, function, micro).results[0]["kept"] for micro in (1, 3)
    )
    expect(third, whole // 3, "the bytes kept for backward in 3 parts")


build = Builder(
    "ddp_in_practice",
    {accumulate: [sends_once, equals_one_process, keeps_one_part, refuses_unequal_parts]},
)
