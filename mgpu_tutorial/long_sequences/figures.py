"""Apparatus, not the lesson: pictures of blocks and of shares, and tables of what is sent."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import functional

from mgpu_tutorial.lab import Ledger, Table, frame, launch, note
from mgpu_tutorial.lab.colours import tone
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.long_sequences import block, others, ring, theirs
from mgpu_tutorial.long_sequences.dealing import contiguous
from mgpu_tutorial.long_sequences.ring import Deal

CELL, TOP, BAR = 15, 44, 46  # pixels


def two_blocks(scores: tuple[float, ...] = (2.0, 1.0, 0.5, 3.0, 1.5, 0.0)) -> Drawing:
    """The weights that one query gives six keys: in each half alone, and in all six."""
    values = torch.tensor(scores, dtype=torch.float64)
    halves = values.chunk(2)
    sums = [half.exp().sum() for half in halves]
    rows = {
        "each half alone": torch.cat([half.softmax(0) for half in halves]),
        "all six": values.softmax(0),
    }
    lines = [f"scores: {', '.join(f'{s:g}' for s in scores)}"]
    drawing = Drawing(560, 190, "", "Weights of six keys, in two halves and all together")
    for i, (name, weights) in enumerate(rows.items()):
        bottom = 78 + 84 * i
        drawing.label(8, bottom - 16, name, 14, anchor="start", weight="bold")
        for j, weight in enumerate(weights.tolist()):
            own, x = tone(j // 3), 150 + 62 * j + 20 * (j // 3)
            drawing.box(
                x, bottom - BAR * weight, 44, BAR * weight, INK, own.fill, 1, radius=0
            )
            drawing.label(x + 22, bottom - BAR * weight - 6, f"{weight:.2f}", 14)
        drawing.line(150, bottom, 545, bottom, FAINT, 1)
        lines.append(f"{name}: {', '.join(f'{w:.2f}' for w in weights.tolist())}")
    for j, part in enumerate(sums):
        share = part / sum(sums)
        text = f"sum {part:.1f}, so times {share:.2f}"
        drawing.label(237 + 206 * j, 98, text, 14, tone(j).text, weight="bold")
        lines.append(f"half {j + 1}: sum of exponentials {part:.1f}, its share {share:.2f}")
    drawing.text = "\n".join(lines)
    return drawing


def travel(rank: int, world_size: int) -> None:
    """Keys and values go around; a film of who holds whose, and what each has merged."""
    owner, seen = torch.tensor(rank), [rank]
    says = "Each rank has attended with its queries to its own keys and values."
    for step in range(world_size):
        held = f"KV{owner}", int(owner)
        bricks = {"queries": f"Q{rank}", "merged": sorted(seen), "keys, values": held}
        frame(says, bricks, {"merged": (rank, "keys, values")} if step else {})
        if step < world_size - 1:
            owner = ring.pass_on(owner)
            seen.append(int(owner))
        says = f"Hop {step + 1}: a block arrives from the left and is merged."


def kept(length: int = 512) -> Table:
    """The bytes that autograd keeps of one attention until backward, on each of the ranks."""
    rows = []
    for n in (1, 4):
        for name, attention in (
            ("ring_attention", lambda *given: ring.ring_attention(*given)[0]),
            ("RingAttention", ring.RingAttention.apply),
        ):
            nbytes = launch(_saved, n, attention, length).results[0]
            rows.append([name, n, length // n, bytes_text(nbytes)])
    return Table(["", "ranks", "tokens on a rank", "kept for backward"], rows)


def _saved(rank: int, world_size: int, attention: block.Attention, length: int) -> int:
    q, k, v = torch.randn(3, 1, 4, length // world_size, 16).unbind()
    ledger = Ledger()
    with ledger.saved_for_backward():
        out = attention(*(x.requires_grad_() for x in (q, k, v)), contiguous)
    saved = ledger.saved_now(q.device)
    out.sum().backward()  # the same graph is alive until here
    return saved


def triangles(*deals: Deal, length: int = 16, ranks: int = 4) -> Drawing:
    """For each way to deal: which rank computes which pair of a query and a key."""
    width = CELL * length + 34
    lines = [f"{length} tokens on {ranks} ranks; pairs of a query and a key up to it"]
    height = TOP + CELL * length + 30
    names = ", ".join(deal.__name__ for deal in deals)
    alt = f"Who computes which part of the causal triangle: {names}"
    drawing = Drawing(width * len(deals), height, "", alt)
    for i, deal in enumerate(deals):
        left = 20 + width * i
        drawing.label(left, 16, deal.__name__, 15, anchor="start", weight="bold")
        drawing.label(left, 36, "keys →", 13, anchor="start")
        for rank in range(ranks):
            places = deal(length, rank, ranks).tolist()
            own = tone(rank)
            for query in places:
                y = TOP + CELL * query
                drawing.box(
                    left, y, CELL * (query + 1), CELL, own.fill, own.fill, 1, radius=0
                )
                drawing.label(left + 7, y + 12, rank, 12, own.on, weight="bold")
            total = sum(query + 1 for query in places)
            x = left + width / ranks * rank * 0.9
            drawing.label(x, height - 8, total, 14, own.text, "start", "bold")
            lines.append(f"{deal.__name__}, rank {rank}: queries {places}, {total} pairs")
    drawing.text = "\n".join(lines)
    return drawing


def balance(*deals: Deal, length: int = 64, ranks: int = 4) -> Table:
    """Pairs by rank, and their mean over what the slowest rank of each step adds up to."""
    rows = []
    for deal in deals:
        places = [deal(length, rank, ranks) for rank in range(ranks)]
        pairs = [
            [int((places[r - step] <= places[r][:, None]).sum()) for r in range(ranks)]
            for step in range(ranks)
        ]
        slowest = sum(map(max, pairs))
        mine = ", ".join(str(sum(own)) for own in zip(*pairs, strict=True))
        busy = f"{sum(map(sum, pairs)) / ranks / slowest:.1%}"
        rows.append([deal.__name__, mine, busy])
    return Table(["", "pairs by rank", "busy"], rows)


def sent_by_formula(method: str, ranks: int, d: int, group: int, tokens: int) -> float:
    """Numbers that a rank sends in forward for tokens of width `d`, by attention's method."""
    unit = tokens * d / ranks
    if method == "ulysses":
        return (ranks - 1) / ranks * unit * (2 + 2 / group)
    return 2 * (ranks - 1) * unit / group


