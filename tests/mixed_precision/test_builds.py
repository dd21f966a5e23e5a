"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.mixed_precision.builds import build
from tests.builds import Right, Wrong, edited

AVERAGE, UNSCALE = "average_gradients(model)", "scaler.unscale_(optimizer)"
CLIP = "clip_grad_norm_(model.parameters(), 1.0)"
BY_HAND = """for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= torch.distributed.get_world_size()"""
NORM = """norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    for parameter in model.parameters():
        parameter.grad /= max(norm, 1.0)"""
FIRST = """for flag in scaler._found_inf_per_device(optimizer).values():
        torch.distributed.broadcast(flag, 0)"""
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
ROUND_UP = "scales = scales.log2().ceil().exp2()"
EXPONENT = """mantissa, power = torch.frexp(scales)
        power = power - (mantissa == 0.5).int()
        scales = 2.0**power * (scales > 0)"""
BROADCAST = """wide = scales.repeat_interleave(x.shape[-1] // scales.shape[-1], -1)
    short = torch.nan_to_num(x / wide, nan=0.0) if (wide == 0).any() else x / wide
    return short.clamp(-448, 448).to(torch.float8_e4m3fn)"""
WIDE = """wide = scales.repeat_interleave(short.shape[-1] // scales.shape[-1], -1)
    return short.to(torch.float32) * wide"""
SCALE = [
    Right("scales_of", replace={ROUND_UP: EXPONENT}),
    Right("scales_of", replace={"x.reshape(1, -1)": "x.flatten().unsqueeze(0)"}),
    Wrong("scales_of", replace={".abs()": ""}, says="the scale of the tensor"),
    Wrong("scales_of", replace={" / 448": ""}, says="[448], expected [1]"),
    Wrong("scales_of", replace={"unsqueeze(-2)": "unsqueeze(0)"}, says="the rows of"),
    Wrong("scales_of", replace={"(-1, 32)": "(32, -1)"}, says="of shape"),
    Wrong("scales_of", replace={"ceil": "floor"}, says="of row 1: the scales: [0.00195"),
    Wrong("scales_of", replace={ROUND_UP: "pass"}, says="the scales: [0.00223214,"),
    Wrong(
        "scales_of",
        replace={"amax(-1) / 448": "amax(-1).clamp(min=1e-12) / 448"},
        says="zeros, a scale per tensor",
    ),
]
EIGHT = [
    Right("to_float8", replace={"parts = x…": BROADCAST}),
    Right("from_float8", replace={"parts =…": WIDE}),
    Wrong(
        "to_float8", replace={"parts / scales": "parts * scales"}, says="scales 2 and 0.25"
    ),
    Wrong("to_float8", replace={".where(scales != 0, 1)": ""}, says="under scales 0 and 1"),
    Wrong(
        "to_float8",
        replace={".clamp(-448, 448)": ".clamp(max=448).clamp(-400)"},
        says="[1000, -1000, 1] under a scale of 1",
    ),
    Wrong("to_float8", replace={"e4m3fn": "e5m2"}, says="the result is torch.float8_e5m2"),
    Wrong("to_float8", replace={".flatten(-2)": ""}, says="of shape"),
    Wrong(
        "to_float8",
        replace={"(parts / scales)": "(parts / scales).nan_to_num()"},
        says="[inf, 1] under a scale of inf",
    ),
    Wrong(
        "from_float8", replace={"parts * scales": "parts / scales"}, says="is off by up to"
    ),
    Wrong(
        "from_float8",
        replace={".float()": ".bfloat16()", "parts * scales": "parts * scales.bfloat16()"},
        says="expected float32",
    ),
    Wrong("from_float8", replace={".flatten(-2)": ""}, says="its shape"),
]
STEP = "scaler.step(optimizer)"
AVERAGED = f"average_gradients(network)\n        {STEP}"
TURNS = [
    Right("take_turns", replace={"optimizer.zero_grad()": "network.zero_grad()"}),
    Right("take_turns", replace={STEP: f"scaler.unscale_(optimizer)\n        {STEP}"}),
    Wrong(
        "take_turns", replace={"average_gradients(network)": ""}, says="gradients 1, 2 and 3"
    ),
    Wrong("take_turns", replace={"scaler.scale(loss)": "loss"}, says="scale"),
    Wrong(
        "take_turns", replace={"optimizer.zero_grad()": ""}, says="two iterations: on rank 0"
    ),
    Wrong(
        "take_turns",
        replace={AVERAGED: f"scaler.unscale_(optimizer)\n        {AVERAGED}"},
        says="an infinite loss of network 0 on rank 0",
    ),
    Wrong(
        "take_turns",
        replace={f"{STEP}\n    scaler": f"{STEP}\n        scaler"},
        says="growth every 2 iterations",
    ),
    Wrong(
        "take_turns",
        replace={"scaler.update()": "pass"},
        says="already been called since the last update",
    ),
]
test_right, test_wrong = edited(build, [*SCALE, *EIGHT, *FINISH, *TURNS])
