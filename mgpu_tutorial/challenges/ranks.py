"""An answer of simulated messages, sent by real ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def send_rounds(
    rank: int, world_size: int, rounds: Sequence[Sequence[Sequence[int]]]
) -> list[int]:
    """The sums of all chunks on this rank, after rounds of messages [source, target, chunk].

    Each rank begins with 10 · rank + chunk in each of `world_size` chunks. A message has the
    chunk's number, and a bit for each rank whose summand is in it.
    """
    sums = [torch.tensor([10 * rank + c, 1 << rank]) for c in range(world_size)]
    for messages in rounds:
        works, arrived = [], []
        for source, target, chunk in messages:
            if source == rank:
                works.append(dist.isend(sums[chunk].clone(), target))
            if target == rank:
                arrived.append((chunk, torch.empty(2, dtype=torch.long)))
                works.append(dist.irecv(arrived[-1][1], source))
        for work in works:
            work.wait()
        for chunk, new in arrived:
            # all of ours is in it already, or none of it
            is_whole = int(new[1] & sums[chunk][1]) == int(sums[chunk][1])
            sums[chunk] = new if is_whole else sums[chunk] + new
    return [int(number) for number, _ in sums]
