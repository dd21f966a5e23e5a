"""What a proof costs beside a launch of the same worker.

    python benchmarks/prove.py [--repeats 7]

The small model of Llama's kind on four ranks takes two steps, launched and proved in turns.
"""

from statistics import median

from common import options

from mgpu_tutorial import launch, prove
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP
from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.shared import small_and_large as sizes

WORKER = sizes.train, 4, BucketedDDP, sizes.small, sizes.SMALL


def launched() -> None:
    """The four ranks alone."""
    launch(*WORKER, device="cpu")


def proved() -> None:
    """One process, the same a unit in the last place off, and the four ranks; compared."""
    assert prove(*WORKER).right


if __name__ == "__main__":
    turns = in_turns(
        {"launch": launched, "prove": proved}, options(__doc__, repeats=7).repeats, 1
    )
    ratio = median(b / a for a, b in zip(turns["launch"], turns["prove"], strict=True))
    rows = [[name, f"{median(taken):.2f}"] for name, taken in turns.items()]
    print(Table(["", "median s"], rows), f"prove / launch: {ratio:.1f}", sep="\n")
