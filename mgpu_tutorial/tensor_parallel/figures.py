"""Apparatus, not the lesson: matrices drawn, and how far a step is from one process."""

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import nn

from mgpu_tutorial.lab import Table, frame, launch
from mgpu_tutorial.lab.colours import tone
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.tensor_parallel import block
from mgpu_tutorial.tensor_parallel.layers import sum_of

TITLES = "X", "columns of A", "X A", "rows of B", "part of X A B", "all-reduce: X A B"
SIDE, WIDE, TALL, TOP, LEFT = 34, 130, 94, 34, 74  # pixels


def product_picture(products: Sequence[Sequence[torch.Tensor]]) -> Drawing:
    """Draw two products in a row: each rank's X, columns, X A, rows, part and result."""
    lines = []
    for rank, row in enumerate(products):
        parts = [f"{t} {m.tolist()}" for t, m in zip(TITLES, row, strict=True)]
        lines.append(f"rank {rank}: {'; '.join(parts)}")
    bottom, name = TOP + TALL * len(products), "What each rank holds: " + ", ".join(TITLES)
    drawing = Drawing(LEFT + WIDE * len(TITLES), bottom + 24, "\n".join(lines), name)
    for rank, row in enumerate(products):
        own, y = tone(rank), TOP + TALL * rank
        drawing.label(10, y + TALL / 2, f"rank {rank}", 14, own.text, "start", "bold")
        same, here = ("#e4e4e4", FAINT, INK, ""), (own.fill, INK, own.on, "")
        looks = same, here, here, here, ("#ffffff", own.fill, INK, "4 3"), same
        for i, (matrix, (fill, edge, ink, dash)) in enumerate(zip(row, looks, strict=True)):
            x = LEFT + WIDE * i
            drawing.label(x + SIDE, 20, TITLES[i], 13, weight="bold")
            drawing.label(x + WIDE - SIDE, y + TALL / 2, "×=×=→ "[i], 18, weight="bold")
            for r, c in product(range(2), range(2)):
                left, top = x + SIDE * c, y + 6 + SIDE * r
                drawing.box(left, top, SIDE - 2, SIDE - 2, edge, fill, 1.5, dash, 3)
                drawing.label(
                    left + 16, top + 21, matrix[r, c].item(), 13, ink, weight="bold"
                )
    drawing.label(LEFT + WIDE * 4 + SIDE, TOP + TALL, "+", 18, weight="bold")
    legend = "grey: the same on every rank · filled: only here · dashed: a part of a sum"
    drawing.label(LEFT, bottom + 14, legend, 14, anchor="start")
    return drawing


def travel(
    rank: int, world_size: int, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> None:
    """Two products of the first token x, and their gradients; a film of what a rank holds.

    The loss is the sum of the result. What all ranks have alike is grey.
    """

    def text(value: torch.Tensor) -> str:
        return " ".join(map(str, value.flatten().tolist()))

    same = 7  # grey: no rank's colour here
    x, columns, rows = x[:1], a.chunk(world_size, 1)[rank], b.chunk(world_size, 0)[rank]
    hidden = x @ columns
    held = {"x": (text(x), same), "x A": text(hidden)}
    says = "All ranks have the input x, one token. Each multiplies it by its columns of A."
    frame(says, held)
    part = hidden @ rows
    held["x A B"] = text(part)
    frame("Then by its rows of B. Each rank has its part of both sums.", held)
    held["x A B"] = text(sum_of(part)), same
    frame("g adds up the parts. From here on all ranks have the same.", held)
    ones = torch.ones_like(part)
    held["∇ x A B"] = text(ones), same
    says = "Back. All ranks have the gradient (∇) of the result. g passes it on: no sum."
    frame(says, held)
    back = ones @ rows.T
    mine = back @ columns.T
    held |= {"∇ x A": text(back), "∇ x": text(mine)}
    says = "Back through its rows of B and its columns of A: a part of the gradient of x."
    frame(says, held)
    held["∇ x"] = text(sum_of(mine)), same
    frame("f adds up these parts. Without f they stay as they were a step ago.", held)


def step(
    rank: int, world_size: int, prepare: Callable, new: Callable, backward: Callable
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """A step of SGD of the model that `new` makes and `prepare` shares.

    Its loss, all gradients without padding, and the copies that then differ.
    """
    model, whole = prepare(new()), new()
    loss = backward(model)
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    gradients = [block.whole_of(p.grad, p)[: len(q)].flatten() for p, q in pairs]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss, torch.cat(gradients), block.copies_that_differ(model)


def step_table(
    *prepares: Callable[[nn.Module], nn.Module],
    ranks: int = 2,
    new: Callable = block.new_block,
    backward: Callable = block.gradients_of,
) -> Table:
    """Launch a step of each; how far rank 0 is from one process, and which copies differ."""
    loss, gradients, _ = launch(step, 1, lambda whole: whole, new, backward).results[0]
    rows = []
    for prepare in prepares:
        found = launch(step, ranks, prepare, new, backward).results[0]
        off = abs(found[0] / loss - 1), (found[1] - gradients).norm() / gradients.norm()
        texts = ("below 1e-14" if far < 1e-14 else f"{far:.1%}" for far in off)
        rows.append([prepare.__name__, *texts, len(found[2])])
    return Table(["", "loss off", "gradients off", "copies that differ"], rows)
