"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.experts.builds import build
from tests.builds import right_and_wrong

IMPORTS = """\
import torch
import torch.distributed as dist
from mgpu_tutorial.experts.exchange import Exchange
"""
HEAD = f"{IMPORTS}\ndef dispatch(rows, which, experts):\n    ranks = dist.get_world_size()\n"
COUNTS = """\
    order = which.argsort(stable=True)
    counts = which.bincount(minlength=experts)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
"""
SPLITS = """\
    sent = counts.view(ranks, -1).sum(dim=1).tolist()
    received = theirs.view(ranks, -1).sum(dim=1).tolist()
"""
SENDING = "    arrived = Exchange.apply(rows[order], sent, received)\n"
MINE = """\
    mine = torch.arange(experts // ranks).repeat(ranks).repeat_interleave(theirs)
    return arrived, mine, (order, sent, received)
"""
WITH_NUMBERS = f"""{HEAD}
    own = experts // ranks
    order = (which // own).argsort(stable=True)
    sent = [int(((which // own) == r).sum()) for r in range(ranks)]
    received = torch.empty(ranks, dtype=torch.int64)
    dist.all_to_all_single(received, torch.tensor(sent))
    received = received.tolist()
    marked = torch.cat([rows, (which % own)[:, None].to(rows.dtype)], dim=1)
    arrived = Exchange.apply(marked[order], sent, received)
    return arrived[:, :-1], arrived[:, -1].detach().long(), (order, sent, received)
"""
BY_LOOP = f"""{HEAD}{COUNTS}
    own = experts // ranks
    sent = [int(counts[r * own : (r + 1) * own].sum()) for r in range(ranks)]
    received = [int(theirs[r * own : (r + 1) * own].sum()) for r in range(ranks)]
    mine = [e for r in range(ranks) for e in range(own) for _ in range(theirs[r * own + e])]
    arrived = Exchange.apply(rows.index_select(0, order), sent, received)
    return arrived, torch.tensor(mine, dtype=torch.int64), (order, sent, received)
"""


def combined(*lines):
    body = "\n    ".join(lines)
    return (
        f"{IMPORTS}\ndef combine(results, way, weights):\n"
        f"    order, sent, received = way\n    {body}\n"
    )


BACK = "back = Exchange.apply(results, received, sent)"
PLACED = "rows = back[order.argsort()]"
SUM = "return (weights[..., None] * rows.unflatten(0, weights.shape)).sum(dim=1)"
RIGHT = [
    WITH_NUMBERS,
    BY_LOOP,
    HEAD + COUNTS + SPLITS + SENDING + MINE,
    combined(BACK, PLACED, SUM),
    combined(
        BACK,
        "rows = torch.zeros_like(back).index_copy(0, order, back)",
        "weighed = rows * weights.flatten()[:, None]",
        "output = rows.new_zeros(len(weights), rows.shape[1])",
        "places = torch.arange(len(weights)).repeat_interleave(weights.shape[1])",
        "return output.index_add(0, places, weighed)",
    ),
    combined(
        BACK,
        PLACED,
        "k = weights.shape[1]",
        "return sum(rows[i::k] * weights[:, i : i + 1] for i in range(k))",
    ),
]
WRONG = [
    (
        HEAD + COUNTS + SPLITS + SENDING.replace("rows[order]", "rows") + MINE,
        "are rows and numbers in the same order?",
    ),
    (HEAD + COUNTS + SPLITS.replace("theirs", "counts", 1) + SENDING + MINE, "rank"),
    (
        HEAD
        + COUNTS
        + SPLITS
        + SENDING
        + MINE.replace(".repeat(ranks)", "").replace(
            "repeat_interleave(theirs)",
            "repeat_interleave(theirs.view(ranks, -1).sum(dim=0))",
        ),
        "are rows and numbers in the same order?",
    ),
    (
        HEAD + COUNTS + SPLITS + SENDING.replace("rows[", "rows.detach()[") + MINE,
        "no gradient reaches the tokens",
    ),
    (HEAD + COUNTS.replace("(minlength=experts)", "()") + SPLITS + SENDING + MINE, "rank"),
    (HEAD + COUNTS + COUNTS + SPLITS + SENDING + MINE, "the calls of rank 0"),
    (HEAD + COUNTS + SPLITS + SENDING, "nothing was returned"),
    (HEAD + "    ...\n", "a `...` is left to fill in"),
    (combined(BACK, "rows = back", SUM), "the output"),
    (combined(BACK, "rows = back[order]", SUM), "the output"),
    (combined("back = Exchange.apply(results, sent, received)", PLACED, SUM), "rank"),
    (
        combined(BACK, PLACED, "return rows.unflatten(0, weights.shape).sum(dim=1)"),
        "the output",
    ),
    (
        combined(
            BACK, PLACED, SUM.replace("weights[..., None]", "weights.detach()[..., None]")
        ),
        "no gradient reaches the weights",
    ),
    (
        combined(
            BACK,
            PLACED,
            SUM.replace("unflatten(0, weights.shape)", "view(*weights.shape, -1)"),
        ),
        "unspecified dimension",
    ),
    (combined(BACK, PLACED, SUM.removeprefix("return ")), "nothing was returned"),
]

test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG)
