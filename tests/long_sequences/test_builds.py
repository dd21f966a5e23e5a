"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.long_sequences.builds import build
from tests.builds import Right, Wrong, edited

BY_LARGEST = """largest = torch.maximum(lse, block_lse)
    a, b = (lse - largest).exp(), (block_lse - largest).exp()
    return (a * out + b * block_out) / (a + b), largest + (a + b).log()"""
BY_LSE = "return (lse * out + block_lse * block_out) / (lse + block_lse), both"
MERGE = [
    Right("merge", replace={"both =…": BY_LARGEST}),
    Wrong(
        "merge",
        replace={"merged, both": "merged, lse"},
        says="the exp of the log-sum-exp: 1, expected 4",
    ),
    Wrong("merge", replace={"merged, both": "merged"}, says="type of what is returned"),
    Wrong(
        "merge",
        replace={"torch.logaddexp(lse, block_lse)": "(lse.exp() + block_lse.exp()).log()"},
        says="blocks of 4 and 4 keys: the log-sum-exp",
    ),
    Wrong(
        "merge",
        replace={"return…": BY_LSE},
        says="three that answer 4, all with the score 0: the output",
    ),
]
KEYS_AND_VALUES = """for step in range(1, world_size):
        k, v = Shift.apply(torch.stack([k, v]), 1, group)
        owner = rank - step if rank >= step else rank - step + world_size
        hidden = hides(places[rank], places[owner])
        out, lse = merge(out, lse, *attend(q, k, v, hidden))
    return out.to(q), lse"""
HOP = "kv = Shift.apply(kv, 1, group)"
THEIRS, HIDDEN = "places[rank - step]", "hides(places[rank], places[rank - step])"
NEIGHBOURS = "torch.arange(q.shape[2]) + (rank - step) % world_size * q.shape[2]"
OTHERS = "places[(rank + step) % world_size]"
IN_16_BITS = """scores = (q @ kv[0].mT / q.shape[-1] ** 0.5).masked_fill(hidden, -1e9)
        sums = scores.logsumexp(-1, keepdim=True)
        out, lse = merge(out, lse, (scores - sums).exp() @ kv[1], sums)"""
RING = [
    Right("ring_attention", replace={"kv =…": KEYS_AND_VALUES}),
    Wrong(
        "ring_attention",
        replace={HOP: "pass"},
        says="rank 1: query 2 attends to keys [2, 3], expected 0 to 2",
    ),
    Wrong(
        "ring_attention",
        replace={THEIRS: OTHERS},
        says="3 rank(s) with tokens [0, 3], [1, 4], [2, 5], rank 1: query 1",
    ),
    Wrong(
        "ring_attention",
        replace={HIDDEN: f"~{HIDDEN}"},
        says="query 0 attends to keys [0, 2, 3], expected 0 to 0",
    ),
    Wrong(
        "ring_attention",
        replace={HOP: "kv = Shift.apply(kv.detach(), 1, group)"},
        says="rank 0 of 2: the gradient of k of tokens [0, 1, 2",
    ),
    Wrong(
        "ring_attention",
        replace={THEIRS: NEIGHBOURS},
        says="3 rank(s) with tokens [0, 3], [1, 4]",
    ),
    Wrong(
        "ring_attention",
        replace={"return out": "Shift.apply(kv); return out"},
        says="sends to",
    ),
    Wrong(
        "ring_attention",
        replace={HOP: "kv = Shift.apply(kv, -1, group)", THEIRS: OTHERS},
        says="rank 0 sends to",
    ),
    Wrong("ring_attention", replace={"out.to(q.dtype)": "out"}, says="torch.float32, exp"),
    Wrong(
        "ring_attention",
        replace={HIDDEN: "is_later(places[rank], places[rank - step])"},
        says="where a padding is hidden and nothing else",
    ),
    Wrong(
        "ring_attention",
        replace={"out, lse = merge(out, lse, *attend(q, *kv, hidden))": IN_16_BITS},
        says="4 ranks in bfloat16 autocast: off by",
    ),
    Wrong(
        "ring_attention",
        replace={HOP: "kv = Shift.apply(kv)"},
        says="groups of ranks 0 and 2, 1 and 3, rank",
    ),
    Wrong(
        "ring_attention",
        replace={
            "group: Group = None": "group: Group = None, *, other=None",
            "(group)": "(other)",
        },
        says="rank",
    ),
]
ROWS = "return torch.arange(length).view(2 * world_size, -1)[[rank, -1 - rank]].flatten()"
BOTH = "chunks[rank], chunks[-1 - rank]"
ZIGZAG = [
    Right("zigzag", replace={"chunks =…": ROWS}),
    Wrong(
        "zigzag",
        replace={"return…": "return torch.cat(chunks[2 * rank : 2 * rank + 2])"},
        says="rank 0 of 4 gets",
    ),
    Wrong(
        "zigzag", replace={BOTH: "chunks[-1 - rank], chunks[rank]"}, says="rank 0 of 4 gets"
    ),
    Wrong(
        "zigzag",
        replace={f"torch.cat([{BOTH}])": f"list(torch.cat([{BOTH}]))"},
        says="of the type",
    ),
    Wrong("zigzag", replace={"chunk(2 * world_size)": "chunk(8)"}, says="rank 0 of 1 gets"),
    Wrong(
        "zigzag",
        replace={"-length % (2 * world_size)": "-length % world_size"},
        says="no ValueError",
    ),
]
BY_TENSORS = """lengths = torch.tensor(lengths)
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    labels = (lengths - 1)[document]
    weights = (positions < labels) / labels / len(lengths)

    def hides(queries, keys):
        same = document[queries, None] == document[None, keys]
        return ~(same & (positions[keys] <= positions[queries, None]))

    return hides, positions, weights"""
