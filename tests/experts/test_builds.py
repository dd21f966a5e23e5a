"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.experts.builds import build
from tests.builds import edited

WITH_NUMBERS = """own = experts // ranks
    order = (which // own).argsort(stable=True)
    sent = [int(((which // own) == r).sum()) for r in range(ranks)]
    received = torch.empty(ranks, dtype=torch.int64)
    dist.all_to_all_single(received, torch.tensor(sent), group=group)
    received = received.tolist()
    marked = torch.cat([rows, (which % own)[:, None].to(rows.dtype)], dim=1)
    arrived = Exchange.apply(marked[order], sent, received, group)
    return arrived[:, :-1], arrived[:, -1].detach().long(), (order, sent, received)"""
SORTED, SPLITS, ORDER = "rows[order]", "    sent = counts", "are rows and numbers in the same"
BY_EXPERT = "repeat_interleave(theirs.view(ranks, -1).sum(dim=0))"
GLOBAL = "torch.arange(experts).chunk(ranks)[dist.get_rank()]"
DISPATCH = [
    ("order = which…", WITH_NUMBERS),
    ("theirs.view", "counts.view", "rank"),
    (".repeat(ranks)", "", "repeat_interleave(theirs)", BY_EXPERT, ORDER),
    ("torch.arange(experts // ranks)", GLOBAL, "on rank 1 of 2 the numbers"),
    (SORTED, "rows.detach()[order]", "no gradient reaches the tokens"),
    ("minlength=experts", "", "rank"),
    ("sent, received, group)", "sent, received, group) if any(received) else rows", "rank"),
    (SPLITS, f"    dist.all_to_all_single(theirs, counts)\n{SPLITS}", "the calls of rank 0"),
    ("return…", "", "nothing was returned"),
    ("require_experts(which, experts, len(rows))", "pass", "five rows for three experts"),
    (", group)", ")", "rank"),
    ("group: Group = None", "*_", ", group)", ")", "size_of(group)", "size_of()")
    + (", group=group", "", "rank"),
]
PLACED, WEIGHTS = "sorted_rows[order.argsort()]", "weights[..., None]"
BY_CHOICE = """rows = torch.zeros_like(sorted_rows).index_copy(0, order, sorted_rows)
    k = weights.shape[1]
    return sum(rows[i::k] * weights[:, i : i + 1] for i in range(k))"""
VIEW = "view(*weights.shape, -1)"
COMBINE = [
    ("rows = sorted…", BY_CHOICE),
    (PLACED, "sorted_rows[order]", "on rank 0 of 1 the output of token 0, a name and a 1: ["),
    (", group)", ")", "rank"),
    ("results, received, sent", "results, sent, received", "rank"),
    (f"{WEIGHTS} * ", "", "the output"),
    (WEIGHTS, "weights.detach()[..., None]", "no gradient reaches the weights"),
    ("unflatten(0, weights.shape)", VIEW, "unspecified dimension"),
    ("return ", "", "nothing was returned"),
]
test_right, test_wrong = edited(build, {"dispatch": DISPATCH, "combine": COMBINE})
