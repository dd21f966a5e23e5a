"""How often a job of many GPUs breaks, and how often it should save itself."""

from typing import NamedTuple

DAY, HOUR = 86_400.0, 3_600.0

# Llama 3 405B, https://arxiv.org/abs/2407.21783, table 5
INTERRUPTIONS, DAYS, GPUS = 419, 54, 16_384


class Loss(NamedTuple):
    """Shares of the time that are lost, and the `interval` between checkpoints, seconds."""

    interval: float
    saving: float
    repeating: float
    restarting: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.saving + self.repeating + self.restarting


def between_failures(gpus: int) -> float:
    """Seconds between two interruptions of a job on `gpus` GPUs.

    Each GPU, with its share of everything around it, fails as often as in Llama 3's run.
    """
    one_gpu = DAYS * DAY * GPUS / INTERRUPTIONS
    return one_gpu / gpus


def lost(save: float, restart: float, failure: float, interval: float) -> Loss:
    """What saving, repeating and restarting cost; all times in seconds."""
    return Loss(interval, save / interval, interval / 2 / failure, restart / failure)
