"""How often to save? A formula of 1974, and a run whose failures are drawn by lot."""

import math
import random


def best_interval(save: float, between: float) -> float:
    """Young's interval between two checkpoints, in the unit of the arguments.

    A save takes `save`, and `between` is the mean time from one failure to the next.
    """
    return math.sqrt(2 * save * between)


def simulate_waste(
    interval: float, save: float, between: float, work: float = 1e6, seed: int = 0
) -> float:
    """Time lost per time trained, in a run of length `work` with failures at random."""
    lot = random.Random(seed)
    clock = done = 0.0
    while done < work:
        until_failure = lot.expovariate(1 / between)
        clock += until_failure
        done += interval * (until_failure // (interval + save))  # what was saved
    return clock / done - 1
