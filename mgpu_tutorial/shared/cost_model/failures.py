"""How often a run should save itself."""

import math


def best_interval(save: float, failure: float) -> float:
    """Time between checkpoints that take `save`, at a failure every `failure` (one unit).

    Young, 1974, https://doi.org/10.1145/361147.361115: half of the interval is repeated on
    average, and what saving costs is then as much as what is repeated.
    """
    if not (save > 0 and failure > 0):
        raise ValueError(f"both times must be above 0, got {save} and {failure}")
    return math.sqrt(2 * save * failure)
