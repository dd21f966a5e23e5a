"""What the split ResNet-50 and the order of its micro-batches must do."""

import functools
import threading
from collections.abc import Callable, Sequence
from itertools import product
from unittest import mock

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab.devices import devices
from mgpu_tutorial.lab.teach.build import Builder, expect
from mgpu_tutorial.model_parallel import micro_batches, split_resnet
from mgpu_tutorial.model_parallel.chart import in_order
from mgpu_tutorial.model_parallel.split_resnet import cut_units, units
from mgpu_tutorial.shared.vision import torchvision

CUTS = ["layer1.0", "layer3.0", "fc"]

# ModelParallelResNet50


def has_stages_on_devices(model_class: Callable) -> None:
    """keep each stage on its device, and nothing of it elsewhere"""
    for cuts in ["layer3.0"], CUTS:
        own = units(_new(model_class, cuts))
        for device, names in zip(devices(len(cuts) + 1), cut_units(cuts), strict=True):
            for name in names:
                for key, tensor in own[name].state_dict().items():
                    what = f"cut before {', '.join(cuts)}: the device of {name}'s {key}"
                    expect(str(tensor.device), str(device), what)


def computes_as_one(model_class: Callable) -> None:
    """give the whole network's output on the last device"""
    _, output, wanted = _outputs(model_class)
    expect(str(output.device), str(devices(4)[-1]), "the device of the output")
    expect(output.detach().cpu(), wanted.detach(), "the output", within=1e-9)


def goes_back_as_one(model_class: Callable) -> None:
    """leave all 161 gradients of the whole network"""
    split, *outputs = _outputs(model_class)
    _whole().zero_grad()
    for output in outputs:
        cross_entropy(output.cpu(), torch.arange(2)).backward()
    for name, wanted in _whole().named_parameters():
        found = split.get_parameter(name).grad
        assert found is not None, f"the gradient of {name}: there is none"
        within = 1e-9 * wanted.grad.abs().max().item()
        expect(found.cpu(), wanted.grad, f"the gradient of {name}", within)


@functools.cache
def _whole() -> nn.Module:
    return torchvision.models.resnet50(num_classes=10).double()


def _outputs(model_class: Callable) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The network split into four, with the weights of the whole one, and both outputs."""
    split, state = _new(model_class, CUTS).double(), _whole().state_dict()
    expect(sorted(split.state_dict()), sorted(state), "the names in the state_dict")
    split.load_state_dict(state)
    images = torch.randn(2, 3, 40, 40, dtype=torch.float64)
    return split, split(images.to(devices(4)[0])), _whole()(images)


def _new(model_class: Callable, cuts: Sequence[str]) -> nn.Module:
    """A split network of ten classes; to draw its weights would take the most time."""
    drawing = ("kaiming_normal_", "kaiming_uniform_")
    with mock.patch.multiple(nn.init, **dict.fromkeys(drawing, lambda t, **_: t)):
        return model_class(devices(len(cuts) + 1), num_classes=10, cuts=cuts)


# forward_backward

IMAGES = torch.linspace(-2, 3, 48, dtype=torch.float64).view(12, 4)
LABELS = torch.arange(12) % 4


class Stages(nn.Module):
    """Linear stages on the CPU in float64."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(nn.Linear(4, 4) for _ in range(count)).double()
        self.devices = [torch.device("cpu")] * count


def _stepped(
    forward_backward: Callable, count: int, micro: int, watch: Callable = lambda s: None
) -> micro_batches.MicroBatchStep:
    """A step of `count` stages; `watch(s)` is called before each forward of stage s."""
    model = Stages(count)
    for s, stage in enumerate(model.stages):
        stage.register_forward_pre_hook(lambda *_, s=s: watch(s))
    step = micro_batches.MicroBatchStep(model, IMAGES, LABELS, micro)
    try:
        forward_backward(step)
    finally:
        step.finish()
    return step


def has_the_gradients_of_one(forward_backward: Callable) -> None:
    """leave the gradients of one process, for 1 to 4 stages and micro-batches"""
    for count, micro in product(range(1, 5), repeat=2):
        one = Stages(count)
        cross_entropy(nn.Sequential(*one.stages)(IMAGES), LABELS).backward()
        step = _stepped(forward_backward, count, micro)
        what = f"{count} stage(s), {micro} micro-batch(es):"
        expect(len(step.tasks), 2 * count * micro, f"{what} the tasks")
        for s, (found, wanted) in enumerate(zip(step.model.stages, one.stages, strict=True)):
            gradients = found.weight.grad, wanted.weight.grad
            expect(*gradients, f"{what} stage {s}'s gradient", within=1e-12)


def goes_forward_first(forward_backward: Callable) -> None:
    """let each device do all its forwards before its first backward, in order"""
    step = _stepped(forward_backward, 3, 4)
    for row in range(3):
        order = " ".join(in_order(step.tasks, row))
        expect(order, "F0 F1 F2 F3 B0 B1 B2 B3", f"the order of device {row}")


def lets_devices_work_at_once(forward_backward: Callable) -> None:
    """let device 0 begin its second forward while device 1 is in its first"""
    begun, met, calls = threading.Event(), [], []

    def watch(s: int) -> None:
        calls.append(s)
        if s == 0 and calls.count(0) == 2:
            begun.set()
        elif s == 1 and calls.count(1) == 1:
            met.append(begun.wait(timeout=2))

    _stepped(forward_backward, 2, 4, watch)
    assert met == [True], "it begins only afterwards: does the loop wait for a result?"


build = Builder(
    "model_parallel",
    {
        split_resnet.ModelParallelResNet50: [
            has_stages_on_devices,
            computes_as_one,
            goes_back_as_one,
        ],
        micro_batches.forward_backward: [
            has_the_gradients_of_one,
            goes_forward_first,
            lets_devices_work_at_once,
        ],
    },
)