METHODS: Mapping[str, Callable] = {
    "ring": ring.RingAttention.apply,
    "all-gather": others.gathered_attention,
    "ulysses": lambda q, k, v, deal: others.ulysses(q, k, v),
}


def sent() -> Table:
    """Numbers sent by a rank in forward and backward, counted, beside the formula."""
    rows = []
    for ranks, kv_heads in (4, 8), (4, 4), (2, 2):
        for name in METHODS:
            report = launch(_there_and_back, ranks, name, kv_heads, trace=True)
            events = [e for e in report.events if e.rank == 0]
            middle = next(i for i, e in enumerate(events) if e.note == "backward")
            counted = [_numbers(half, ranks) for half in (events[:middle], events[middle:])]
            formula = sent_by_formula(name, ranks, 8 * 4, 8 // kv_heads, 64)
            rows.append([name, ranks, kv_heads, int(formula), *counted])
    header = ["", "ranks", "KV heads of 8", "formula", "forward", "backward"]
    return Table(header, rows)


def _there_and_back(
    rank: int, world_size: int, method: str, kv_heads: int, tokens: int = 64
) -> None:
    q = torch.randn(1, 8, tokens // world_size, 4, dtype=torch.float64).requires_grad_()
    kv = torch.randn(2, 1, kv_heads, *q.shape[2:], dtype=torch.float64).requires_grad_()
    out = METHODS[method](q, *kv, contiguous)
    note("backward")
    out.sum().backward()


def _numbers(events: Sequence[Event], ranks: int) -> int:
    """How many float64 these calls make a rank send; of a collective, what its ranks must."""
    parts = {"isend": 1, "reduce_scatter_single": ranks - 1}
    parts |= dict.fromkeys(("all_gather_single", "all_to_all_single"), (ranks - 1) / ranks)
    return int(sum(parts.get(e.op, 0) * e.nbytes for e in events) / 8)


def free_blocks() -> Table:
    """Tokens of the shortest block that hides its transfer, for the devices of the paper."""
    printed = {  # TFLOP/s, GB/s, thousands of tokens
        "A100, NVLink": (312, 300, 1.0),
        "A100, InfiniBand": (312, 12.5, 24.5),
        "TPU v3": (123, 112, 1.1),
        "TPU v4": (275, 268, 1.0),
        "TPU v5e": (196, 186, 1.1),
    }
    rows = [[name, f, b, f"{f / b:.1f}", c] for name, (f, b, c) in printed.items()]
    return Table(["", "TFLOP/s", "GB/s", "F/B", "printed"], rows)


def rotations(world_size: int = 4) -> Table:
    """PyTorch's context_parallel: is it near one process, and which calls does it make?"""
    rows = []
    for rotate in ("allgather", "alltoall"):
        run = {"rotate": rotate, "device": "cpu", "trace": True}
        report = launch(theirs.by_context_parallel, world_size, **run)
        calls = Counter(event.op for event in report.events if event.rank == 0)
        far = max(report.results)
        near = "below 1e-13" if far < 1e-13 else f"{far:.0e}"
        named = ("all_gather_single", "all_to_all_single")
        rows.append([rotate, near, *(calls[name] for name in named)])
    return Table(["", "from one process", *named], rows)


def equality() -> Table:
    """How far loss and gradients are from one process with PyTorch's own attention."""
    one = launch(block.loss_and_gradients, 1, _by_pytorch).results[0]
    rows = []
    for name, attention in METHODS.items():
        deals = {} if name != "ulysses" else dict.fromkeys(DEALT, contiguous)
        for n in (1, 2, 4):
            found = launch(block.loss_and_gradients, n, attention, **deals).results
            far = [largest_difference(result, one) for result in map(list, found)]
            rows.append([name, n, "below 1e-13" if max(far) < 1e-13 else f"{max(far):.0e}"])
    return Table(["", "ranks", "loss and 15 gradients from one process"], rows)


def _by_pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, deal: Deal):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


DEALT = ("deal", "deal_places", "deal_following")


def _mistaken(
    rank: int,
    world_size: int,
    go_home: Callable = ring.go_home,
    count_all: Callable = block.count_all,
    **deals: Deal,
) -> tuple[float, dict[str, torch.Tensor]]:
    ring.go_home, block.count_all = go_home, count_all  # in this rank alone
    return block.loss_and_gradients(rank, world_size, **deals)


def mistakes(**changes: dict[str, Callable]) -> Table:
    """The loss on four ranks with each change, and how far its gradients are from one's."""
    (loss, right), *_ = launch(block.loss_and_gradients, 1).results
    length = torch.cat([g.flatten() for g in right.values()]).norm()
    rows = [["one process", f"{loss:.2f}", "0", ""]]
    for name, change in {"no mistake": {}, **changes}.items():
        loss, found = launch(_mistaken, 4, **change).results[0]
        wrong = {n: (found[n] - right[n]).norm() / length for n in right}
        off = torch.stack(list(wrong.values())).norm().item()
        is_off = off > 1e-9
        worst = max(wrong, key=wrong.get) if is_off else ""
        far = f"{off:.0%}" if is_off else "0"
        rows.append([name.replace("_", " "), f"{loss:.2f}", far, worst])
    return Table(["", "loss", "gradients off by", "most in"], rows)
