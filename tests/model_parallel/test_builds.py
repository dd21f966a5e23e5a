"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.model_parallel.builds import build
from tests.builds import Right, Wrong, edited

MOVE, ZIP = (
    "stage.to(device)",
    "for stage, device in zip(self.stages, self.devices, strict=True)",
)
STEP, BY_PARAMETERS = "x = stage(x.to(device))", "x.to(next(stage.parameters()).device)"
NETWORK = [
    Right("ModelParallelResNet50", replace={MOVE: "stage.to(torch.device(device))"}),
    Right(
        "ModelParallelResNet50",
        replace={STEP: f"x = stage({BY_PARAMETERS})", MOVE: "stage.to(device=device)"},
    ),
    Wrong(
        "ModelParallelResNet50",
        replace={MOVE: "pass"},
        says="the device of conv1's 0.weight: 'cpu', expected 'virtual:0'",
    ),
    Wrong(
        "ModelParallelResNet50",
        replace={
            MOVE: f"{MOVE}\n            for m in stage.modules():\n"
            "                m._buffers = {k: b.cpu() for k, b in m._buffers.items()}"
        },
        says="the device of conv1's 1.running_mean: 'cpu', expected 'virtual:0'",
    ),
    Wrong(
        "ModelParallelResNet50",
        replace={"cut(self, cuts)": "nn.ModuleList(cut(self, cuts))"},
        says="the names in the state_dict",
    ),
    Wrong("ModelParallelResNet50", replace={STEP: "x = stage(x)"}, says="on the same device"),
    Wrong(
        "ModelParallelResNet50",
        replace={"return x": "return x.to(self.devices[0])"},
        says="the device of the output: 'virtual:0'",
    ),
    Wrong(
        "ModelParallelResNet50",
        replace={", strict=True": ""},
        says="2 stages and 1 device(s): no error",
    ),
    Wrong(
        "ModelParallelResNet50",
        replace={STEP: "x = stage(x.detach().to(device))"},
        says="the gradient of conv1.weight: there is none",
    ),
]

FORWARD, BACKWARD = "forward_stage, s, i, after=task", "backward_stage, s, i, after=task"
SECOND = "for i in micro_batches:\n        task = None\n        for s in reversed"
LAST_FIRST = SECOND.replace("in micro_batches", "in reversed(micro_batches)")
BY_STAGE = """tasks = {}
    for s in stages:
        for i in micro_batches:
            tasks[s, i] = step.queue(forward_stage, s, i, tasks.get((s - 1, i)))
    for s in reversed(stages):
        for i in micro_batches:
            after = tasks[s + 1, i] if s + 1 in stages else None
            tasks[s, i] = step.queue(backward_stage, s, i, after)"""
ORDER = [
    Right("forward_backward", replace={"# all forwards…": BY_STAGE}),
    Right("forward_backward", replace={SECOND: LAST_FIRST}),
    Wrong(
        "forward_backward",
        replace={SECOND: SECOND.replace("in micro_batches", "in [*micro_batches[1:], 0]")},
        says="the order of device 0: 'F0 F1 F2 B1 B2 B0'",
    ),
    Wrong(
        "forward_backward",
        replace={"# all backwards…": ""},
        says="1 micro-batch(es): the order of device 0: 'F0', expected 'F0 B0'",
    ),
    Wrong(
        "forward_backward",
        replace={FORWARD: "forward_stage, s, i"},
        says="the forward of stage 1, micro-batch 0, waits for nothing, expected the forward",
    ),
    Wrong(
        "forward_backward",
        replace={SECOND: SECOND.replace("        task = None\n        for", "        for")},
        says="the backward of stage 0, micro-batch 0, waits for the forward of stage 0",
    ),
    Wrong(
        "forward_backward",
        replace={f"{FORWARD})": f"{FORWARD})\n            task.result()"},
        says="does the loop wait for a result?",
    ),
]
test_right, test_wrong = edited(build, [*NETWORK, *ORDER])