LATER = "is_later(queries, keys) | elsewhere"
PACKED = [
    Right("packed", replace={"document, positions, weights =…": BY_TENSORS}),
    Wrong(
        "packed",
        replace={LATER: "is_later(queries, keys)"},
        says="query 5 sees [0, 1, 2, 3, 4, 5] of the keys [0, 1, 2, 3, 4, 5, 6, 7], exp",
    ),
    Wrong(
        "packed",
        replace={LATER: "elsewhere"},
        says="neighbours: query 0 sees [0, 1, 2, 3, 4] of the keys",
    ),
    Wrong(
        "packed", replace={LATER: "is_later(queries, keys) & elsewhere"}, says="query 0 sees"
    ),
    Wrong(
        "packed", replace={LATER: f"~({LATER})"}, says="query 0 sees [1, 2, 3, 4, 5, 6, 7] of"
    ),
    Wrong(  # as if the dealt tokens were neighbours from 0 on
        "packed",
        replace={
            "own[queries][:, None] != own[keys]": "own[: len(queries), None] "
            "!= own[: len(keys)]"
        },
        says="neighbours: query 24 sees",
    ),
    Wrong(
        "packed",
        replace={
            "is_later(queries, keys)": "torch.arange(len(keys)) > torch.arange(len("
            "queries))[:, None]"
        },
        says="of the keys",
    ),
    Wrong(
        "packed",
        replace={"range(length)": "range(len(positions), len(positions) + length)"},
        says="documents of [5, 20, 7]: the positions",
    ),
    Wrong("packed", replace={"range(length)": "range(1, length + 1)"}, says="the positions"),
    Wrong(
        "packed",
        replace={"1 / labels for": "1.0 for"},
        says="documents of [3, 2]: the weights: [0.333333",
    ),
    Wrong(
        "packed",
        replace={"[1 / labels for _ in range(labels)] + [0.0]": "[1 / length] * length"},
        says="the weights (a last token has none) at 2 and 4",
    ),
    Wrong(
        "packed",
        replace={"weights / weights.sum()": "weights"},
        says="documents of [3, 2]: the weights: [0.5, 0.5, 0, 1, 0]",
    ),
    Wrong("packed", replace={"return hides,…": "return hides"}, says="type of what is ret"),
]
test_right, test_wrong = edited(build, [*MERGE, *RING, *ZIGZAG, *PACKED])
