"""How often a run should save itself."""

import math
from numbers import Real


def best_interval(save: float, failure: float) -> float:
    """Time between checkpoints that take `save`, at a failure every `failure` (one unit).

    Young, 1974, https://doi.org/10.1145/361147.361115: half of the interval is repeated on
    average, and what saving costs is then as much as what is repeated. Raises ValueError for
    a checkpoint that takes as long as the time between failures: none would be whole.
    """
    if not all(isinstance(time, Real) and time > 0 for time in (save, failure)):
        raise ValueError(f"both times must be above 0, got {save!r} and {failure!r}")
    if not save < failure < math.inf:
        raise ValueError(
            f"a checkpoint takes {save:g} and a failure comes every {failure:g}: `save` must "
            "be the shorter of the two, in the same unit"
        )
    return math.sqrt(2 * save * failure)
