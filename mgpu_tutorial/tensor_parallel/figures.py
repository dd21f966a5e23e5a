"""Apparatus, not the lesson: matrices drawn, and how far a step is from one process."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from mgpu_tutorial.lab import Table, frame, launch
from mgpu_tutorial.lab.colours import colour, tone
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.tensor_parallel.block import (
    Block,
    copies_that_differ,
    gradients_of,
    new_block,
    whole_of,
)
from mgpu_tutorial.tensor_parallel.layers import sum_of

Step = tuple[torch.Tensor, torch.Tensor, list[str]]  # loss, gradients, copies that differ

# Matrices: what each rank holds of them

SIDE, WIDE, TALL, TOP, LEFT = 34, 118, 94, 46, 74  # pixels
COPY, PIECE, PART = "copy", "piece", "part of a sum"
KINDS = {"X": COPY, "columns of A": PIECE, "X A": PIECE, "rows of B": PIECE}
KINDS |= {"part of X A B": PART, "all-reduce: X A B": COPY}


def product_picture(products: Sequence[Sequence[torch.Tensor]]) -> Drawing:
    """Draw two products in a row: of each rank X, columns, hidden, rows, part and result."""
    lines = []
    for rank, row in enumerate(products):
        parts = [f"{t} {m.tolist()}" for t, m in zip(KINDS, row, strict=True)]
        lines.append(f"rank {rank}: {'; '.join(parts)}")
    bottom, name = TOP + TALL * len(products), "What each rank holds: " + ", ".join(KINDS)
    drawing = Drawing(LEFT + WIDE * len(KINDS), bottom + 24, "\n".join(lines), name)
    for i, (title, kind) in enumerate(KINDS.items()):
        x = LEFT + WIDE * (i + 0.5)
        for line, words in enumerate(title.split(": ")):
            drawing.label(x, 20 + 18 * line, words, 13, weight="bold")
        for rank, row in enumerate(products):
            y = TOP + TALL * (rank + 0.5)
            _matrix(drawing, x, y, row[i], rank, kind)
            drawing.label(x + WIDE / 2, y + 6, "×=×=→ "[i], 18, weight="bold")
            if kind == PART and rank:
                drawing.label(x, y - TALL / 2 + 6, "+", 18, weight="bold")
    for rank in range(len(products)):
        y = TOP + TALL * (rank + 0.5) + 5
        drawing.label(10, y, f"rank {rank}", 14, tone(rank).text, "start", "bold")
    legend = "grey: the same on every rank · filled: only here · dashed: a part of a sum"
    drawing.label(LEFT, bottom + 14, legend, 14, anchor="start")
    return drawing


def _matrix(
    drawing: Drawing, x: float, y: float, matrix: torch.Tensor, rank: int, kind: str
) -> None:
    """The numbers of a matrix in boxes around (x, y)."""
    fill, edge, ink, dash = {
        COPY: ("#e4e4e4", FAINT, INK, ""),
        PIECE: (colour(rank), INK, tone(rank).on, ""),
        PART: ("#ffffff", colour(rank), INK, "4 3"),
    }[kind]
    high, wide = matrix.shape
    for i, line in enumerate(matrix.tolist()):
        for j, number in enumerate(line):
            left, top = x + SIDE * (j - wide / 2), y + SIDE * (i - high / 2)
            drawing.box(left + 1, top + 1, SIDE - 2, SIDE - 2, edge, fill, 1.5, dash, 3)
            middle = left + SIDE / 2, top + SIDE / 2 + 5
            drawing.label(*middle, number, 13, ink, weight="bold")


# Forward and back


def travel(
    rank: int, world_size: int, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> None:
    """Two products of the first token x, and their gradients; a film of what a rank holds.

    The loss is the sum of the result. What all ranks have alike is grey.
    """
    held, same = {}, 7  # grey: no rank's colour here

    def hold(slot: str, value: torch.Tensor, owner: int = rank) -> None:
        held[slot] = " ".join(map(str, value.flatten().tolist())), owner

    x, columns, rows = x[:1], a.chunk(world_size, 1)[rank], b.chunk(world_size, 0)[rank]
    hidden = x @ columns
    hold("x", x, same)
    hold("x A", hidden)
    says = "All ranks have the input x, one token. Each multiplies it by its columns of A."
    frame(says, held)
    part = hidden @ rows
    hold("x A B", part)
    frame("Then by its rows of B. Each rank has its part of both sums.", held)
    hold("x A B", sum_of(part), same)
    frame("g adds up the parts. From here on all ranks have the same.", held)
    ones = torch.ones_like(part)
    hold("∇ x A B", ones, same)
    says = "Back. All ranks have the gradient (∇) of the result. g passes it on: no sum."
    frame(says, held)
    back = ones @ rows.T
    mine = back @ columns.T
    hold("∇ x A", back)
    hold("∇ x", mine)
    says = "Back through its rows of B and its columns of A: a part of the gradient of x."
    frame(says, held)
    hold("∇ x", sum_of(mine), same)
    frame("f adds up these parts. Without f they stay as they were a step ago.", held)


# How wrong


def whole(model: nn.Module) -> nn.Module:
    """One process has everything: the reference."""
    return model


def step_once(rank: int, world_size: int, prepare: Callable[[Block], Block]) -> Step:
    """A step of SGD: its loss, all gradients, and which copies then differ between ranks."""
    block = prepare(new_block())
    loss = gradients_of(block)
    gradients = [whole_of(p.grad, p).flatten() for p in block.parameters()]
    torch.optim.SGD(block.parameters(), lr=0.1).step()
    return loss, torch.cat(gradients), copies_that_differ(block)


def step_table(*prepares: Callable[[Block], Block]) -> Table:
    """Launch a step of each on two ranks; how far from one process, and what differs."""
    return distances(step_once, prepares, ranks=2)


def each(rank: int, world_size: int, step: Callable, prepares: Sequence) -> list[Step]:
    """A step with each way to prepare the model, one after the other."""
    return [step(rank, world_size, prepare) for prepare in prepares]


def distances(step: Callable, prepares: Sequence[Callable], ranks: int) -> Table:
    """Launch `step` with each of `prepares`; how far rank 0 is from one process."""
    loss, gradients, _ = launch(step, 1, whole).results[0]
    rows, steps = [], launch(each, ranks, step, prepares).results[0]
    for prepare, found in zip(prepares, steps, strict=True):
        far = abs(found[0] / loss - 1), (found[1] - gradients).norm() / gradients.norm()
        rows.append([prepare.__name__, *(f"{off:.1%}" for off in far), len(found[2])])
    return Table(["", "loss off", "gradients off", "copies that differ"], rows)
