"""A step in two terms: what a rank computes, and what is exposed."""


def step_seconds(
    operations: float,
    rate: float,
    messages: float,
    stages: int,
    micro_batches: int,
    gradients: float,
    link: float,
) -> tuple[float, float]:
    """The seconds of a step in which a rank computes, and those that are exposed.

    For each micro-batch a rank does `operations` at `rate`, and waits `messages` seconds for
    its messages. At the end it sends `gradients` bytes, at `link` bytes per second one way.
    """
    compute = operations / rate
    slot = compute + messages
    waiting = (stages - 1) * slot
    # gradients hide under two thirds of the last slot, its backward
    unhidden = max(0, gradients / link - 2 / 3 * slot)
    return micro_batches * compute, micro_batches * messages + waiting + unhidden
