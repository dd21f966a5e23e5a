"""One sequence on several ranks: a ring, gathered keys and exchanged heads in one run.

    python benchmarks/long_sequences.py [--ranks 2] [--tokens 1024] [--turns 5] [--repeats 1]

Each way computes causal attention forward and backward, in turns inside the same ranks.
Prints the medians of both, what autograd keeps between them, and the bytes that a rank sends.
"""

from functools import partial

import torch
from common import all_turns, both_ways, median_ms, options, show

from mgpu_tutorial.lab import Ledger
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.long_sequences.others import METHODS, sent_by_formula
from mgpu_tutorial.long_sequences.ring import contiguous, ring_attention

WAYS = {
    "ring_attention, by autograd": lambda *given: ring_attention(*given)[0],
    "RingAttention": METHODS["ring"],
    "all-gather": METHODS["all-gather"],
    "ulysses": METHODS["ulysses"],
}
SENDS = "ring", "ring", "all-gather", "ulysses"
HEADS, SIZE = 8, 32


def measure(
    rank: int, world_size: int, tokens: int, kv_heads: int, turns: int
) -> dict[str, list[tuple[int, float, float]]]:
    """The kept bytes of each way, and the seconds of its forward and of its backward."""
    shapes = [(1, heads, tokens // world_size, SIZE) for heads in (HEADS, kv_heads, kv_heads)]
    inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
    forwards = {name: partial(way, *inputs, contiguous) for name, way in WAYS.items()}
    kept = {}
    for name, forward in forwards.items():
        ledger = Ledger()
        with ledger.saved_for_backward():
            held = forward()
        kept[name] = ledger.saved_now("cpu")
        del held
    times = both_ways(forwards, turns)
    return {name: [(kept[name], *both) for both in times[name]] for name in WAYS}


if __name__ == "__main__":
    given = options(__doc__, ranks=2, tokens=1024, turns=5, repeats=1)
    rows = []
    for kv_heads in (HEADS, 2):
        runs = all_turns(given, measure, given.tokens, kv_heads, given.turns)
        for (name, turns), method in zip(runs.items(), SENDS, strict=True):
            (kept, *_), *times = zip(*turns, strict=True)
            group = HEADS // kv_heads
            numbers = sent_by_formula(method, given.ranks, HEADS * SIZE, group, given.tokens)
            row = [kv_heads, name, *map(median_ms, times)]
            rows.append([*row, bytes_text(kept), bytes_text(4 * numbers)])
    header = ["KV heads", "", "forward ms", "backward ms", "kept", "sent in forward"]
    show(given, header, rows)
