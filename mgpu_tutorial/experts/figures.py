"""Apparatus, not the lesson: a film of the tokens' journey."""

from collections.abc import Sequence

import torch

from mgpu_tutorial.experts.layer import choose, drawn
from mgpu_tutorial.experts.parallel import combine, dispatch
from mgpu_tutorial.lab import frame


def travel(rank: int, world_size: int) -> None:
    """Twelve tokens go to their experts and back, with k = 1 and a film.

    A row carries its token, its expert and the place that it leaves from.
    """

    def say(says: str, rows: torch.Tensor, came_from: Sequence[int] = ()) -> None:
        numbered = list(enumerate(rows.tolist()))
        tokens = {str(i): (f"{row[0]}→e{row[1]}", row[0] // 3) for i, row in numbered}
        came = {
            str(i): (came_from[i], str(row[2])) if row[0] < 3 else None
            for i, row in numbered
            if came_from
        }
        frame(says, tokens, came)

    mine = torch.arange(12).tensor_split(world_size)[rank]
    chosen = choose(drawn(5, 12, 16) @ drawn(1, 16, world_size), k=1)[mine]
    order = chosen.flatten().argsort(stable=True)
    rows = torch.stack([mine, chosen.flatten(), order.argsort()], 1)
    says = "Each rank has three tokens of its own. The router has chosen an expert for each."
    say(says, rows)
    say("Each rank sorts its tokens by expert.", rows[order])
    arrived, _, way = dispatch(rows, chosen.flatten(), world_size)
    says = "Each token goes to its expert's rank. The arrows follow the tokens of rank 0."
    say(says, arrived, (arrived[:, 0] // 3).tolist())
    arrived[:, 2] = torch.arange(len(arrived))
    back = combine(arrived, way, torch.ones_like(chosen))
    says = "The answers come home, to the places that the tokens had before the sort."
    say(says, back, chosen.flatten().tolist())
