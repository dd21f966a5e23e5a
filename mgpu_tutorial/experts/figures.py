"""Apparatus, not the lesson: a film of the tokens' journey."""

from collections.abc import Mapping, Sequence

import torch

from mgpu_tutorial.experts.layer import choose, drawn
from mgpu_tutorial.experts.parallel import combine, dispatch
from mgpu_tutorial.lab import frame


def travel(rank: int, world_size: int) -> None:
    """Twelve tokens go to their experts and back, with k = 1 and a film.

    A row carries its token, its expert and the place that it leaves from. Slots 0 to 2 are a
    rank's own tokens, and the others what has come to its expert.
    """

    def say(
        says: str, own: torch.Tensor, here: Sequence = (), came: Mapping | None = None
    ) -> None:
        slots = {str(i): row for i, row in enumerate(own.tolist())}
        slots |= {f"here {i}": row for i, row in enumerate(here)}
        tokens = {slot: (f"{row[0]} e{row[1]}", row[0] // 3) for slot, row in slots.items()}
        frame(says, tokens, came)

    mine = torch.arange(12).tensor_split(world_size)[rank]
    chosen = choose(drawn(5, 12, 16) @ drawn(1, 16, world_size), k=1)[mine]
    order = chosen.flatten().argsort(stable=True)
    rows = torch.stack([mine, chosen.flatten(), order.argsort()], 1)
    says = "Each rank has three tokens. The router has chosen their experts."
    say(says, rows)
    say("Each rank sorts its tokens by expert.", rows[order])
    arrived, _, way = dispatch(rows, chosen.flatten(), world_size)
    here = arrived.tolist()
    came = {  # the arrows follow three tokens only: more could not be told apart
        f"here {i}": (0, str(row[2])) if row[0] < 3 else None for i, row in enumerate(here)
    }
    says = "Each token goes to the rank of its expert. Arrows: those of rank 0."
    say(says, rows[order], here, came)
    arrived[:, 2] = torch.arange(len(arrived))
    back = combine(arrived, way, torch.ones_like(chosen))
    came = {
        str(i): (row[1], f"here {row[2]}") if row[0] < 3 else None
        for i, row in enumerate(back.int().tolist())
    }
    says = "The answers come home, to the places before the sort."
    say(says, back.int(), here, came)
