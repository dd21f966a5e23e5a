"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.model_parallel.builds import build
from tests.builds import right_and_wrong

IMPORTS = """\
import torch
from torch import nn
from mgpu_tutorial.model_parallel.micro_batches import backward_stage, forward_stage
from mgpu_tutorial.model_parallel.resnet_cuts import cut
from mgpu_tutorial.shared.vision import torchvision
"""


def network(move, forward, stages="cut(self, cuts, devices)"):
    return f"""{IMPORTS}
class ModelParallelResNet50(torchvision.models.ResNet):
    def __init__(self, devices, num_classes=1000, cuts=("layer3.0",)):
        block = torchvision.models.resnet.Bottleneck
        super().__init__(block, [3, 4, 6, 3], num_classes=num_classes)
        self.devices = devices
        self.stages = {stages}
        {move}

    def forward(self, x):
        {forward}
"""


def order(*lines):
    body = "\n    ".join(lines)
    return f"{IMPORTS}\ndef forward_backward(step):\n    {body}\n"


MOVE = "[stage.to(device) for stage, device in zip(self.stages, devices)]"
LOOP = """for stage, device in zip(self.stages, self.devices):
            x = stage(x.to(device))
        return x"""
HEAD = "stages, parts = range(len(step.model.stages)), range(len(step.parts))"
FORWARD = (
    "for i in parts:",
    "    task = None",
    "    for s in stages:",
    "        task = step.queue(forward_stage, s, i, task)",
)
BACKWARD = (
    "for i in parts:",
    "    task = None",
    "    for s in reversed(stages):",
    "        task = step.queue(backward_stage, s, i, task)",
)
RIGHT = [
    network(MOVE, LOOP),
    network(
        "for i in range(len(devices)):\n            self.stages[i].to(devices[i])",
        "for i, stage in enumerate(self.stages):\n"
        "            x = stage(x.to(self.devices[i]))\n        return x",
    ),
    network(
        MOVE, LOOP.replace("x.to(device)", "x.to(next(stage.parameters()).device)")
    ).replace(
        "for stage, device in zip(self.stages, self.devices)", "for stage in self.stages"
    ),
    order(HEAD, *FORWARD, *BACKWARD),
    order(
        HEAD,
        "tasks = {}",
        "for s in stages:",
        "    for i in parts:",
        "        tasks[s, i] = step.queue(forward_stage, s, i, tasks.get((s - 1, i)))",
        "for s in reversed(stages):",
        "    for i in parts:",
        "        after = tasks[s + 1, i] if s + 1 in stages else None",
        "        tasks[s, i] = step.queue(backward_stage, s, i, after)",
    ),
    order(HEAD, *FORWARD, *(line.replace("task", "before") for line in BACKWARD)),
]
WRONG = [
    (network("...", LOOP), "a `...` is left to fill in"),
    (network("pass", LOOP), "the device of conv1's 0.weight: 'cpu', expected 'virtual:0'"),
    (
        network(MOVE.replace("to(device)", "to(devices[0])"), LOOP),
        "the device of layer3.0's conv1.weight: 'virtual:0', expected 'virtual:1'",
    ),
    (
        network(MOVE, LOOP, "nn.ModuleList(cut(self, cuts, devices))"),
        "the names in the state_dict",
    ),
    (network(MOVE, LOOP.replace("x.to(device)", "x")), "on the same device"),
    (network(MOVE, LOOP + ".to(self.devices[0])"), "the device of the output: 'virtual:0'"),
    (
        network(MOVE, LOOP.replace("x.to(device)", "x.detach().to(device)")),
        "the gradient of conv1.weight: there is none",
    ),
    (order("..."), "a `...` is left to fill in"),
    (order(HEAD, *FORWARD), "1 micro-batch(es): the tasks: 1, expected 2"),
    (
        order(HEAD, *FORWARD, *BACKWARD).replace(
            "forward_stage, s, i, task", "forward_stage, s, i"
        ),
        "scalar outputs",
    ),
    (
        order(HEAD, *FORWARD, *BACKWARD).replace("reversed(stages)", "stages"),
        "scalar outputs",
    ),
    (
        order(HEAD, *FORWARD, *BACKWARD[1:]),
        "the order of device 0: 'F0 B0 F1 B1 F2 B2 F3 B3'",
    ),
    (
        order(HEAD, *FORWARD, "        task.result()", *BACKWARD),
        "does the loop wait for a result?",
    ),
]

test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG)
