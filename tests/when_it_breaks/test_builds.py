"""Right and wrong ways to write the tool that replays batches."""

from mgpu_tutorial.when_it_breaks.builds import build
from tests.builds import edited

EVERY = """mine = [gradient_of(other) for other in batches]
    dist.all_gather_object(pairs, mine)
    return [r for r in range(world_size) if not
            pairs[r][r].equal(pairs[r + 1 - world_size][r])]"""
SECOND = "gradient_of(batches[rank - 1])"
AGAIN = "replayed[r + 1 - world_size]"
SAME = f"own[r].equal({AGAIN})"
BLAMED = "replayed[r].equal(own[r - 1])"  # who replays, and not whose it is
LAST_LEFT_OUT = "[r for r in range(world_size - 1) if not own[r].equal(replayed[r + 1])]"
FIRST_ONLY = """dist.gather_object(mine, None if rank else pairs)
    if rank:
        return []"""
REPLAY = [
    ("mine =…", EVERY),
    ("not own[r].equal(", "(own[r] != ", ")]", ").any()]"),
    (SAME, f"torch.allclose(own[r], {AGAIN}, rtol=1e-12)", "returned [], expected [2, 3]"),
    (SAME, BLAMED, "expected [1, 2]"),
    (SECOND, "gradient_of(batch)", "expected []"),
    ("return…", f"return {LAST_LEFT_OUT}", "expected [0, 2]"),
    (
        "dist.all_gather_object(pairs, mine)",
        FIRST_ONLY,
        "rank 1 returned [], expected [1, 2]",
    ),
]
test_right, test_wrong = edited(build, {"replay": REPLAY})
