"""What the seconds of a plain step, and alpha and beta, must be."""

from collections.abc import Callable

from mgpu_tutorial.lab.teach.build import Builder, expect
from mgpu_tutorial.step_time import plain

# step_seconds


def ends(seconds: Callable, given: tuple, expected: tuple[float, float], what: str) -> None:
    """Compare the least and the most seconds, each by its name."""
    found = seconds(*given)
    assert found is not None, "nothing was returned. Is a `return` missing?"
    assert len(found) == 2, f"{what}: return two numbers, the least and the most seconds"
    for one, other, name in zip(found, expected, ("least", "most"), strict=True):
        expect(one, other, f"{what}: the {name} seconds", 1e-9)


def divides_work_by_rate(seconds: Callable) -> None:
    """take operations / rate on one GPU, with nothing to send"""
    ends(seconds, (6e12, 2e12, 0, 1, 1, 0, 1e9), (3.0, 3.0), "one micro-batch of 3 s")


def repeats_the_slot(seconds: Callable) -> None:
    """repeat the work and its messages for each micro-batch"""
    what = "four micro-batches of 3 s, with 0.5 s of messages"
    ends(seconds, (6e12, 2e12, 0.5, 1, 4, 0, 1e9), (14.0, 14.0), what)


def waits_for_the_pipeline(seconds: Callable) -> None:
    """wait for p − 1 slots in a pipeline of p stages"""
    what = "four micro-batches of 3.5 s through three stages"
    ends(seconds, (6e12, 2e12, 0.5, 3, 4, 0, 1e9), (21.0, 21.0), what)


def hides_what_backward_can(seconds: Callable) -> None:
    """return both ends: gradients hidden under two thirds of a slot, and not hidden at all"""
    what = "12 s of work, 1 s of sending"
    ends(seconds, (6e12, 2e12, 0, 1, 4, 1e9, 1e9), (12.0, 13.0), what)


def shows_what_it_cannot(seconds: Callable) -> None:
    """hide no more than two thirds of one slot, messages included, however much there is"""
    what = "four slots of 3 s of work and 0.75 s of messages, 5 s of sending"
    ends(seconds, (6e12, 2e12, 0.75, 1, 4, 5e9, 1e9), (17.5, 20.0), what)


# alpha_beta


def finds_a_link(fit: Callable) -> None:
    """find the bandwidth and the latency that made two rows, on 2 ranks"""
    fits(fit, 2)


def counts_what_a_ring_sends(fit: Callable) -> None:
    """find them on 8 and 32 ranks, where a ring sends 2 (N − 1) / N times the bytes"""
    for ranks in (8, 32):
        fits(fit, ranks)


def fits(fit: Callable, ranks: int) -> None:
    """Two rows that a link of 20 µs and 100 GB/s makes."""
    latency, bandwidth, rows = 20e-6, 1e11, []
    for nbytes in (1e6, 1e8):
        sent = 2 * (ranks - 1) / ranks * nbytes
        rows.append((nbytes, sent / (latency + sent / bandwidth)))
    found = fit(*rows, ranks)
    assert found is not None, "nothing was returned. Is a `return` missing?"
    expect(found[1] / 1e9, 100.0, f"{ranks} ranks: the bandwidth in GB/s", 1e-6)
    expect(found[0] * 1e6, 20.0, f"{ranks} ranks: the latency in µs", 1e-6)


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
