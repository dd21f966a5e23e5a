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
test_right, test_wrong = edited(build, NETWORK)
