"""The collectives, one call in each worker; the first eight return what a rank then holds."""

import torch
import torch.distributed as dist


def broadcast(rank: int, world_size: int) -> torch.Tensor:
    """Rank 0's tensor overwrites everybody's."""
    tensor = torch.tensor([10 * (rank + 1)])
    dist.broadcast(tensor, src=0)
    return tensor


def reduce(rank: int, world_size: int) -> torch.Tensor | None:
    """The sum arrives on rank 0; what the others then hold is undefined."""
    tensor = torch.tensor([10 * (rank + 1)])
    dist.reduce(tensor, dst=0)
    return tensor if rank == 0 else None


def all_reduce(rank: int, world_size: int) -> torch.Tensor:
    """The sum arrives on every rank."""
    tensor = torch.tensor([10 * (rank + 1)])
    dist.all_reduce(tensor)
    return tensor


def scatter(rank: int, world_size: int) -> torch.Tensor:
    """Rank 0 hands out a list of tensors, one to each rank."""
    pieces = None
    if rank == 0:
        pieces = [torch.tensor([10 + i]) for i in range(world_size)]
    mine = torch.zeros(1, dtype=torch.int64)
    dist.scatter(mine, pieces, src=0)
    return mine


def gather(rank: int, world_size: int) -> list[torch.Tensor] | None:
    """Everybody's tensor arrives in a list on rank 0."""
    mine = torch.tensor([10 * (rank + 1)])
    places = None
    if rank == 0:
        places = [torch.zeros_like(mine) for _ in range(world_size)]
    dist.gather(mine, places, dst=0)
    return places


def all_gather(rank: int, world_size: int) -> list[torch.Tensor]:
    """Everybody's tensor arrives in a list on every rank."""
    mine = torch.tensor([10 * (rank + 1)])
    places = [torch.zeros_like(mine) for _ in range(world_size)]
    dist.all_gather(places, mine)
    return places


def reduce_scatter(rank: int, world_size: int) -> torch.Tensor:
    """Rank r gets the sum of everybody's piece r."""
    pieces = list((torch.arange(world_size) + 10 * (rank + 1)).split(1))
    mine = torch.zeros_like(pieces[0])
    dist.reduce_scatter(mine, pieces)
    return mine


def all_to_all(rank: int, world_size: int) -> list[torch.Tensor]:
    """Rank r sends its piece s to rank s."""
    pieces = list((torch.arange(world_size) + 10 * (rank + 1)).split(1))
    places = [torch.zeros_like(piece) for piece in pieces]
    dist.all_to_all(places, pieces)
    return places


def reduce_with(rank: int, world_size: int, name: str) -> float:
    """All-reduce the numbers 1, 2, … with the operation of that name."""
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value, op=getattr(dist.ReduceOp, name))
    return value.item()
