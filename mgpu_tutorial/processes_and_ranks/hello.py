"""A whole script for torchrun: the ranks meet, add up their numbers, and part.

torchrun --nproc-per-node 2 hello.py
"""

import torch
import torch.distributed as dist


def hello() -> None:
    """Meet the others, say who is here and what all ranks add up to, and leave."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([rank])
    dist.all_reduce(total)
    print(f"rank {rank} of {world_size}, all ranks add up to {total.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    hello()
