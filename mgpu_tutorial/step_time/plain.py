"""A step in the plain case, what the bubble does to it, and the two numbers of a link."""


def bubble_only(tflops: float, stages: int, micro_batches: float, then: float) -> float:
    """TFLOP/s with `then` micro-batches instead, if the bubble is all that changes."""
    without = tflops * (1 + (stages - 1) / micro_batches)
    return without / (1 + (stages - 1) / then)


def step_seconds(
    operations: float,
    rate: float,
    messages: float,
    stages: int,
    micro_batches: int,
    gradients: float,
    link: float,
) -> tuple[float, float]:
    """The least and the most seconds of a step, from seven numbers.

    For each micro-batch a rank does `operations` at `rate`, plus `messages` seconds; then
    it sends `gradients` bytes, once, at the `link` bytes per second of this rank, one way.
    """
    slot = operations / rate + messages
    working = micro_batches * slot
    waiting = (stages - 1) * slot
    sending = gradients / link
    # gradients can be sent under the backward of the last micro-batch
    backward = 2 / 3 * slot
    most = working + waiting + sending
    return most - min(sending, backward), most


def alpha_beta(
    small: tuple[float, float], large: tuple[float, float], ranks: int
) -> tuple[float, float]:
    """Seconds of latency, and bytes per second, of an all-reduce over so many ranks.

    `small` and `large` are rows of a benchmark: bytes, and *bus* bandwidth in bytes per
    second, of each rank and one way, as is the second number that comes back. An all-reduce
    then takes latency + 2 (n - 1) / n · bytes / bandwidth.
    """
    sent = [2 * (ranks - 1) / ranks * nbytes for nbytes, _ in (small, large)]
    seconds = [sent[0] / small[1], sent[1] / large[1]]
    if small[1] > large[1]:
        raise ValueError("the rate falls with the size: take other rows")
    bandwidth = (sent[1] - sent[0]) / (seconds[1] - seconds[0])
    return seconds[0] - sent[0] / bandwidth, bandwidth
