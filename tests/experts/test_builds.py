"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.experts.builds import build
from tests.builds import Right, Wrong, edited

WITH_NUMBERS = """own = experts // ranks
    order = (which // own).argsort(stable=True)
    sent = [int(((which // own) == r).sum()) for r in range(ranks)]
    received = torch.empty(ranks, dtype=torch.int64)
    dist.all_to_all_single(received, torch.tensor(sent), group=group)
    received = received.tolist()
    marked = torch.cat([rows, (which % own)[:, None].to(rows.dtype)], dim=1)
    arrived = Exchange.apply(marked[order], sent, received, group)
    return arrived[:, :-1], arrived[:, -1].detach().long(), (order, sent, received)"""
CHECKED = """if len(which) != len(rows) or (which >= experts).any() or experts % ranks:
        raise ValueError("not an expert for each row")
    """
SORTED, SPLITS, ORDER = "rows[order]", "    sent = counts", "are rows and numbers in the same"
BY_EXPERT = "repeat_interleave(theirs.view(ranks, -1).sum(dim=0))"
GLOBAL = "torch.arange(experts).chunk(ranks)[dist.get_rank()]"
DISPATCH = [
    Right("dispatch", replace={"order = which…": CHECKED + WITH_NUMBERS}),
    Wrong("dispatch", replace={"theirs.view": "counts.view"}, says="rank"),
    Wrong(
        "dispatch",
        replace={".repeat(ranks)": "", "repeat_interleave(theirs)": BY_EXPERT},
        says=ORDER,
    ),
    Wrong(
        "dispatch",
        replace={"torch.arange(experts // ranks, device=rows.device)": GLOBAL},
        says="on rank 1 of 2 the numbers",
    ),
    Wrong(
        "dispatch",
        replace={SORTED: "rows.detach()[order]"},
        says="no gradient reaches the tokens",
    ),
    Wrong("dispatch", replace={"minlength=experts": ""}, says="rank"),
    Wrong(
        "dispatch",
        replace={
            "sent, received, group)": "sent, received, group) if any(received) else rows"
        },
        says="rank",
    ),
    Wrong(
        "dispatch",
        replace={SPLITS: f"    dist.all_to_all_single(theirs, counts)\n{SPLITS}"},
        says="the calls of rank 0",
    ),
    Wrong("dispatch", replace={"return…": ""}, says="nothing was returned"),
    Wrong(
        "dispatch",
        replace={"if len(which) != len(rows):": "if False:"},
        says="five rows for three of 12 experts",
    ),
    Wrong("dispatch", replace={"if experts % ranks:": "if False:"}, says="divide"),
    Wrong("dispatch", replace={", group)": ")"}, says="rank"),
    Wrong(
        "dispatch",
        replace={
            "group: Group = None": "*_",
            ", group)": ")",
            "get_world_size(group)": "get_world_size()",
            ", group=group": "",
        },
        says="rank",
    ),
]
PLACED, WEIGHTS = "back[order.argsort()]", "weights[..., None]"
BY_CHOICE = """rows = torch.zeros_like(back).index_copy(0, order, back)
    k = weights.shape[1]
    return sum(rows[i::k] * weights[:, i : i + 1] for i in range(k))"""
BY_PRODUCT = 'return torch.einsum("tk,tkd->td", weights, rows.unflatten(0, weights.shape))'
VIEW = "view(*weights.shape, -1)"
COMBINE = [
    Right("combine", replace={"rows = back…": BY_CHOICE}),
    Wrong(
        "combine",
        replace={PLACED: "back[order]"},
        says="the output of token 0, [0, 1] (times 8 from expert 7, times 1 from expert 0",
    ),
    Wrong("combine", replace={", group)": ")"}, says="rank"),
    Wrong(
        "combine", replace={"results, received, sent": "results, sent, received"}, says="rank"
    ),
    Wrong("combine", replace={f"{WEIGHTS} * ": ""}, says="the output"),
    Wrong(
        "combine",
        replace={WEIGHTS: "weights.detach()[..., None]"},
        says="no gradient reaches the weights",
    ),
    Wrong(
        "combine", replace={"unflatten(0, weights.shape)": VIEW}, says="unspecified dimension"
    ),
    Wrong("combine", replace={"return ": ""}, says="nothing was returned"),
    Wrong(
        "combine",
        replace={"return…": BY_PRODUCT},
        says="on 2 ranks in bfloat16 autocast: off by 0.",
    ),
]
test_right, test_wrong = edited(build, [*DISPATCH, *COMBINE])
