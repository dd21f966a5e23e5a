"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.the_machine.builds import build
from tests.builds import Right, Wrong, edited

BY_RIDGE = """ridge = peak / bandwidth
    intensity = flops / nbytes
    return peak * (intensity / ridge if intensity < ridge else 1)"""
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
ROOF = "min(peak, by_memory)"
BUSY = "compute += max(by_peak, by_memory)"
SENT = "event.steps * latency + event.nbytes / bandwidth"
RING = "2 * (ranks - 1) / ranks * nbytes / bandwidth"
ANSWERS = [
    Right("attainable", replace={ROOF: "flops / max(flops / peak, nbytes / bandwidth)"}),
    Right("attainable", replace={"by_memory =…": BY_RIDGE}),
    Wrong(
        "attainable",
        replace={ROOF: "max(peak, flops / nbytes * bandwidth)"},
        says="800 operations a byte",
    ),
    Wrong(
        "attainable",
        replace={ROOF: "flops / nbytes * bandwidth"},
        says="800 operations a byte",
    ),
    Wrong("attainable", replace={ROOF: "peak"}, says="30 operations on 10 bytes"),
    Wrong(
        "attainable",
        replace={ROOF: "min(peak, flops * bandwidth)"},
        says="30 operations on 10 bytes",
    ),
    Wrong(
        "attainable",
        replace={ROOF: "min(peak, nbytes / flops * bandwidth)"},
        says="800 operations a byte",
    ),
    Wrong(
        "attainable",
        replace={ROOF: f"peak / 2 if flops * bandwidth == peak * nbytes else {ROOF}"},
        says="the rate: 50",
    ),
    Wrong(
        "attainable",
        replace={ROOF: "min(peak, flops // nbytes * bandwidth)"},
        says="1 operation on 10 bytes",
    ),
    Wrong(
        "attainable",
        replace={ROOF: "peak if flops > 300 * nbytes else flops / nbytes * bandwidth"},
        says="500 operations a byte",
    ),
    Right("replay_step", replace={"compute = link…": BY_MATCH}),
    Wrong(
        "replay_step",
        replace={BUSY: "compute += by_peak + by_memory"},
        says="3 s of operations, 1 s of bytes",
    ),
    Wrong(
        "replay_step",
        replace={BUSY: "compute += by_peak"},
        says="1 s of operations, 4 s of bytes",
    ),
    Wrong(
        "replay_step",
        replace={BUSY: BUSY.replace("+=", "=")},
        says="both, one after the other",
    ),
    Wrong(
        "replay_step",
        replace={"return max(compute, link)": "return compute"},
        says="a message of 2 latencies",
    ),
    Wrong(
        "replay_step",
        replace={"return max(compute, link)": "return compute + link"},
        says="a kernel of 3 s, a message of 4 s",
    ),
    Wrong(
        "replay_step",
        replace={SENT: "latency + event.nbytes / bandwidth"},
        says="2 latencies of 1 s",
    ),
    Wrong(
        "replay_step", replace={SENT: "event.nbytes / bandwidth"}, says="2 latencies of 1 s"
    ),
    Wrong(
        "replay_step",
        replace={"begin = max(compute, link)": "begin = compute"},
        says="a message of 4 s, a kernel of 1 s, a message of 4 s",
    ),
    Wrong(
        "replay_step",
        replace={"begin = max(compute, link)": "begin = link"},
        says="a kernel of 3 s, a message of 4 s",
    ),
    Wrong(
        "replay_step",
        replace={"begin = max(compute, link)": "begin = compute = max(compute, link)"},
        says="two messages of 4 s, a kernel",
    ),
    Wrong(
        "replay_step",
        replace={"arrived[place] = link": "arrived[place] = compute = link"},
        says="a message of 4 s, a kernel",
    ),
    Wrong(
        "replay_step",
        replace={"compute = max(compute, arrived[event.of])": "compute = arrived[event.of]"},
        says="a kernel of 6 s, a wait for the message",
    ),
    Wrong(
        "replay_step",
        replace={"compute = max(compute, arrived[event.of])": "compute = max(compute, link)"},
        says="a wait for the first, a kernel of 5 s",
    ),
    Wrong(
        "replay_step",
        replace={"compute = max(compute, arrived[event.of])": "compute += arrived[event.of]"},
        says="a kernel of 6 s, a wait for the message",
    ),
    Wrong(
        "replay_step",
        replace={"compute = max(compute, a": "compute = link = max(compute, a"},
        says="two messages of 4 s and a wait for the first",
    ),
    Wrong(
        "replay_step",
        replace={"arrived[place] = link": "arrived[len(arrived)] = link"},
        says="KeyError",
    ),
    Wrong(
        "replay_step",
        replace={"compute = max(compute, arrived[event.of])": "pass"},
        says="a message of 4 s, a wait for it, a kernel of 3 s",
    ),
    Right("tokens_to_hide", replace={RING: "(1 - 1 / ranks) * 2 * nbytes / bandwidth"}),
    Right(
        "tokens_to_hide",
        replace={
            "backward =…": "return 2 * (ranks - 1) / ranks * nbytes / bandwidth * flops / 4"
        },
    ),
    Wrong(
        "tokens_to_hide",
        replace={"4 / flops": "6 / flops"},
        says="4,000 operations and 1 byte per second",
    ),
    Wrong(
        "tokens_to_hide",
        replace={"4 / flops": "2 / flops"},
        says="4,000 operations and 1 byte per second",
    ),
    Wrong(
        "tokens_to_hide",
        replace={RING: "2 * nbytes / bandwidth"},
        says="4,000 operations and 1 byte per second",
    ),
    Wrong(
        "tokens_to_hide", replace={RING: "(ranks - 1) * nbytes / bandwidth"}, says="4 ranks"
    ),
    Wrong(
        "tokens_to_hide",
        replace={RING: "nbytes / bandwidth"},
        says="the tokens: 5000, expected 7500",
    ),
    Wrong(
        "tokens_to_hide",
        replace={"ring / backward": "backward / ring"},
        says="4,000 operations and 1 byte per second",
    ),
    Wrong(
        "tokens_to_hide",
        replace={RING: "2 * (ranks - 1) / ranks * 4 / bandwidth"},
        says="gradients of 5 bytes",
    ),
    Wrong(
        "tokens_to_hide",
        replace={"nbytes: int = 2": "nbytes: int = 4"},
        says="2 ranks: the tokens: 4000",
    ),
]
test_right, test_wrong = edited(build, ANSWERS)
