"""What the seconds of a plain step, and alpha and beta, must be."""

from collections.abc import Callable

from mgpu_tutorial.lab.teach.build import Builder, expect
from mgpu_tutorial.step_time import plain

ENDS = "the least and the most seconds of "


def divides_work_by_rate(seconds: Callable) -> None:
    """take operations / rate on one GPU, with nothing to send"""
    found = seconds(6e12, 2e12, 0, 1, 1, 0, 1e9)
    expect(found, (3.0, 3.0), f"{ENDS}one micro-batch of 3 s", 1e-9)


def repeats_the_slot(seconds: Callable) -> None:
    """repeat the work and its messages for each micro-batch"""
    what = f"{ENDS}four micro-batches of 3 s, with 0.5 s of messages"
    expect(seconds(6e12, 2e12, 0.5, 1, 4, 0, 1e9), (14.0, 14.0), what, 1e-9)


def waits_for_the_pipeline(seconds: Callable) -> None:
    """wait for p − 1 slots in a pipeline of p stages"""
    what = f"{ENDS}four micro-batches of 3.5 s through three stages"
    expect(seconds(6e12, 2e12, 0.5, 3, 4, 0, 1e9), (21.0, 21.0), what, 1e-9)


def hides_what_backward_can(seconds: Callable) -> None:
    """return both ends: gradients hidden under two thirds of a slot, and not hidden at all"""
    found = seconds(6e12, 2e12, 0, 1, 4, 1e9, 1e9)
    expect(found, (12.0, 13.0), f"{ENDS}12 s of work and 1 s of sending", 1e-9)


def shows_what_it_cannot(seconds: Callable) -> None:
    """hide no more than two thirds of one slot, messages included, however much there is"""
    what = f"{ENDS}four slots of 3 s of work and 0.75 s of messages, 5 s of sending"
    expect(seconds(6e12, 2e12, 0.75, 1, 4, 5e9, 1e9), (17.5, 20.0), what, 1e-9)


def finds_a_link(fit: Callable) -> None:
    """find the bandwidth and the latency that made two rows, on 2 ranks"""
    fits(fit, 2)


def counts_what_a_ring_sends(fit: Callable) -> None:
    """find them on 8 and 32 ranks, where a ring sends 2 (N − 1) / N times the bytes"""
    fits(fit, 8)
    fits(fit, 32)


def fits(fit: Callable, ranks: int) -> None:
    """Two rows that a link of 20 µs and 100 GB/s makes."""
    rows = []
    for nbytes in (1e6, 1e8):
        sent = 2 * (ranks - 1) / ranks * nbytes
        rows.append((nbytes, sent / (20e-6 + sent / 1e11)))
    found = fit(*rows, ranks)
    found = found and [found[0] * 1e6, found[1] / 1e9]
    expect(found, [20.0, 100.0], f"{ranks} ranks: µs of latency and GB/s", 1e-6)


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
        plain.alpha_beta: [finds_a_link, counts_what_a_ring_sends],
    },
)
