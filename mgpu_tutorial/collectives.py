"""Collectives: operations that every rank of a group calls together.

The first nine workers show one operation each: every rank returns what it held
(before, after), two lists of numbers. The rest is the ring all-reduce.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from mgpu_tutorial.lab import note

Cells = tuple[list[float | None], list[float | None]]


def _mine(rank: int, size: int = 1) -> torch.Tensor:
    """Values that tell where they come from: 10, 11, … on rank 1, 20, 21, … on rank 2."""
    return torch.arange(size) + 10 * rank


def broadcast(rank: int, world_size: int) -> Cells:
    """Rank 0's value goes to every rank."""
    value = _mine(rank + 1)
    before = value.tolist()
    dist.broadcast(value, src=0)
    return before, value.tolist()


def scatter(rank: int, world_size: int) -> Cells:
    """Rank 0 hands one piece of its list to each rank."""
    pieces = list(_mine(1, world_size).split(1)) if rank == 0 else None
    value = torch.zeros(1, dtype=torch.int64)
    dist.scatter(value, pieces, src=0)
    before = torch.cat(pieces).tolist() if rank == 0 else [None] * world_size
    return before, value.tolist()


def gather(rank: int, world_size: int) -> Cells:
    """Every rank's value goes into a list on rank 0."""
    value = _mine(rank + 1)
    places = [torch.zeros_like(value) for _ in range(world_size)] if rank == 0 else None
    dist.gather(value, places, dst=0)
    return value.tolist(), torch.cat(places).tolist() if rank == 0 else [None] * world_size


def all_gather(rank: int, world_size: int) -> Cells:
    """Every rank's value goes into a list on every rank."""
    value = _mine(rank + 1)
    places = [torch.zeros_like(value) for _ in range(world_size)]
    dist.all_gather(places, value)
    return value.tolist(), torch.cat(places).tolist()


def reduce(rank: int, world_size: int) -> Cells:
    """The sum of all values arrives on rank 0; what the others hold is undefined."""
    value = _mine(rank + 1)
    before = value.tolist()
    dist.reduce(value, dst=0, op=dist.ReduceOp.SUM)
    return before, value.tolist() if rank == 0 else [None]


def all_reduce(rank: int, world_size: int) -> Cells:
    """The sum of all values arrives on every rank."""
    value = _mine(rank + 1)
    before = value.tolist()
    dist.all_reduce(value, op=dist.ReduceOp.SUM)
    return before, value.tolist()


def reduce_scatter(rank: int, world_size: int) -> Cells:
    """Rank r gets the sum of everybody's piece r."""
    values = _mine(rank + 1, world_size)
    piece = torch.zeros(1, dtype=values.dtype)
    dist.reduce_scatter(piece, list(values.split(1)), op=dist.ReduceOp.SUM)
    return values.tolist(), piece.tolist()


def all_to_all(rank: int, world_size: int) -> Cells:
    """Rank r sends its piece s to rank s: the matrix of pieces is transposed."""
    values = _mine(rank + 1, world_size)
    places = [torch.zeros(1, dtype=values.dtype) for _ in range(world_size)]
    dist.all_to_all(places, list(values.split(1)))
    return values.tolist(), torch.cat(places).tolist()


def barrier(rank: int, world_size: int, pause: float) -> float:
    """Rank 0 comes `pause` seconds late; returns the seconds that each rank waited."""
    if rank == 0:
        time.sleep(pause)
    begin = time.perf_counter()
    dist.barrier()
    return time.perf_counter() - begin


def reduce_with(rank: int, world_size: int, name: str) -> float:
    """All-reduce the numbers 1, 2, … (one a rank) with the named reduce operation."""
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value, op=getattr(dist.ReduceOp, name))
    return value.item()


def pairs(rank: int, world_size: int) -> float:
    """Even and odd ranks add up in groups of their own; returns the group's sum."""
    evens = dist.new_group(range(0, world_size, 2))  # every rank makes every group
    odds = dist.new_group(range(1, world_size, 2))
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=evens if rank % 2 == 0 else odds)
    return value.item()


def started_early(rank: int, world_size: int) -> float:
    """Start an all-reduce, do something else, wait; returns the sum."""
    value = torch.tensor([float(rank)])
    work = dist.all_reduce(value, async_op=True)
    print("the other work gives", sum(range(1000)))  # must not touch value
    work.wait()
    return value.item()


def different_operations(rank: int, world_size: int) -> float:
    """Rank 0 calls all_reduce, rank 1 broadcast: both wait for a call that never comes."""
    value = torch.ones(1)
    if rank == 0:
        dist.all_reduce(value)
    else:
        dist.broadcast(value, src=0)
    return value.item()


def different_shapes(rank: int, world_size: int) -> None:
    """Rank 0 reduces two numbers, the others four: a mismatch that gloo does not look for."""
    value = torch.ones(2 if rank == 0 else 4)
    dist.all_reduce(value)
    print(value.tolist())


