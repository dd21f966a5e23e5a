"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.distributed_sgd.builds import build
from tests.builds import Right, Wrong, edited

TOGETHER = """gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))"""
SUM = "dist.all_reduce(parameter.grad, group=group)"
DIVIDE = "parameter.grad /= dist.get_world_size(group)"
BOTH = f"{DIVIDE}  # first, for float16\n        {SUM}"
AVERAGE = [
    Right("average_gradients", replace={BOTH: f"{SUM}\n        {DIVIDE}"}),
    Right("average_gradients", replace={"trained =…": TOGETHER}),
    Wrong(
        "average_gradients",
        replace={DIVIDE: ""},
        says="rank 0 of 2: the gradient of the weight: [4, 40]",
    ),
    Wrong(
        "average_gradients",
        replace={SUM: "dist.all_reduce(parameter.grad)"},
        says="rank 0: the mean of ten times the rank",
    ),
    Wrong(
        "average_gradients",
        replace={DIVIDE: "parameter.grad /= dist.get_world_size()"},
        says="rank 0: the mean of ten times",
    ),
    Wrong(
        "average_gradients",
        replace={DIVIDE: "parameter.grad /= 2"},
        says="rank 0 of 1: the gradient of the weight",
    ),
    Wrong(
        "average_gradients",
        replace={SUM: f"if parameter.dim() > 1:\n            {SUM}"},
        says="the gradient of the bias",
    ),
    Wrong(
        "average_gradients",
        replace={SUM: f"{SUM}; parameter.data -= parameter.grad"},
        says="the parameters",
    ),
    Wrong(
        "average_gradients",
        replace={SUM: f"if dist.get_rank() == 0:\n            {SUM}"},
        says="rank 1",
    ),
    Wrong(
        "average_gradients",
        replace={DIVIDE: f"{DIVIDE}; {SUM}; {DIVIDE}"},
        says="rank 0 sends 24 bytes, expected 12",
    ),
    Wrong(
        "average_gradients",
        replace={SUM: f"{SUM}; parameter.grad += 1e-9 * dist.get_rank()"},
        says="other bits than rank 0",
    ),
    Wrong(
        "average_gradients",
        replace={SUM: f"{SUM}; parameter.grad = parameter.grad.half().float()"},
        says="away from one",
    ),
]
BY_HAND = """pairs = zip(output[:, None], labels[:, None])
    each = [loss_of(one, label, reduction="sum") for one, label in pairs]
    return (sum(each) + 0 * output.sum()) * dist.get_world_size(group) / batch"""
NO_SHARE = """if len(labels) == 0:
        return output.sum()
    share = len(labels) / batch
    total = loss_of(output, labels, reduction="sum") / len(labels) * share
    return total * dist.get_world_size(group)"""
MEAN = NO_SHARE.partition("return output.sum()\n    ")[2]
LOSS = [
    Right("shared_loss", replace={"return…": BY_HAND}),
    Right("shared_loss", replace={"return…": NO_SHARE}),
    Wrong(
        "shared_loss",
        replace={"return…": "return nll_loss(output, labels)"},
        says="shares of 4 and 3",
    ),
    Wrong(
        "shared_loss",
        replace={" * dist.get_world_size(group) / batch": ""},
        says="average: 28, expected 4",
    ),
    Wrong(
        "shared_loss",
        replace={"return…": MEAN},
        says="1 and 0 samples: the ranks' average: nan, expected 1",
    ),
    Wrong(
        "shared_loss",
        replace={"return…": NO_SHARE.replace("output.sum()", "torch.zeros(())")},
        says="does not require grad",
    ),
    Wrong(
        "shared_loss",
        replace={"get_world_size(group)": "get_world_size()"},
        says="rank 1, of a batch of 4 one sample",
    ),
    Wrong(
        "shared_loss",
        replace={"total = loss_of": "total = nll_loss"},
        says="gives 1 on rank 0, 2 on rank 1",
    ),
    Wrong("shared_loss", replace={"return ": ""}, says="nothing was returned"),
    Wrong(
        "shared_loss",
        replace={"return ": "return float(", " / batch": " / batch)"},
        says="backward",
    ),
]
FACTOR = "factor = (ranks[0] * right).sum() / (right * right).sum()"
FLAT = "factor = (ranks[0].flatten() @ right.flatten()) / right.norm() ** 2"
KINDS = [
    Right("kind_of", replace={FACTOR: FLAT}),
    Right("kind_of", replace={"sum(ranks) / len(ranks)": "torch.stack(list(ranks)).mean(0)"}),
    Wrong("kind_of", replace={"<= limit": "<= 10"}, says="rank 0 right, rank 1 not"),
    Wrong("kind_of", replace={"<= limit": "== 0"}, says="each less than the limit off"),
    Wrong("kind_of", replace={"all(near": "any(near"}, says="rank 0 right, rank 1 not"),
    Wrong("kind_of", replace={" / len(ranks)": ""}, says="2 ranks whose mean is right"),
    Wrong("kind_of", replace={" / len(ranks)": " / 2"}, says="3 ranks whose mean is right"),
    Wrong(
        "kind_of",
        replace={FACTOR: "factor = ranks[0].norm() / right.norm()"},
        says="-1 times the right gradient",
    ),
    Wrong("kind_of", replace={FACTOR: "factor = len(ranks)"}, says="0.5 times"),
    Wrong(
        "kind_of",
        replace={"all(near(own, factor * right) for own in ranks)": "factor.abs() > 0.1"},
        says="rank 0 right, rank 1 not",
    ),
    Wrong("kind_of", replace={"<= limit": "> limit"}, says="expected 'right'"),
]
test_right, test_wrong = edited(build, [*AVERAGE, *LOSS, *KINDS])
