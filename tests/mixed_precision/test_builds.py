"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.mixed_precision.builds import build
from tests.builds import edited

AVERAGE, UNSCALE = "average_gradients(model)", "scaler.unscale_(optimizer)"
CLIP = "clip_grad_norm_(model.parameters(), 1.0)"
BY_HAND = """for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()"""
NORM = """norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    for parameter in model.parameters():
        parameter.grad /= max(norm, 1.0)"""
IF_FINITE = f"if all(p.grad.isfinite().all() for p in model.parameters()): {AVERAGE}"


def lines(*words):
    return "\n    ".join(words)


ALL = lines(AVERAGE, UNSCALE, CLIP)
FINISH = [
    (AVERAGE, BY_HAND, CLIP, NORM),
    (ALL, lines(UNSCALE, AVERAGE, CLIP), "an infinity on rank 0 of 3: on rank 1"),
    (ALL, lines(AVERAGE, CLIP, UNSCALE), "[[0.3, 0.0, 0.2]]: the weights of rank 0"),
    (CLIP, "", "gradients [[30.0, 40.0, 0.0]]"),
    (AVERAGE, "", "gradients [[0.3, 0.0, 0.2], [0.0, 0.4, 0.2]]"),
    (ALL, lines(UNSCALE, CLIP, AVERAGE), "gradients [[60.0, 0.0, 0.0], [0.0, 80.0, 0.0]]"),
    (AVERAGE, IF_FINITE, "rank 0 returned while ranks 1 and 2 still waited"),
]
MIN = """good = torch.tensor(int(is_finite(gradients)))
    dist.all_reduce(good, dist.ReduceOp.MIN)
    return bool(good)"""
COUNTED = """bad = torch.zeros(1)
    for gradient in gradients:
        bad += (~gradient.isfinite()).sum()
    dist.all_reduce(bad)
    return bad.item() == 0"""
LEAVES = """if is_finite(gradients):
        return True
    dist.all_reduce(torch.ones(1))
    return False"""
EACH = """for gradient in gradients:
        dist.all_reduce(gradient)
    return is_finite(gradients)"""
SUM = """total = sum(gradient.sum() for gradient in gradients) + torch.zeros(())
    dist.all_reduce(total)
    return total != float('inf')"""
ASK = [
    ("found =…", MIN),
    ("found =…", COUNTED),
    ("found =…", "return is_finite(gradients)", "what rank 0 says: True, expected False"),
    ("found =…", LEAVES, "ranks 0 and 2 returned while rank 1 still waited"),
    ("found =…", EACH, "rank"),
    ("found =…", SUM, "expected False"),
    ("return found.item() == 0", "", "nothing was returned"),
]
test_right, test_wrong = edited(build, {"finish_step": FINISH, "is_finite_everywhere": ASK})
