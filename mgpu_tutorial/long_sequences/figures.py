"""Apparatus, not the lesson: pictures of blocks and of shares, and tables of what is sent."""

from collections.abc import Callable, Mapping
from itertools import product
from unittest.mock import patch

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from mgpu_tutorial.lab import Ledger, Table, frame, launch, span
from mgpu_tutorial.lab.colours import COLOURS, tone
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.long_sequences import block, others, ring
from mgpu_tutorial.long_sequences.ring import contiguous


def two_blocks() -> Plot:
    """The weights that one query gives six keys: in each half alone, and in all six."""
    from matplotlib.figure import Figure

    scores = torch.tensor([[2.0, 1.0, 0.5], [3.0, 1.5, 0.0]], dtype=torch.float64)
    sums = scores.exp().sum(1)
    says = [f"sum {part:.1f}, so times {part / sums.sum():.2f}" for part in sums.tolist()]
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    rows = {"each half alone": scores.softmax(1), "all six": scores.flatten().softmax(0)}
    lines = [f"scores: {', '.join(f'{s:g}' for s in scores.flatten().tolist())}", *says]
    for axes, (name, weights) in zip(panels, rows.items(), strict=True):
        colours = [COLOURS[key // 3] for key in range(6)]
        axes.bar_label(axes.bar(range(6), weights.flatten(), color=colours), fmt="%.2f")
        axes.set(title=name, xticks=[])
        axes.margins(y=0.15)
        axes.tick_params(left=False, labelleft=False)
        axes.spines[["top", "left", "right"]].set_visible(False)
        lines.append(f"{name}: {', '.join(f'{w:.2f}' for w in weights.flatten().tolist())}")
    panels[0].set_xticks([1, 4], says, fontsize=11)
    return Plot(figure, "\n".join(lines))


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
        says = f"Hop {step + 1}: a block arrives from the left and is merged."


def kept(loop: Callable = ring.ring_attention) -> Table:
    """The bytes that autograd keeps of one attention until backward, on each of the ranks."""
    ways = {
        "ring_attention": lambda *given: loop(*given)[0],
        "RingAttention": ring.RingAttention.apply,
    }
    rows = []
    for n, (name, attention) in product((1, 4), ways.items()):
        saved = launch(_saved, n, attention).results[0]
        rows.append([name, n, 512 // n, bytes_text(saved)])
    return Table(["", "ranks", "tokens on a rank", "kept for backward"], rows)


def _saved(rank: int, world_size: int, attention: Callable) -> int:
    qkv = [x.requires_grad_() for x in torch.randn(3, 1, 4, 512 // world_size, 16)]
    ledger = Ledger()
    with ledger.saved_for_backward():
        out = attention(*qkv, contiguous)
    return ledger.saved_now(out.device)


def triangles(*deals: Callable) -> Plot:
    """For each way to deal 16 tokens to 4 ranks: who computes which pair of query and key."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    lines = ["16 tokens on 4 ranks; pairs of a query and a key up to it"]
    panels = figure.subplots(1, len(deals), squeeze=False)[0]
    for axes, deal in zip(panels, deals, strict=True):
        for rank in range(4):
            places, own = deal(16, rank, 4), tone(rank)
            label = f"rank {rank}: {(places + 1).sum()} pairs"
            look = {"color": own.fill, "edgecolor": INK, "lw": 0.5, "label": label}
            axes.barh(places, places + 1, 1, **look)
            for place in places.tolist():
                axes.text(0.5, place, rank, color=own.on, ha="center", va="center")
            lines.append(f"{deal.__name__}, {label}, queries {places.tolist()}")
        axes.set(title=deal.__name__, xlabel="keys", ylabel="queries", xticks=[], yticks=[])
        axes.margins(0)
        axes.invert_yaxis()
        axes.legend(frameon=False)
    return Plot(figure, "\n".join(lines))


def sent_by_formula(method: str, ranks: int, d: int, group: int, tokens: int) -> float:
    """Numbers that a rank sends in forward for tokens of width `d`, by attention's method."""
    unit = tokens * d / ranks
    if method == "ulysses":
        return (ranks - 1) / ranks * unit * (2 + 2 / group)
    return 2 * (ranks - 1) * unit / group


METHODS: Mapping[str, Callable] = {
    "ring": ring.RingAttention.apply,
    "all-gather": others.gathered_attention,
    "ulysses": lambda q, k, v, deal: others.ulysses(q, k, v, deal=deal),
}


def sent() -> Table:
    """Numbers sent by a rank in forward and backward, counted, beside the formula."""
    rows = []
    for ranks, kv_heads in (4, 8), (4, 4), (2, 2):
        report = launch(_there_and_back, ranks, kv_heads, trace=True)
        # how much of what the call names leaves this rank
        parts = {"isend": 1, "reduce_scatter_single": ranks - 1}
        parts |= dict.fromkeys(["all_gather_single", "all_to_all_single"], 1 - 1 / ranks)
        for name in METHODS:
            row = [sent_by_formula(name, ranks, 8 * 4, 8 // kv_heads, 64)]
            for way in ("forward", "backward"):
                calls = [e for e in events_of(report, f"{name} {way}") if e.rank == 0]
                row.append(sum(parts.get(e.op, 0) * e.nbytes for e in calls) / 8)
            rows.append([name, ranks, kv_heads, *map(int, row)])
    header = ["", "ranks", "KV heads of 8", "formula", "forward", "backward"]
    return Table(header, rows)


def _there_and_back(rank: int, world_size: int, kv_heads: int) -> None:
    for name, attention in METHODS.items():
        q = torch.randn(1, 8, 64 // world_size, 4, dtype=torch.float64).requires_grad_()
        kv = torch.randn(2, 1, kv_heads, *q.shape[2:], dtype=torch.float64).requires_grad_()
        with span(f"{name} forward"):
            out = attention(q, *kv, contiguous)
        with span(f"{name} backward"):
            out.sum().backward()


def beside_one(ways: Mapping[str, Mapping], *ranks: int) -> Table:
    """The loss of a block, and how far its gradients are from one process's.

    Each way says by name what is other than in `loss_and_gradients`.
    """
    one = {"attention": lambda q, k, v, deal: sdpa(q, k, v, is_causal=True)}
    loss, right = launch(_tried, 1, one).results[0]
    rows = [["one process", 1, f"{loss:.2f}", ""]]
    for n, (name, way) in product(ranks, ways.items()):
        found, gradient = launch(_tried, n, way).results[0]
        far = ((gradient - right).norm() / right.norm()).item()
        is_near = max(far, abs(found - loss)) < 1e-13
        rows.append([name, n, f"{found:.2f}", "below 1e-13" if is_near else f"{far:.0%}"])
    return Table(["", "ranks", "loss", "gradients off by"], rows)


def _tried(rank: int, world_size: int, way: Mapping) -> tuple[float, torch.Tensor]:
    given = dict(way)
    with patch.object(ring, "go_home", given.pop("go_home", ring.go_home)):
        return block.loss_and_gradients(rank, world_size, **given)
