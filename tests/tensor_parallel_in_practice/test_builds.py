"""Right answers in other words pass every behaviour; of wrong ones a row says why."""

from mgpu_tutorial.tensor_parallel_in_practice.builds import build
from tests.builds import Right, Wrong, edited

LOSS, GRADIENT = "rank 0 of 3: the loss", "rank 0 of 3: the logits' gradient"
MAX = "dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)"
SUM, TOTAL = "SumOverRanks.apply(shifted.exp().sum(-1), group)", "total = SumOverRanks"
RIGHT, HIDE, MEAN = "SumOverRanks.apply(mine, group)", ".where(here, 0)\n    right", ".mean()"
COUNTED, REFUSE = "[targets != -100]", "if len(unknown):"
UNKNOWN = "(targets < 0) & (targets != -100) | (targets >= size)"
OTHER_IMPORT = "from mgpu_tutorial.tensor_parallel.layers import"
GATHER = "shifted.gather(-1, index).squeeze(-1).where(here, 0)"
BY_PRODUCT = """nn.functional.one_hot(index.squeeze(-1), logits.shape[-1]).to(shifted)
    mine = (shifted.where(shifted > -1e30, 0).unsqueeze(-2) @ mine.unsqueeze(-1))
    mine = mine.flatten(-3).where(here, 0)"""
CROSS_ENTROPY = [
    Right(
        "parallel_cross_entropy",
        replace={
            HIDE: ".masked_fill(~here, 0)\n    right",
            SUM: "shifted.exp().sum(-1); dist.all_reduce(total, group=group)",
        },
    ),
    Wrong("parallel_cross_entropy", replace={MAX: "pass"}, says=LOSS),
    Wrong(
        "parallel_cross_entropy",
        replace={"logits.detach().amax": "logits.amax"},
        says="(does one flow through the maximum? It needs none): [nan",
    ),
    Wrong("parallel_cross_entropy", replace={RIGHT: "mine"}, says=LOSS),
    Wrong("parallel_cross_entropy", replace={HIDE: "\n    right"}, says=LOSS),
    Wrong("parallel_cross_entropy", replace={MEAN: ".sum()"}, says="rank 0 of 1: the loss"),
    Wrong(
        "parallel_cross_entropy",
        replace={
            TOTAL: f"{OTHER_IMPORT} sum_of\n    {TOTAL}",
            SUM: "sum_of(shifted.detach().exp().sum(-1), group)",
        },
        says="the logits' gradient",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={MAX: "largest = torch.zeros_like(largest)"},
        says="[inf]",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={MAX: MAX.replace(", group=group", "")},
        says="rank 0 of 4 in groups of 2: the loss",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={HIDE: " * here\n    right"},
        says="rank 0 of 3: the loss: [nan]",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={RIGHT: "SumOverRanks.apply(mine)"},
        says="rank 0 of 4 in groups of 2: the loss",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={
            TOTAL: f"{OTHER_IMPORT} CopyToRanks\n    {TOTAL}",
            SUM: f"CopyToRanks.apply({SUM}, group)",
        },
        says=GRADIENT,
    ),
    Wrong("parallel_cross_entropy", replace={COUNTED: ""}, says="rank 0 of 1: the loss"),
    Wrong(
        "parallel_cross_entropy",
        replace={REFUSE: "if False:"},
        says="target 12 of 12, rank 0: no error",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={UNKNOWN: "targets >= size"},
        says="target -1 of 12, rank 0: no error",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={GATHER: BY_PRODUCT},
        says="2 ranks in bfloat16 autocast: ",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={"logits = logits.float()": "pass"},
        says="2 ranks in bfloat16 autocast: ",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={MAX: f"{MAX}; dist.all_reduce(logits.detach().clone())"},
        says="rank 0 sends 7 numbers per token",
    ),
]
JOIN = "torch.cat(every.chunk(ranks), dim=1)"
FEATURE = ", the first feature of each token: "
BY_SUM = """every = mine.new_zeros(len(mine), ranks * mine.shape[1], mine.shape[2])
    own = every.chunk(ranks, 1)[dist.get_rank(group)]
    own.copy_(mine)
    dist.all_reduce(every, group=group)
    return every"""
BY_LIST = """every = [torch.empty_like(mine.contiguous()) for _ in range(ranks)]
    dist.all_gather(every, mine.contiguous(), group=group)
    return torch.cat(every, 1)"""
