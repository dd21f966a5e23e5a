"""A step in the plain case, what the bubble does to it, and the two numbers of a link."""


def bubble_only(tflops: float, stages: int, micro_batches: float, then: float) -> float:
    """TFLOP/s with `then` micro-batches instead, if the bubble is all that changes."""
    counts = stages, micro_batches, then
    if not (all(n >= 1 for n in counts) and stages % 1 == 0 and tflops > 0):
        raise ValueError(
            "a pipeline needs a stage at least, and a micro-batch, in whole stages, and "
            "TFLOP/s above 0"
        )
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
    if not (stages >= 1 and micro_batches >= 1 and rate > 0 and link > 0):
        raise ValueError("a step needs a stage, a micro-batch, and rates above 0")
    if stages % 1 or micro_batches % 1:
        found = f"got {stages} and {micro_batches}"
        raise ValueError(f"stages and micro-batches are whole numbers, {found}")
    if not (operations >= 0 and messages >= 0 and gradients >= 0):
        raise ValueError("operations, seconds of messages and bytes are 0 or more")
    slot = operations / rate + messages
    working = micro_batches * slot
    waiting = (stages - 1) * slot
    sending = gradients / link
    backward = 2 / 3 * slot  # of the last micro-batch, under which gradients can be sent
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
    if not (ranks >= 2 and ranks % 1 == 0 and all(n > 0 for n in (*small, *large))):
        raise ValueError("bytes and rates must be above 0, on whole ranks, two or more")
    sent = [2 * (ranks - 1) / ranks * nbytes for nbytes, _ in (small, large)]
    seconds = [sent[0] / small[1], sent[1] / large[1]]
    if not (sent[1] > sent[0] and seconds[1] > seconds[0]):
        raise ValueError("the larger message must be larger, and take longer")
    if small[1] > large[1]:
        raise ValueError("the rate falls with the size: a latency below 0, take other rows")
    bandwidth = (sent[1] - sent[0]) / (seconds[1] - seconds[0])
    return seconds[0] - sent[0] / bandwidth, bandwidth
