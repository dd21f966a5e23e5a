"""Apparatus, not the lesson: films of ring and exchange, and who has which squares."""

from collections.abc import Sequence

import torch

from mgpu_tutorial.lab import frame
from mgpu_tutorial.lab.colours import tone
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.long_sequences import ring
from mgpu_tutorial.long_sequences.others import Exchange


def travel(rank: int, world_size: int) -> None:
    """Keys and values go around; a film of who holds whose, and what each has merged."""
    owner, seen = torch.tensor(rank), [rank]
    says = "Each rank has attended with its queries to its own keys and values."
    for step in range(world_size):
        held = f"KV{owner}", int(owner)
        bricks = {"queries": f"Q{rank}", "merged": sorted(seen), "keys, values": held}
        frame(says, bricks, {"merged": (rank, "keys, values")} if step else {})
        if step < world_size - 1:
            owner = ring.Shift.apply(owner)
            seen.append(int(owner))
        hop = f"Hop {step + 1}: a block arrives from the left and is merged, "
        says = f"{hop}with weight 0 where its keys are later than the queries."


def trade(rank: int, world_size: int) -> None:
    """Tokens for heads and back; a film of whose tokens this rank has, of each head."""
    heads = [f"head {head}" for head in range(world_size)]
    mine = torch.full((1, world_size, 1, 1), rank)  # of each head one token, with its rank
    frame("Each rank has its own tokens, of all heads.", {head: [rank] for head in heads})
    whole = Exchange.apply(mine, 1, 2)
    says = "all_to_all of queries, keys and values: each rank has all tokens of one head."
    frame(says, {heads[rank]: whole.flatten().tolist()})
    back = Exchange.apply(whole, 2, 1)
    held = {head: [owner] for head, owner in zip(heads, back.flatten().tolist(), strict=True)}
    frame(
        "all_to_all of the outputs: each rank has its own tokens again, of all heads.", held
    )


def squares(*pictures: Sequence[int]) -> Plot:
    """Causal attention, drawn once for each way to deal the tokens: a square for each pair.

    A way is the rank of each token. Query i has i + 1 squares, in the colour of its rank.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, len(pictures), squeeze=False)[0]
    for axes, owners in zip(panels, pictures, strict=True):
        for query, rank in enumerate(owners):
            own = tone(rank)
            look = {"color": own.fill, "edgecolor": INK, "lw": 1}
            axes.barh([query] * (query + 1), 1, 1, range(query + 1), **look)
            axes.text(-0.3, query, f"rank {rank}", ha="right", va="center", fontsize=11)
        axes.set(xlim=(-2, len(owners) + 0.1), xticks=[], yticks=[], aspect="equal")
        axes.set(xlabel="keys", ylabel="queries")
        axes.spines[:].set_visible(False)
        axes.invert_yaxis()
    lines = [f"the ranks of its queries, from the top: {[*owners]}" for owners in pictures]
    return Plot(figure, "\n".join(["a square for each query and key up to it", *lines]))
