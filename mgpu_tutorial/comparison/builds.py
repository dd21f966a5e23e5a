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
        assert not isinstance(found, complex), f"{found} has an imaginary part"
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


def refuses_what_no_gpu_does(at_least: Callable) -> None:
    """raise a ValueError for no GPU, and for a rate that is zero or less"""
    step = StepCost(parameters=10, operations=10, saved=10)
    names = "gpus", "rate", "memory", "bandwidth"
    one = 1, 100.0, 100.0, 100.0
    wrong = [(0, *one[1:]), (-2, *one[1:])]
    wrong += [(*one[:i], number, *one[i + 1 :]) for i in (1, 2, 3) for number in (0.0, -5.0)]
    for given in wrong:
        try:
            found = f"{at_least(step, *given)} s was returned"
        except ValueError:
            continue
        except Exception as error:
            found = f"{type(error).__name__} was raised"
        asked = ", ".join(f"{n}={g:g}" for n, g in zip(names, given, strict=True))
        raise AssertionError(f"{asked}: {found}, expected a ValueError")


BEHAVIOURS = [counts_operations, counts_memory, counts_the_ring, is_the_longest]
BEHAVIOURS += [refuses_what_no_gpu_does]
build = Builder("comparison", {seconds_at_least: BEHAVIOURS})
