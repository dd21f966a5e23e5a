"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.pipelines.builds import build
from tests.builds import Right, Wrong, edited

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
    Right(
        "run_gpipe",
        replace={OUT: BY_HAND, BACKWARD: "for i in list(stage.waiting):\n        out"},
    ),
    Wrong("run_gpipe", replace={f"{BACKWARD}…": RETURN}, says="the gradients, entry 0"),
    Wrong(
        "run_gpipe",
        replace={BACK: "backward_step(stage, i, output_tensor_grad)"},
        says="rank 1 returned while",
    ),
    Wrong(
        "run_gpipe",
        replace={BACK: BACK.replace("rank - 1", "rank + 1")},
        says="returned while",
    ),
    Wrong(
        "run_gpipe",
        replace={OUT: "forward_step(stage, i, input_tensor)"},
        says="had not returned",
    ),
    Wrong(
        "run_gpipe",
        replace={OUT: "forward_step(stage, i, input_tensor)", BACKWARD: LATER},
        says="F0 F1 send send",
    ),
    Wrong(
        "run_gpipe",
        replace={"stage.output_room, rank + 1": "stage.output_room, rank - 1"},
        says="from the rank that got the output",
    ),
    Wrong(
        "run_gpipe",
        replace={"stage.output_room": "stage.input_room"},
        says="Mismatch in shape",
    ),
    Wrong("run_gpipe", replace={RETURN: ""}, says="nothing was returned"),
    Wrong(
        "run_gpipe",
        replace={RETURN: f"stage.losses.clear()\n    {RETURN}"},
        says="the numbers of losses, entry 0 of 1: 0, expected 2",
    ),
    Wrong(
        "run_gpipe",
        replace={"range(micro)": "reversed(range(micro))"},
        says="the losses in order, entry 0",
    ),
    Wrong("run_gpipe", replace={BACKWARD: ZERO}, says="the gradients, entry"),
    Wrong(
        "run_gpipe",
        replace={
            "stage = Stage(work, micro, group)": "stage, group = "
            "Stage(work, micro, group), None"
        },
        says="rank",
    ),
    Wrong(
        "run_gpipe",
        replace={"stage = Stage(work, micro, group)": "stage = Stage(work, micro)"},
        says="rank",
    ),
]

COOL_DOWN = 'order += [f"B{i}" for i in range(micro - ahead, micro)]'
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
    Right("order_of_1f1b", replace={PHASES: COUNTED}),
    Wrong("order_of_1f1b", replace={PHASES: NO_STEADY_STATE}, says="held at most"),
    Wrong("order_of_1f1b", replace={PHASES: NO_WARM_UP}, says="the slots"),
    Wrong(
        "order_of_1f1b",
        replace={AHEAD: "min(micro, 2 * (ranks - 1 - rank))"},
        says="held at most",
    ),
    Wrong("order_of_1f1b", replace={AHEAD: "min(micro, ranks - 1)"}, says="held at most"),
    Wrong("order_of_1f1b", replace={AHEAD: "ranks - 1 - rank"}, says="every F"),
    Wrong("order_of_1f1b", replace={COOL_DOWN: ""}, says="every B"),
    Wrong(
        "order_of_1f1b",
        replace={'f"F{i}", f"B{i - ahead}"': "f'B{i - ahead}', f'F{i}'"},
        says="B0 comes before F0",
    ),
    Wrong("order_of_1f1b", replace={PHASES: "print(rank)"}, says="None is no list"),
]
test_right, test_wrong = edited(build, [*GPIPE, *ORDER])
