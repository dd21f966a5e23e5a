"""How often a job of many GPUs breaks, and how often it should save itself."""

DAY, HOUR = 86_400.0, 3_600.0

# Llama 3 405B, https://arxiv.org/abs/2407.21783, table 5
INTERRUPTIONS, DAYS, GPUS = 419, 54, 16_384


def between_failures(gpus: int) -> float:
    """Seconds between two interruptions of a job on `gpus` GPUs.

    Each GPU, with its share of everything around it, fails as often as in Llama 3's run.
    """
    one_gpu = DAYS * DAY * GPUS / INTERRUPTIONS
    return one_gpu / gpus


def lost(
    save: float, restart: float, failure: float, interval: float
) -> tuple[float, float, float]:
    """The shares of the time for saving, repeating and restarting; all times in seconds."""
    return save / interval, interval / 2 / failure, restart / failure
