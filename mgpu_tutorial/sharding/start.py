"""What the sharding wrappers have in common: all ranks begin with the same values."""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.wrappers import Replica, require_same_parameters
from mgpu_tutorial.lab import borrowed


class Sharded(nn.Module):
    """A wrapper around `module`, to which rank 0 sends its parameters and buffers once.

    Raises ValueError on every rank where the ranks' modules differ, where no parameter is to
    be trained, and where a wrapper is at work inside already.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        require_same_parameters(module)  # first, so that all ranks come to the same error
        require_no_wrapper(module)
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.module = module


borrowed.refuse_ddp(
    Sharded,
    "a sharded module averages its gradients by itself, and its ranks have different shards, "
    "which DDP would overwrite: wrap a module once",
)


def require_no_wrapper(module: nn.Module) -> None:
    """ValueError where a module is wrapped already, or a part of it."""
    for name, part in module.named_modules():
        if isinstance(part, (Sharded, Replica, DistributedDataParallel)):
            where = f" at {name!r}" if name else ""
            raise ValueError(
                f"there is a {type(part).__name__} inside{where}: wrap a module once"
            )
