"""What the estimate of a step must do: the longest of its three parts."""

from collections.abc import Callable

from mgpu_tutorial.comparison.estimates import StepCost, seconds_at_least
from mgpu_tutorial.lab.teach.build import Builder, expect

ROOMY = 1e30  # operations or bytes a second: a part that takes no time


def counts_operations(at_least: Callable) -> None:
    """be the operations of one GPU over its rate, where memory and link take no time"""
    step = StepCost(parameters=10, operations=6_000, saved=10)
    for gpus, seconds in ((1, 60.0), (4, 15.0)):
        found = at_least(step, gpus, 100.0, ROOMY, ROOMY)
        expect(found, seconds, f"6,000 operations, 100 a second, GPUs: {gpus}")


def counts_memory(at_least: Callable) -> None:
    """count what is kept for backward twice: it is written, and it is read"""
    step = StepCost(parameters=10, operations=10, saved=6_000)
    for gpus, seconds in ((1, 120.0), (3, 40.0)):
        found = at_least(step, gpus, ROOMY, 100.0, ROOMY)
        expect(found, seconds, f"6,000 bytes kept, 100 a second, GPUs: {gpus}")


def counts_the_ring(at_least: Callable) -> None:
    """count what each rank of a ring sends of float32 gradients, and nothing on one GPU"""
    step = StepCost(parameters=1_000, operations=10, saved=10)
    for gpus, seconds in ((2, 40.0), (4, 60.0), (1, 0.0)):
        found = at_least(step, gpus, ROOMY, ROOMY, 100.0)
        expect(found, seconds, f"1,000 parameters, GPUs: {gpus}", within=1e-9)


def is_the_longest(at_least: Callable) -> None:
    """be the longest of the three, and not their sum"""
    step = StepCost(parameters=1_000, operations=6_000, saved=6_000)
    expect(at_least(step, 2, 100.0, 100.0, 100.0), 60.0, "30 s, 60 s and 40 s")


BEHAVIOURS = [counts_operations, counts_memory, counts_the_ring, is_the_longest]
build = Builder("comparison", {seconds_at_least: BEHAVIOURS})
