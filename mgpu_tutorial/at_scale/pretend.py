"""A thousand ranks in one process: what they would call and send, without sending anything.

PyTorch's "fake" process group takes this process for one rank of many. Its collectives
return at once and move nothing, so every value after one is wrong. How often they are
called, on how many bytes and with which shapes is right, because none of that depends on
values.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mgpu_tutorial.lab.run.launch import launch

# What everybody calls the operators of PyTorch that begin so, such as _allgather_base_.
NAMES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "reduce", "broadcast")
NAMES += ("send", "recv")


@dataclass
class Pretended:
    """What one rank of `world_size` would do: its calls, their bytes, its operations.

    `calls` and `nbytes` are by collective; the bytes are those of the larger side, so of what
    an all_gather returns and of what a reduce_scatter is given. `flops` counts this rank's
    floating-point operations in matrix products and convolutions. `returned` is what the
    worker returned; in it, only what no other rank has part in is right.
    """

    world_size: int
    calls: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    returned: Any = None


def pretend(
    worker: Callable[..., Any], *args: Any, world_size: int = 1024, **kwargs: Any
) -> Pretended:
    """Run `worker(0, world_size, *args, **kwargs)` in one process, as rank 0 of so many."""
    limits = {"backend": "none", "device": "cpu", "timeout": 600}
    report = launch(_as_one_of_many, 1, worker, world_size, args, kwargs, **limits)
    return report.results[0]


def _as_one_of_many(
    rank: int, size: int, worker: Callable, world_size: int, args: tuple, kwargs: dict
) -> Pretended:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    seen = Pretended(world_size)
    with FlopCounterMode(display=False) as operations, Counting(seen):
        seen.returned = worker(0, world_size, *args, **kwargs)
    seen.flops = operations.get_total_flops()
    return seen


class Counting(TorchDispatchMode):
    """Counts collectives where PyTorch calls its own operators, below Python's."""

    def __init__(self, seen: Pretended) -> None:
        from torch.distributed.tensor import DTensor  # half a second, for a rank only

        super().__init__()
        self.seen, self.shared_out = seen, DTensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if self.shared_out in types:
            return NotImplemented  # let it first become what this rank really does
        out = func(*args, **(kwargs or {}))
        space, _, operator = func.name().partition("::")
        plain = operator.replace("_", "")
        name = next((n for n in NAMES if plain.startswith(n.replace("_", ""))), None)
        if "c10d" in space and name:
            self.seen.calls[name] += 1
            self.seen.nbytes[name] += max(map(_nbytes, args))
        return out


def _nbytes(side: Any) -> int:
    if isinstance(side, list | tuple):
        return sum(map(_nbytes, side))
    return side.nbytes if isinstance(side, torch.Tensor) else 0
