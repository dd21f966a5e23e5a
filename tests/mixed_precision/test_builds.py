"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.mixed_precision.builds import build
from tests.builds import Right, Wrong, edited

AVERAGE, UNSCALE = "average_gradients(model)", "scaler.unscale_(optimizer)"
CLIP = "clip_grad_norm_(model.parameters(), 1.0)"
BY_HAND = """for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()"""
NORM = """norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    for parameter in model.parameters():
        parameter.grad /= max(norm, 1.0)"""
FIRST = """for flag in scaler._found_inf_per_device(optimizer).values():
        dist.broadcast(flag, 0)"""
IF_FINITE = f"if all(p.grad.isfinite().all() for p in model.parameters()): {AVERAGE}"


def lines(*words):
    return "\n    ".join(words)


ALL = lines(AVERAGE, UNSCALE, CLIP)
FINISH = [
    Right("finish_step", replace={AVERAGE: BY_HAND, CLIP: NORM}),
    Wrong(
        "finish_step",
        replace={ALL: lines(UNSCALE, AVERAGE, CLIP)},
        says="[0.3, 0.0, 0.0]]: on rank 1 the weights",
    ),
    Wrong(
        "finish_step",
        replace={ALL: lines(UNSCALE, AVERAGE, CLIP, FIRST)},
        says="[[0.3, 0.0, 0.0], [0.3, inf",
    ),
    Wrong(
        "finish_step",
        replace={ALL: lines(AVERAGE, CLIP, UNSCALE)},
        says="[[30.0, 40.0, 0.0]]: on rank 0 the weights",
    ),
    Wrong("finish_step", replace={CLIP: ""}, says="gradients [[30.0, 40.0, 0.0]]"),
    Wrong(
        "finish_step",
        replace={AVERAGE: ""},
        says="gradients [[0.03, 0.0, 0.02], [0.0, 0.04, 0.02]]",
    ),
    Wrong(
        "finish_step",
        replace={ALL: lines(UNSCALE, CLIP, AVERAGE)},
        says="gradients [[60.0, 0.0, 0.0], [0.0, 80.0, 0.0]]",
    ),
    Wrong(
        "finish_step",
        replace={AVERAGE: IF_FINITE},
        says="rank 0 returned while ranks 1 and 2 still waited",
    ),
]
MIN = """there = [g for g in gradients if g is not None]
    good = torch.tensor(int(all(g.isfinite().all() for g in there)))
    dist.all_reduce(good, dist.ReduceOp.MIN, group)
    return bool(good)"""
COUNTED = """bad = torch.zeros(1)
    for gradient in filter(torch.is_tensor, gradients):
        bad += (~gradient.isfinite()).sum()
    dist.all_reduce(bad, group=group)
    return bad.item() == 0"""
LEAVES = """if all(g.isfinite().all() for g in gradients):
        return True
    dist.all_reduce(torch.ones(1))
    return False"""
SUM = """total = sum(gradient.sum() for gradient in gradients) + torch.zeros(())
    dist.all_reduce(total)
    return total != float('inf')"""
ALONE = "all(g.isfinite().all() for g in gradients)"
ASK = [
    Right("is_finite_everywhere", replace={"overflow =…": MIN}),
    Right("is_finite_everywhere", replace={"overflow =…": COUNTED}),
    Wrong(
        "is_finite_everywhere",
        replace={"overflow =…": f"return {ALONE}"},
        says="what rank 0 says: True, expected False",
    ),
    Wrong(
        "is_finite_everywhere",
        replace={"overflow =…": LEAVES},
        says="ranks 0 and 2 returned while rank 1 still waited",
    ),
    Wrong(
        "is_finite_everywhere",
        replace={"not g.isfinite().all()": "g.isinf().any()"},
        says="[nan] in a gradient",
    ),
    Wrong(
        "is_finite_everywhere",
        replace={" if g is not None": ""},
        says="'NoneType' object has no attribute 'isfinite'",
    ),
    Wrong("is_finite_everywhere", replace={"overflow =…": SUM}, says="expected False"),
    Wrong(
        "is_finite_everywhere",
        replace={
            "tensor(float(overflow))": "full((3,), float(overflow))",
            ".item()": ".max()",
        },
        says="rank 0 sent 12 bytes",
    ),
    Wrong(
        "is_finite_everywhere",
        replace={"MAX, group)": "MAX)"},
        says="an overflow on rank 3: what rank 0 says: False, expected True",
    ),
]
test_right, test_wrong = edited(build, [*FINISH, *ASK])
