"""`hello` takes right answers in other words, and says what is wrong with the others."""

from mgpu_tutorial.processes_and_ranks.builds import build
from tests.builds import Right, Wrong, edited

OBJECTS = """total = [None] * world_size
    dist.all_gather_object(total, rank)
    print(f"{rank}/{world_size}: {sum(total)}")
    dist.destroy_process_group()"""
BY_TORCHRUN = """import os
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])"""
WHO, REDUCE = "dist.get_rank(), dist.get_world_size()", "dist.all_reduce(total)"
LATE = "DistStoreError: Timed out after 1801 seconds waiting for clients"
HELLO = [
    Right("hello", replace={"total =…": OBJECTS}),
    Right("hello", replace={f"rank, world_size = {WHO}": BY_TORCHRUN}),
    Right("hello", replace={"torch.tensor([rank])": "torch.tensor([float(rank)])"}),
    Right("hello", replace={REDUCE: f'print("rank", rank, "begins"); {REDUCE}'}),
    Right("hello", replace={REDUCE: f'{REDUCE}; print("debug", total)'}),
    Wrong(
        "hello",
        replace={"print(": 'for i in range(20_000):\n        print("line", i)\n    str('},
        says="characters) …",
    ),
    Wrong(
        "hello",
        replace={REDUCE: "total = sum(range(world_size)) + 0 * total"},
        says="has heard no number of another",
    ),
    Wrong(
        "hello",
        replace={
            'dist.init_process_group("gloo")': "dist.init_process_group(rank=0, world_size=2)"
        },
        says=LATE,
    ),
    Wrong(
        "hello",
        replace={'dist.init_process_group("gloo")': ""},
        says="has not been initialized",
    ),
    Wrong("hello", replace={REDUCE: ""}, says="up to 0', expected 0, 2 and last 1 in a line"),
    Wrong("hello", replace={REDUCE: f"total = {REDUCE}"}, says="NoneType"),
    Wrong(
        "hello",
        replace={REDUCE: f"{REDUCE[:-1]}, dist.ReduceOp.MAX)"},
        says="up to 2', expected 0, 3 and last 3 in a line",
    ),
    Wrong(
        "hello",
        replace={"total.item()": "total.item() if rank == 0 else rank"},
        says="rank 1 of 3 printed",
    ),
    Wrong(
        "hello",
        replace={"dist.destroy": "if rank == 0:\n        dist.destroy"},
        says="rank 1 is still in the group",
    ),
    Wrong("hello", replace={WHO: "dist.get_rank(), 1"}, says="rank 0 of 2 printed"),
    Wrong(
        "hello",
        replace={"rank {rank} of {world_size}": "of {world_size}, rank {rank}"},
        says="rank 0 of 1 printed",
    ),
    Wrong(
        "hello",
        replace={"print(": "world_size > 1 and print("},
        says="rank 0 of 1 printed ''",
    ),
]
test_right, test_wrong = edited(build, HELLO)
