"""Right and wrong ways to write the tool that replays batches."""

from mgpu_tutorial.when_it_breaks.builds import build
from tests.builds import Right, Wrong, edited

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
    Right("replay", replace={SAME: BITS}),
    Right("replay", replace={".cpu()": ""}),
    Wrong(
        "replay", replace={'"rtol": 0': '"rtol": 1e-12'}, says="returned [], expected [2, 3]"
    ),
    Wrong("replay", replace={SAME: BLAMED}, says="expected [1, 2]"),
    Wrong("replay", replace={OTHERS: "gradient_of(batch)"}, says="expected []"),
    Wrong(
        "replay",
        replace={"range(world_size) if": "range(world_size - 1) if"},
        says="expected [0, 2]",
    ),
    Wrong(
        "replay",
        replace={"dist.all_gather_object(pairs, mine)": FIRST_ONLY},
        says="rank 1 returned [], expected [1, 2]",
    ),
    Wrong(
        "replay",
        replace={SAME: "own[r].equal(again[r])"},
        says="all gradients NaN: rank 0 returned [0, 1]",
    ),
    Wrong(
        "replay",
        replace={"mine = gradient_of(batch).cpu(), gradient_of(of_others).cpu()": EVERY},
        says="that rank 0 computed: 4, expected 2",
    ),
    Wrong(
        "replay",
        replace={"world_size < 2": "world_size < 1"},
        says="on one rank: 'it returned []'",
    ),
]
test_right, test_wrong = edited(build, REPLAY)
