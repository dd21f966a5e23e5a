"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.the_machine.builds import build
from tests.builds import edited

BY_RIDGE = """ridge = peak / bandwidth
    intensity = flops / nbytes
    return peak * (intensity / ridge if intensity < ridge else 1)"""
ROOF = "min(peak, flops / nbytes * bandwidth)"
ROOFS = [
    (ROOF, "flops / max(flops / peak, nbytes / bandwidth)"),
    ("if not…", BY_RIDGE),
    (ROOF, "max(peak, flops / nbytes * bandwidth)", "800 operations a byte"),
    (ROOF, "flops / nbytes * bandwidth", "800 operations a byte"),
    (ROOF, "peak", "30 operations on 10 bytes"),
    (ROOF, "min(peak, flops * bandwidth)", "30 operations on 10 bytes"),
    (ROOF, "min(peak, nbytes / flops * bandwidth)", "800 operations a byte"),
    (ROOF, "peak / 2 if flops * bandwidth == peak * nbytes else " + ROOF, "the rate: 50"),
]

KERNEL = "compute += max(roads)"
BEGIN = "begin = max(compute, link)"
SENT = "link = begin + event.steps * latency + event.nbytes / bandwidth"
WAITED = "compute = max(compute, arrived[event.of])"
END = "return max(compute, link)"
BY_MATCH = """clocks = [0.0, 0.0]
    arrived = []
    for event in tape:
        match event:
            case Kernel(flops, nbytes):
                both = flops / machine.flops, nbytes / machine.memory_rate
                clocks[0] += sorted(both)[1]
            case Message(nbytes, steps):
                clocks[1] = max(clocks) + steps * machine.inside[0]
                clocks[1] += nbytes / machine.inside.bandwidth
            case Wait(of):
                clocks[0] = max(clocks[0], arrived[of])
        arrived.append(clocks[1])
    return sorted(clocks)[-1]"""
REPLAYS = [
    ("compute = link…", BY_MATCH),
    (KERNEL, "compute += sum(roads)", "3 s of operations, 1 s of bytes"),
    (KERNEL, "compute += roads[0]", "1 s of operations, 4 s of bytes"),
    (KERNEL, "compute = max(roads)", "both, one after the other"),
    (END, "return compute", "a message of 2 latencies"),
    (END, "return compute + link", "a kernel of 3 s, a message of 4 s"),
    (SENT, "link = begin + latency + event.nbytes / bandwidth", "2 latencies of 1 s"),
    (SENT, "link = begin + event.nbytes / bandwidth", "2 latencies of 1 s"),
    (BEGIN, "begin = compute", "a message of 4 s, a kernel of 1 s, a message of 4 s"),
    (BEGIN, "begin = link", "a kernel of 3 s, a message of 4 s"),
    (BEGIN, "begin = compute = max(compute, link)", "two messages of 4 s, a kernel"),
    (
        "arrived[place] = link",
        "arrived[place] = compute = link",
        "a message of 4 s, a kernel",
    ),
    (WAITED, "compute = arrived[event.of]", "a kernel of 6 s, a wait for the message"),
    (WAITED, "compute = max(compute, link)", "a wait for the first, a kernel of 5 s"),
    (WAITED, "compute += arrived[event.of]", "a kernel of 6 s, a wait for the message"),
    (WAITED, "pass", "a message of 4 s, a wait for it, a kernel of 3 s"),
]

RING = "2 * (ranks - 1) / ranks * nbytes / bandwidth"
TOKENS = [
    (RING, "(1 - 1 / ranks) * 2 * nbytes / bandwidth"),
    ("backward =…", f"return {RING} * flops / 4"),
    ("4 / flops", "6 / flops", "4,000 operations and 1 byte per second"),
    ("4 / flops", "2 / flops", "4,000 operations and 1 byte per second"),
    (RING, "2 * nbytes / bandwidth", "4,000 operations and 1 byte per second"),
    (RING, "(ranks - 1) * nbytes / bandwidth", "8 ranks: the tokens"),
    (RING, "nbytes / bandwidth", "one rank: the tokens"),
    ("ring / backward", "backward / ring", "4,000 operations and 1 byte per second"),
    (RING, "2 * (ranks - 1) / ranks * 4 / bandwidth", "2 ranks: the tokens: 4000"),
    ("nbytes: int = 2", "nbytes: int = 4", "2 ranks: the tokens: 4000"),
]
test_right, test_wrong = edited(
    build, {"attainable": ROOFS, "replay_step": REPLAYS, "tokens_to_hide": TOKENS}
)
