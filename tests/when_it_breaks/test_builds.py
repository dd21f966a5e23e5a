"""Right and wrong ways to write the tool that replays batches."""

from mgpu_tutorial.when_it_breaks.builds import build
from tests.builds import edited

EVERY = """every = [gradient_of(other).cpu() for other in batches]
    mine = every[rank], every[rank - 1]"""
OTHERS = "gradient_of(of_others)"
SAME = "own[r].allclose(again[r], **exactly)"
BITS = "bool((own[r].isnan() & again[r].isnan() | (own[r] == again[r])).all())"
BLAMED = "again[r - 1].allclose(own[r - 1], **exactly)"  # who replays, and not whose it is
FIRST_ONLY = """dist.gather_object(mine, None if rank else pairs)
    if rank:
        return []"""
REPLAY = [
    (SAME, BITS),
    (".cpu()", ""),
    ('"rtol": 0', '"rtol": 1e-12', "returned [], expected [2, 3]"),
    (SAME, BLAMED, "expected [1, 2]"),
    (OTHERS, "gradient_of(batch)", "expected []"),
    ("range(world_size) if", "range(world_size - 1) if", "expected [0, 2]"),
    (
        "dist.all_gather_object(pairs, mine, group)",
        FIRST_ONLY,
        "rank 1 returned [], expected [1, 2]",
    ),
    (SAME, "own[r].equal(again[r])", "all gradients NaN: rank 0 returned [0, 1]"),
    (
        "mine = gradient_of(batch).cpu(), gradient_of(of_others).cpu()",
        EVERY,
        "that rank 0 computed: 4, expected 2",
    ),
    ("world_size < 2", "world_size < 1", "on one rank: 'it returned []'"),
]
test_right, test_wrong = edited(build, {"replay": REPLAY})
