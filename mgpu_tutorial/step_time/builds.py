"""What the seconds of a plain step must be."""

from collections.abc import Callable

from mgpu_tutorial.lab.teach.build import Builder, expect
from mgpu_tutorial.step_time import plain


def step(seconds: Callable, expected: tuple, what: str, *plan: float) -> None:
    """Compare both terms for 6e12 operations at 2e12 a second, which take 3 s."""
    found = seconds(6e12, 2e12, *plan, 1e9)
    expect(found, expected, f"compute and exposed seconds of {what}", 1e-9)


def repeats_the_slot(seconds: Callable) -> None:
    """compute operations / rate, and expose the messages, once for each micro-batch"""
    step(seconds, (3.0, 0.0), "one micro-batch of 3 s, in one stage", 0, 1, 1, 0)
    what = "four micro-batches of 3 s, with 0.5 s of messages"
    step(seconds, (12.0, 2.0), what, 0.5, 1, 4, 0)


def waits_for_the_pipeline(seconds: Callable) -> None:
    """expose the p − 1 slots in which a rank waits in a pipeline of p stages"""
    what = "four slots of 3 s of work and 0.5 s of messages, through three stages"
    step(seconds, (12.0, 9.0), what, 0.5, 3, 4, 0)


def hides_what_backward_can(seconds: Callable) -> None:
    """expose of the gradients only what two thirds of a slot can't hide"""
    step(seconds, (12.0, 0.0), "12 s of work and 1 s of sending", 0, 1, 4, 1e9)
    what = "four slots of 3 s of work and 0.75 s of messages, 5 s of sending"
    step(seconds, (12.0, 5.5), what, 0.75, 1, 4, 5e9)
    what += ", through three stages"
    step(seconds, (12.0, 13.0), what, 0.75, 3, 4, 5e9)


STEP = [repeats_the_slot, waits_for_the_pipeline, hides_what_backward_can]
build = Builder("step_time", {plain.step_seconds: STEP})
