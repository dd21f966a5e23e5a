"""What the seconds of a plain step, and alpha and beta, must be."""

from collections.abc import Callable

from mgpu_tutorial.lab.teach.build import Builder, expect
from mgpu_tutorial.step_time import plain

# step_seconds


def divides_work_by_rate(seconds: Callable) -> None:
    """take operations / rate on one GPU, with nothing to send"""
    expect(list(seconds(6e12, 2e12, 0, 1, 1, 0, 1e9)), [3.0, 3.0], "6e12 operations", 1e-9)


def repeats_the_slot(seconds: Callable) -> None:
    """repeat the work and its messages for each micro-batch"""
    found = list(seconds(6e12, 2e12, 0.5, 1, 4, 0, 1e9))
    expect(found, [14.0, 14.0], "four micro-batches of 3 s, with 0.5 s of messages", 1e-9)


def waits_for_the_pipeline(seconds: Callable) -> None:
    """wait for p − 1 slots in a pipeline of p stages"""
    found = list(seconds(6e12, 2e12, 0.5, 3, 4, 0, 1e9))
    expect(found, [21.0, 21.0], "four micro-batches of 3.5 s through three stages", 1e-9)


def hides_what_backward_can(seconds: Callable) -> None:
    """return both ends: gradients hidden under two thirds of a slot, and not hidden at all"""
    found = list(seconds(6e12, 2e12, 0, 1, 4, 1e9, 1e9))
    expect(found, [12.0, 13.0], "12 s of work, 1 s of sending", 1e-9)


def shows_what_it_cannot(seconds: Callable) -> None:
    """hide no more than that backward, however much there is to send"""
    found = list(seconds(6e12, 2e12, 0, 1, 4, 5e9, 1e9))
    expect(found, [15.0, 17.0], "12 s of work, 5 s of sending, 2 s of backward", 1e-9)


# alpha_beta


def finds_a_link(fit: Callable) -> None:
    """find the latency and the bandwidth that made two rows, on 2, 8 and 32 ranks"""
    for ranks in (2, 8, 32):
        latency, bandwidth, rows = 20e-6, 1e11, []
        for nbytes in (1e6, 1e9):
            sent = 2 * (ranks - 1) / ranks * nbytes
            rows.append((nbytes, sent / (latency + sent / bandwidth)))
        found = fit(*rows, ranks)
        assert found is not None, "nothing was returned. Is a `return` missing?"
        expect(found[0] * 1e6, 20.0, f"{ranks} ranks: the latency in µs", 1e-3)
        expect(found[1] / 1e9, 100.0, f"{ranks} ranks: the bandwidth in GB/s", 1e-3)


build = Builder(
    "step_time",
    {
        plain.step_seconds: [
            divides_work_by_rate,
            repeats_the_slot,
            waits_for_the_pipeline,
            hides_what_backward_can,
            shows_what_it_cannot,
        ],
        plain.alpha_beta: [finds_a_link],
    },
)
