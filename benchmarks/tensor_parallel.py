"""Tensor parallel by model size: ours beside PyTorch's parallelize_module.

    python benchmarks/tensor_parallel.py [--ranks 2] [--steps 10] [--repeats 3]

Both run forward with the loss, and backward, in turns inside the same ranks; with slices of
the sequence too. Prints the median milliseconds of each, and how many times as long as
PyTorch's it takes (the median over all turns of the ratio of the two in one turn).
"""

from functools import partial

from common import median_ms, options, ratio, repeat

from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.tensor_parallel.torch_plan import by_torch, by_torch_in_slices
from mgpu_tutorial.tensor_parallel.training import in_pieces, in_slices, new_batch, new_model

SIZES = {  # of a SmallTransformer, and the sequences and tokens of a batch
    "0.2 MB": ({"vocabulary": 64, "width": 48, "heads": 4, "depth": 2}, (4, 16)),
    "3 MB": ({"vocabulary": 256, "width": 128, "heads": 4, "depth": 4}, (4, 32)),
    "26 MB": ({"vocabulary": 1024, "width": 384, "heads": 8, "depth": 4}, (4, 64)),
    "105 MB": ({"vocabulary": 4096, "width": 768, "heads": 8, "depth": 3}, (4, 64)),
}
PAIRS = (  # ours, and what it is compared with
    ("in pieces", "parallelize_module"),
    ("in slices", "parallelize_module in slices"),
)
WAYS = {
    "in pieces": in_pieces,
    "parallelize_module": by_torch,
    "in slices": in_slices,
    "parallelize_module in slices": by_torch_in_slices,
}
COLUMNS = ("ms", "of PyTorch", "ratio")


def time_ways(
    rank: int, world_size: int, model: dict[str, int], batch: tuple[int, int], steps: int
) -> dict[str, list[tuple[float, float]]]:
    """The seconds of each way's forward with loss, and of its backward, in turns."""
    trainable = {name: way(new_model(**model)) for name, way in WAYS.items()}
    tokens, targets = new_batch(0, *batch, model["vocabulary"])
    losses = {}

    def forward(name: str) -> None:
        one = trainable[name]
        with one.context():
            losses[name] = one.loss(one.model(tokens), targets)

    def backward(name: str) -> None:
        one = trainable[name]
        one.model.zero_grad()
        with one.context():
            losses.pop(name).backward()
        one.after_backward()

    parts = forward, backward
    actions = {(part, name): partial(part, name) for name in WAYS for part in parts}
    seconds = in_turns(actions, steps, warm_up=2)
    return {name: list(zip(*(seconds[p, name] for p in parts), strict=True)) for name in WAYS}


def main() -> None:
    given = options(__doc__, ranks=2, steps=10, repeats=3)
    rows = []
    for size, (model, batch) in SIZES.items():
        runs = repeat(given.repeats, given.ranks, time_ways, model, batch, given.steps)
        turns = {name: sum(runs[name], []) for name in runs}
        for ours, theirs in PAIRS:
            row: list[object] = [size, ours]
            for part in range(2):  # forward, backward
                mine, other = ([turn[part] for turn in turns[n]] for n in (ours, theirs))
                row += [median_ms(mine), median_ms(other), ratio(mine, other)]
            rows.append(row)
    print(f"{given.ranks} ranks, gloo on CPU, {given.repeats} runs of {given.steps} steps")
    head = [f"{part} {what}" for part in ("forward", "backward") for what in COLUMNS]
    print(Table(["parameters", "", *head], rows))


if __name__ == "__main__":
    main()
