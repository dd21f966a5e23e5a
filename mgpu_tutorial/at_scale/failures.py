"""What failures cost on a large machine, at the rate of Llama 3's run."""

from typing import NamedTuple

from mgpu_tutorial.shared.cost_model.failures import best_interval


class Lost(NamedTuple):
    """Seconds between failures and between checkpoints, and the shares of the time lost."""

    failure: float
    interval: float
    share: float
    in_restarts: float


def lost(gpus: int, save: float, restart: float) -> Lost:
    """What so many GPUs lose if a checkpoint and a restart take so many seconds.

    A GPU fails as often as in Llama 3's run: 419 times in 54 days on 16,384 of them
    (https://arxiv.org/abs/2407.21783, table 5). Raises ValueError where all of the time
    would be lost.
    """
    failure = 54 * 86_400 / 419 * 16_384 / gpus
    interval = best_interval(save, failure)
    share = save / interval + interval / 2 / failure + restart / failure
    if share >= 1:
        raise ValueError(f"{gpus} GPUs lose all of their time: save and restart sooner")
    return Lost(failure, interval, share, restart / failure)
