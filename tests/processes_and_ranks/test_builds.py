"""`hello` takes right answers in other words, and says what is wrong with the others."""

from mgpu_tutorial.processes_and_ranks.builds import build
from tests.builds import edited

OBJECTS = """total = [None] * world_size
    dist.all_gather_object(total, rank)
    print(f"{rank}/{world_size}: {sum(total)}")
    dist.destroy_process_group()"""
BY_TORCHRUN = """import os
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])"""
WHO, REDUCE = "dist.get_rank(), dist.get_world_size()", "dist.all_reduce(total)"
LATE = "DistStoreError: Timed out after 1801 seconds waiting for clients"
HELLO = [
    ("total =…", OBJECTS),
    (f"rank, world_size = {WHO}", BY_TORCHRUN),
    ("torch.tensor([rank])", "torch.tensor([float(rank)])"),
    (REDUCE, "total = sum(range(world_size)) + 0 * total", "has heard no number of another"),
    (
        'dist.init_process_group("gloo")',
        "dist.init_process_group(rank=0, world_size=2)",
        LATE,
    ),
    ('dist.init_process_group("gloo")', "", "has not been initialized"),
    (REDUCE, "", "up to 0', expected 0, 2 and last 1 in it"),
    (REDUCE, f"total = {REDUCE}", "NoneType"),
    (
        REDUCE,
        f"{REDUCE[:-1]}, dist.ReduceOp.MAX)",
        "up to 2', expected 0, 3 and last 3 in it",
    ),
    ("total.item()", "total.item() if rank == 0 else rank", "rank 1 of 3 printed"),
    ("dist.destroy", "if rank == 0:\n        dist.destroy", "rank 1 is still in the group"),
    (WHO, "dist.get_rank(), 1", "rank 0 of 2 printed"),
    ("rank {rank} of {world_size}", "of {world_size}, rank {rank}", "rank 0 of 1 printed"),
    ("print(", "world_size > 1 and print(", "rank 0 of 1 printed ''"),
]
test_right, test_wrong = edited(build, {"hello": HELLO})