GATHERED = [
    Right("gathered", replace={"every = …": BY_LIST}),
    Right(
        "gathered",
        replace={JOIN: "every.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)"},
    ),
    Wrong("gathered", replace={JOIN: "every"}, says="rank 0 of 3: the output: [0, 0, -0"),
    Wrong(
        "gathered", replace={"dim=1": "dim=-1"}, says="expected [0, 0, -0, 1, 0.5, -1, …] of"
    ),
    Wrong(
        "gathered",
        replace={JOIN: "every.view(len(mine), -1, *mine.shape[2:])"},
        says=f"rank 0 of 3: the output{FEATURE}[0, 1, 100, 101, 2, 3, …]",
    ),
    Wrong(
        "gathered",
        replace={"every.chunk(ranks)": "every.chunk(ranks)[::-1]"},
        says=f"rank 0 of 3: the output{FEATURE}[4, 5, 2, 3, 0, 1, …]",
    ),
    Wrong(
        "gathered",
        replace={"return ": "mine.zero_()\n    return "},
        says="the input afterwards",
    ),
    Wrong("gathered", replace={", group=group": ""}, says="on 4 ranks: "),
    Wrong("gathered", replace={"every = …": BY_SUM}, says="2 times half of an all-reduce"),
]
BELOW = "torch.cat(part.chunk(ranks, dim=1))"
SCATTER_CALL = "dist.reduce_scatter_single(mine, below, group=group)"
OWN = "part.chunk(ranks, dim=1)[dist.get_rank(group)]"
BY_PARTS = (
    "dist.reduce_scatter(mine, [t.contiguous() for t in part.chunk(ranks, 1)], group=group)"
)
SCATTERED = [
    Right("scattered_sum", replace={SCATTER_CALL: BY_PARTS}),
    Wrong(
        "scattered_sum",
        replace={SCATTER_CALL: f"mine = {OWN}"},
        says=f"rank 0 of 3: the output{FEATURE}[0, 1, 100, 101], expected [0, 6, 600, 606]",
    ),
    Wrong(
        "scattered_sum",
        replace={BELOW: "part.reshape(ranks * batch, -1, features)"},
        says=f"rank 0 of 3: the output{FEATURE}[0, 6, 12, 18], expected [0, 6, 600, 606]",
    ),
    Wrong(
        "scattered_sum",
        replace={"part.chunk(ranks, dim=1)": "part.chunk(ranks, dim=1)[::-1]"},
        says=f"rank 0 of 3: the output{FEATURE}[24, 30, ",
    ),
    Wrong(
        "scattered_sum",
        replace={"return mine": "return mine / ranks"},
        says=f"{FEATURE}[0, 2, 200, 202], expected [0, 6, 600, 606]",
    ),
    Wrong("scattered_sum", replace={", group=group)": ")"}, says="on 4 ranks: "),
    Wrong(
        "scattered_sum",
        replace={SCATTER_CALL: f"part = sum_of(part, group)\n    mine = {OWN}"},
        says="2 times half of an all-reduce",
    ),
]
BACK = "return scattered_sum(gradient, ctx.group), None"
CUT = "gradient.chunk(size_of(ctx.group), 1)[dist.get_rank(ctx.group)]"
ROOM = "torch.empty(ranks * len(mine), *mine.shape[1:])"
JOINED = f"""ranks = size_of(group)
        every = {ROOM}
        dist.all_gather_single(every, mine.float().contiguous(), group=group)
        return {JOIN}"""
GATHER_SEQUENCE = [
    Right(
        "GatherSequence",
        replace={"gathered(mine, group)": "gathered(mine.detach().clone(), group)"},
    ),
    Wrong(
        "GatherSequence",
        replace={BACK: f"return {CUT}, None"},
        says=f"rank 0 of 3: the input's gradient{FEATURE}[0, 1, 100, 101], expected [0, 6",
    ),
    Wrong(
        "GatherSequence",
        replace={BACK: "return gradient, None"},
        says="GatherSequenceBackward returned an invalid gradient",
    ),
    Wrong(
        "GatherSequence",
        replace={"ctx.group), None": "ctx.group)"},
        says="incorrect number of gradients",
    ),
    Wrong("GatherSequence", replace={"gradient, ctx.group": "gradient"}, says="on 4 ranks: "),
    Wrong(
        "GatherSequence",
        replace={"return gathered(mine, group)": JOINED},
        says="rank 0 of 2: the output in bfloat16 autocast: 'torch.float32'",
    ),
]
GATHER_BACK = "gathered(gradient, ctx.group)"
SCATTER_SEQUENCE = [
    Wrong(
        "ScatterSequence",
        replace={GATHER_BACK: "gradient.repeat(1, size_of(ctx.group), 1)"},
        says=f"rank 0 of 3: the input's gradient{FEATURE}[0, 1, 0, 1, 0, 1, …]",
    ),
    Wrong(
        "ScatterSequence",
        replace={GATHER_BACK: f"{GATHER_BACK} / size_of(ctx.group)"},
        says="the input's gradient",
    ),
    Wrong(
        "ScatterSequence",
        replace={"return scattered_sum": "return size_of(group) ** -1 * scattered_sum"},
        says=f"rank 0 of 3: the output{FEATURE}[0, 2,",
    ),
    Wrong(
        "ScatterSequence",
        replace={"scattered_sum(part, group)": "scattered_sum(part.float(), group)"},
        says="rank 0 of 2: the output in bfloat16 autocast: 'torch.float32'",
    ),
]
SEQUENCE = [*GATHERED, *SCATTERED, *GATHER_SEQUENCE, *SCATTER_SEQUENCE]
test_right, test_wrong = edited(build, [*CROSS_ENTROPY, *SEQUENCE])
