"""A run whose failures are drawn by lot: what does an interval between checkpoints cost?"""

import random


def simulate_waste(
    interval: float, save: float, between: float, work: float = 1e6, seed: int = 0
) -> float:
    """Time lost per time trained, in a run of length `work` with failures at random."""
    lot = random.Random(seed)
    clock = done = 0.0
    while done < work:
        until_failure = lot.expovariate(1 / between)
        clock += until_failure
        done += interval * (until_failure // (interval + save))  # only whole intervals
    return clock / done - 1
