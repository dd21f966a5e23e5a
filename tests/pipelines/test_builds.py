"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.pipelines.builds import build
from tests.builds import edited

BACKWARD = "for i in range(micro):\n        out"
OUT = "send(forward_step(stage, i, input_tensor), rank + 1, group)"
BACK = "send(backward_step(stage, i, output_tensor_grad), rank - 1, group)"
RETURN = "return stage.losses, stage.gradients()"
BY_HAND = """output_tensor = forward_step(stage, i, input_tensor)
        if rank < world_size - 1:
            dist.send(output_tensor, group=group, group_dst=rank + 1)"""
ZERO = "for i in range(micro):\n        stage.module.zero_grad()\n        out"
LATER = f"""for _, output_tensor in stage.waiting.values():
        send(output_tensor.detach(), rank + 1, group)
    {BACKWARD}"""
GPIPE = [
    (OUT, BY_HAND, BACKWARD, "for i in list(stage.waiting):\n        out"),
    (f"{BACKWARD}…", RETURN, "the gradients, entry 0"),
    (BACK, "backward_step(stage, i, output_tensor_grad)", "rank 1 returned while"),
    (BACK, BACK.replace("rank - 1", "rank + 1"), "returned while"),
    (OUT, "forward_step(stage, i, input_tensor)", "had not returned"),
    (OUT, "forward_step(stage, i, input_tensor)", BACKWARD, LATER, "F0 F1 send send"),
    ("stage.output_shape", "stage.input_shape", "Mismatch in shape"),
    (RETURN, "", "nothing was returned"),
    (
        RETURN,
        f"stage.losses.clear()\n    {RETURN}",
        "the numbers of losses, entry 0 of 1: 0, expected 2",
    ),
    ("range(micro)", "reversed(range(micro))", "the losses in order, entry 0"),
    (BACKWARD, ZERO, "the gradients, entry"),
    ("stage = Stage(work, micro, group)", "stage, group = Stage(work, micro, group), None")
    + ("rank",),
    ("stage = Stage(work, micro, group)", "stage = Stage(work, micro)", "rank"),
]

AHEAD, PHASES = "min(micro, ranks - 1 - rank)", "ahead = min…"
COUNTED = """order, f, b = [], 0, 0
    while b < micro:
        if f < micro and f - b < ranks - rank:
            order, f = [*order, f'F{f}'], f + 1
        else:
            order, b = [*order, f'B{b}'], b + 1
    return order"""
NO_STEADY_STATE = "return [f'{kind}{i}' for kind in 'FB' for i in range(micro)]"
NO_WARM_UP = "return [f'{kind}{i}' for i in range(micro) for kind in 'FB']"
ORDER = [
    (PHASES, COUNTED),
    (PHASES, NO_STEADY_STATE, "held at most"),
    (PHASES, NO_WARM_UP, "the slots"),
    (AHEAD, "min(micro, 2 * (ranks - 1 - rank))", "held at most"),
    (AHEAD, "min(micro, ranks - 1)", "held at most"),
    (AHEAD, "ranks - 1 - rank", "every F"),
    ("return order…", "return order", "every B"),
    ('f"F{i}", f"B{i - ahead}"', "f'B{i - ahead}', f'F{i}'", "B0 comes before F0"),
    (PHASES, "print(rank)", "None is no list"),
]
test_right, test_wrong = edited(build, {"run_gpipe": GPIPE, "order_of_1f1b": ORDER})
