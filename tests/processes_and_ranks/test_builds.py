"""`hello` takes right answers in other words, and says what is wrong with the others."""

from mgpu_tutorial.processes_and_ranks.builds import build
from tests.builds import right_and_wrong


def hello(*lines):
    head = "import os\nimport torch\nimport torch.distributed as dist\n\n\ndef hello():"
    return "\n    ".join([head, *lines])


INIT, DESTROY = 'dist.init_process_group("gloo")', "dist.destroy_process_group()"
WHO = "rank, world_size = dist.get_rank(), dist.get_world_size()"
TOTAL, REDUCE = "total = torch.tensor([rank])", "dist.all_reduce(total)"
PRINT = 'print(f"rank {rank} of {world_size}, all ranks add up to {total.item()}")'
RIGHT = [
    hello(INIT, WHO, TOTAL, REDUCE, PRINT, DESTROY),
    hello(
        'rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])',
        'dist.init_process_group("gloo", rank=rank, world_size=world_size)',
        "total = torch.tensor(float(rank))",
        REDUCE,
        "dist.barrier()",
        DESTROY,
        "print(rank, world_size, int(total))",
    ),
    hello(
        'dist.init_process_group(init_method="env://")',
        WHO,
        "total = [None] * world_size",
        "dist.all_gather_object(total, rank)",
        'print(f"{rank}/{world_size}: {sum(total)}")',
        DESTROY,
    ),
]
WRONG = {
    hello(WHO, TOTAL, REDUCE, PRINT, DESTROY): "has not been initialized",
    hello(INIT, WHO, TOTAL, PRINT, DESTROY): "rank 0 of 2 printed: 0, expected 1",
    hello(INIT, WHO, TOTAL, "total = dist.all_reduce(total)", PRINT): "NoneType",
    hello(INIT, WHO, TOTAL, REDUCE, PRINT): "rank 0 is still in the group",
    hello(INIT, WHO, TOTAL, "if rank == 0:", f"    {REDUCE}", PRINT, DESTROY): "rank 0",
    hello(
        INIT, "rank, world_size = 0, 2", TOTAL, REDUCE, PRINT, DESTROY
    ): "rank 0 of 3 printed",
    hello("..."): "a `...` is left to fill in",
}


test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG.items())
