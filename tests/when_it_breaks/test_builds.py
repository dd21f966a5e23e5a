"""Right and wrong ways to write the tool that replays batches."""

from mgpu_tutorial.when_it_breaks.builds import build
from tests.builds import right_and_wrong

HEAD = """
import torch
import torch.distributed as dist


def replay(gradient_of, batch):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches, pairs = [None] * world_size, [None] * world_size
    dist.all_gather_object(batches, batch)
    {}
    dist.all_gather_object(pairs, mine)
    {}
"""
MINE = "mine = gradient_of(batch), gradient_of(batches[rank - 1])"
AFTER = "pairs[(r + 1) % world_size][1]"

test_right, test_wrong = right_and_wrong(
    build,
    right=[
        HEAD.format(
            MINE, f"return [r for r in range(world_size) if (pairs[r][0] != {AFTER}).any()]"
        ),
        HEAD.format(
            "mine = [gradient_of(other) for other in batches]",
            "return [r for r in range(world_size) if not torch.equal("
            "pairs[r][r], pairs[r + 1 - world_size][r])]",
        ),
    ],
    wrong=[
        (
            HEAD.format(
                MINE,
                "return [r for r in range(world_size) if not torch.allclose("
                f"pairs[r][0], {AFTER})]",
            ),
            "returned [], expected [2, 3]",
        ),
        (
            HEAD.format(
                MINE,
                "return [r for r in range(world_size) if not pairs[r][1].equal("
                "pairs[r - 1][0])]",
            ),
            "expected [1, 2]",
        ),
        (
            HEAD.format(
                "mine = gradient_of(batch), gradient_of(batch)",
                "return [r for r in range(world_size) if not pairs[r][0].equal(pairs[r][1])]",
            ),
            "expected [1, 2]",
        ),
        (
            HEAD.format(
                MINE,
                "return [r for r in range(world_size - 1) "
                "if not pairs[r][0].equal(pairs[r + 1][1])]",
            ),
            "expected [0, 2]",
        ),
    ],
)
