"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.distributed_sgd.builds import build
from tests.builds import edited

TOGETHER = """gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))"""
SUM, DIVIDE = "dist.all_reduce(parameter.grad, group=group)", "parameter.grad /= ranks"
BOTH = f"{SUM}\n        {DIVIDE}"
AVERAGE = [
    (BOTH, f"{DIVIDE}\n        {SUM}"),
    ("trained =…", TOGETHER),
    (DIVIDE, "", "rank 0 of 2: the gradient of the weight: [4, 40]"),
    (SUM, "dist.all_reduce(parameter.grad)", "rank 0: the mean of ten times the rank"),
    (DIVIDE, "parameter.grad /= dist.get_world_size()", "rank 0: the mean of ten times"),
    (DIVIDE, "parameter.grad /= 2", "rank 0 of 1: the gradient of the weight"),
    (SUM, f"if parameter.dim() > 1:\n            {SUM}", "the gradient of the bias"),
    (DIVIDE, f"{DIVIDE}; parameter.data -= parameter.grad", "the parameters"),
    (SUM, f"if dist.get_rank() == 0:\n            {SUM}", "rank 1"),
    (DIVIDE, f"{DIVIDE}; {SUM}; {DIVIDE}", "rank 0 sends 24 bytes, expected 12"),
    (DIVIDE, f"{DIVIDE}; parameter.grad += 1e-9 * dist.get_rank()", "other bits than rank 0"),
    (DIVIDE, f"{DIVIDE}; parameter.grad = parameter.grad.half().float()", "away from one"),
]
BY_HAND = """pairs = zip(output[:, None], labels[:, None])
    each = [loss_of(one, label, reduction="sum") for one, label in pairs]
    return (sum(each) + 0 * output.sum()) * dist.get_world_size(group) / batch"""
NO_SHARE = """if len(labels) == 0:
        return output.sum()
    share = len(labels) / batch
    return loss_of(output, labels, reduction="sum") / len(labels) * share * size_of(group)"""
MEAN = NO_SHARE.partition("return output.sum()\n    ")[2]
LOSS = [
    ("return…", BY_HAND),
    ("return…", NO_SHARE),
    ("return…", "return nll_loss(output, labels)", "shares of 4 and 3"),
    (" * size_of(group) / batch", "", "average: 28, expected 4"),
    ("return…", MEAN, "1 and 0 samples: the ranks' average: nan, expected 1"),
    ("return…", NO_SHARE.replace("output.sum()", "torch.zeros(())"), "does not require grad"),
    ("size_of(group)", "dist.get_world_size()", "rank 1, of a batch of 4 one sample"),
    ("return loss_of", "return nll_loss", "gives 1 on rank 0, 2 on rank 1"),
    ("return ", "", "nothing was returned"),
    ("return ", "return float(", " / batch", " / batch)", "backward"),
]
test_right, test_wrong = edited(build, {"average_gradients": AVERAGE, "shared_loss": LOSS})