# All-reduce out of send and receive


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Sum `tensor` (flat, in place) over all ranks, each talking to its neighbours only.

    Every rank sends 2 (N-1) pieces of 1/N of the tensor to its right. Source: Patarasuk
    and Yuan, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = list(tensor.tensor_split(world_size))
    incoming = torch.empty_like(chunks[0])
    for step in range(world_size - 1):  # reduce-scatter: sums grow along the ring
        sending = dist.isend(chunks[(rank - step) % world_size], right)
        target = chunks[(rank - step - 1) % world_size]
        dist.recv(incoming[: len(target)], left)
        target += incoming[: len(target)]
        sending.wait()
    for step in range(world_size - 1):  # all-gather: finished sums go round
        sending = dist.isend(chunks[(rank - step + 1) % world_size], right)
        dist.recv(chunks[(rank - step) % world_size], left)
        sending.wait()


def naive_all_reduce(tensor: torch.Tensor) -> None:
    """Sum `tensor` (in place) on rank 0 and send the sum back to everybody."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(tensor, dst=0)
        dist.recv(tensor, src=0)
        return
    incoming = torch.empty_like(tensor)
    for peer in range(1, world_size):
        dist.recv(incoming, src=peer)
        tensor += incoming
    for peer in range(1, world_size):
        dist.send(tensor, dst=peer)


def whole_ring(tensor: torch.Tensor) -> None:
    """Sum `tensor` (in place) by passing whole tensors around: N-1 times too many bytes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    passing, incoming = tensor.clone(), torch.empty_like(tensor)
    for _ in range(world_size - 1):
        sending = dist.isend(passing, (rank + 1) % world_size)
        dist.recv(incoming, (rank - 1) % world_size)
        sending.wait()
        tensor += incoming
        passing, incoming = incoming, passing


def gloo_all_reduce(tensor: torch.Tensor) -> None:
    """Sum `tensor` (in place) with the library's own all_reduce."""
    dist.all_reduce(tensor)


def ring_step_by_step(rank: int, world_size: int) -> list[int]:
    """The ring on one small number a chunk, with a note of all chunks after each step."""
    chunks = list((10**rank * torch.ones(world_size, dtype=torch.int64)).split(1))
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    note(_shown(chunks))
    for step in range(2 * (world_size - 1)):
        adding = step < world_size - 1
        sending = dist.isend(chunks[(rank - step) % world_size], right)
        incoming = torch.zeros(1, dtype=torch.int64)
        dist.recv(incoming, left)
        sending.wait()
        target = chunks[(rank - step - 1) % world_size]
        target.copy_(target + incoming if adding else incoming)
        note(_shown(chunks))
    return torch.cat(chunks).tolist()


def _shown(chunks: list[torch.Tensor]) -> str:
    return " ".join(f"{chunk.item():0{4}d}" for chunk in chunks)


def reduce_by(rank: int, world_size: int, method: Callable, size: int) -> torch.Tensor:
    """Run one all-reduce `method` on `size` random numbers; returns the sum."""
    generator = torch.Generator().manual_seed(rank)
    tensor = torch.randn(size, generator=generator)
    method(tensor)
    return tensor


def time_methods(
    rank: int, world_size: int, methods: list[Callable], sizes: list[int], repeats: int = 5
) -> dict[tuple[str, int], float]:
    """Time each method on each size (bytes), in turns; returns the least seconds.

    Other programs on this machine can only add to a time, so the least is the nearest.
    """
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(repeats):
        for size in sizes:
            for method in methods:
                tensor = torch.ones(size // 4)
                dist.barrier()
                begin = time.perf_counter()
                method(tensor)
                dist.barrier()
                seconds = time.perf_counter() - begin
                times.setdefault((method.__name__, size), []).append(seconds)
    return {key: min(values) for key, values in times.items()}


def ring_seconds(size: int, world_size: int, alpha: float, beta: float) -> float:
    """What the model says: 2 (N-1) messages, each alpha seconds and size / N bytes."""
    return 2 * (world_size - 1) * (alpha + size / world_size / beta)


def fit_alpha_beta(
    sizes: list[int], seconds: list[float], world_size: int
) -> tuple[float, float]:
    """Fit `ring_seconds` to measured times by least squares of the relative errors.

    `sizes` in bytes; returns alpha in seconds a message and beta in bytes a second.
    """
    steps = 2 * (world_size - 1)
    bytes_sent = torch.tensor([steps / world_size * size for size in sizes])
    design = torch.stack([torch.full_like(bytes_sent, steps), bytes_sent], dim=1).double()
    weights = 1 / torch.tensor(seconds).double()
    solution = torch.linalg.lstsq(
        design * weights[:, None], torch.ones(len(seconds), 1).double()
    ).solution
    alpha, per_byte = solution.flatten().tolist()
    return alpha, 1 / per_byte
