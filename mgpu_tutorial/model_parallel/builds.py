"""What the split ResNet-50 and the order of its micro-batches must do."""

import threading
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab.devices import devices
from mgpu_tutorial.lab.teach.build import Builder, expect
from mgpu_tutorial.model_parallel import micro_batches, split_resnet
from mgpu_tutorial.model_parallel.resnet_cuts import cut_units, units
from mgpu_tutorial.model_parallel.tasks import in_order
from mgpu_tutorial.shared.vision import torchvision

CUTS = ["layer1.0", "layer3.0", "fc"]

# ModelParallelResNet50


def has_stages_on_devices(model_class: Callable) -> None:
    """keep each stage on its device, and nothing of it elsewhere"""
    for cuts in ["layer3.0"], CUTS:
        several = devices(len(cuts) + 1)
        own = units(_new(model_class, cuts))
        for s, names in enumerate(cut_units(cuts)):
            for name in names:
                for key, tensor in own[name].state_dict().items():
                    what = f"cut before {', '.join(cuts)}: the device of {name}'s {key}"
                    expect(str(tensor.device), str(several[s]), what)


def keeps_names(model_class: Callable) -> None:
    """have the names and shapes of torchvision's ResNet-50"""
    with torch.device("meta"):
        whole = torchvision.models.resnet50(num_classes=10).state_dict()
    found = _new(model_class, ["layer3.0"]).state_dict()
    expect(sorted(found), sorted(whole), "the names in the state_dict")
    for name, tensor in found.items():
        expect(list(tensor.shape), list(whole[name].shape), f"the shape of {name}")


def computes_as_one(model_class: Callable) -> None:
    """give the whole network's output on the last device"""
    _, _, output, wanted = _both(model_class, CUTS)
    expect(str(output.device), str(devices(4)[-1]), "the device of the output")
    expect(output.detach().cpu(), wanted.detach(), "the output", within=1e-9)


def goes_back_as_one(model_class: Callable) -> None:
    """leave all 161 gradients of the whole network"""
    split, whole, *outputs = _both(model_class, ["layer3.0"])
    for output in outputs:
        cross_entropy(output.cpu(), torch.arange(2)).backward()
    for name, wanted in whole.named_parameters():
        found = split.get_parameter(name).grad
        assert found is not None, f"the gradient of {name}: there is none"
        within = 1e-9 * wanted.grad.abs().max().item()
        expect(found.cpu(), wanted.grad, f"the gradient of {name}", within)


def _both(model_class: Callable, cuts: list[str]):
    """The split network and the whole one in float64, and what they put out."""
    whole = torchvision.models.resnet50(num_classes=10).double()
    split = _new(model_class, cuts).double()
    split.load_state_dict(whole.state_dict())
    images = torch.randn(2, 3, 40, 40, dtype=torch.float64)
    return split, whole, split(images.to(devices(2)[0])), whole(images)


def _new(model_class: Callable, cuts: Sequence[str]) -> nn.Module:
    """A split network of ten classes; to draw its weights would take the most time."""
    drawing = ("kaiming_normal_", "kaiming_uniform_")
    with mock.patch.multiple(nn.init, **dict.fromkeys(drawing, lambda t, **_: t)):
        return model_class(devices(len(cuts) + 1), num_classes=10, cuts=cuts)


# forward_backward


class Stages(nn.Module):
    """Linear stages on the CPU in float64; `first` is called before each forward of one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(nn.Linear(4, 4) for _ in range(count)).double()
        self.devices = [torch.device("cpu")] * count


def _stepped(
    forward_backward: Callable, count: int, micro: int, watch: Callable | None = None
) -> micro_batches.MicroBatchStep:
    model = Stages(count)
    if watch:
        for s, stage in enumerate(model.stages):
            stage.register_forward_pre_hook(lambda *_, s=s: watch(s))
    images = torch.linspace(-2, 3, 48, dtype=torch.float64).view(12, 4)
    step = micro_batches.MicroBatchStep(model, images, torch.arange(12) % 4, micro)
    try:
        forward_backward(step)
    finally:
        for thread in step.threads:
            thread.shutdown()
    step.finish()
    return step


def has_the_gradients_of_one(forward_backward: Callable) -> None:
    """leave the gradients of one process, for 1 to 4 stages and micro-batches"""
    for count in range(1, 5):
        one = Stages(count)
        images = torch.linspace(-2, 3, 48, dtype=torch.float64).view(12, 4)
        cross_entropy(nn.Sequential(*one.stages)(images), torch.arange(12) % 4).backward()
        for micro in range(1, 5):
            step = _stepped(forward_backward, count, micro)
            what = f"{count} stage(s), {micro} micro-batch(es): the tasks"
            expect(len(step.tasks), 2 * count * micro, what)
            for s, (stage, other) in enumerate(
                zip(step.model.stages, one.stages, strict=True)
            ):
                what = f"{count} stage(s), {micro} micro-batch(es): stage {s}'s gradient"
                expect(stage.weight.grad, other.weight.grad, what, within=1e-12)


def goes_forward_first(forward_backward: Callable) -> None:
    """let each device do all its forwards before its first backward, in order"""
    step = _stepped(forward_backward, 3, 4)
    for row in range(3):
        wanted = " ".join(f"{kind}{i}" for kind in "FB" for i in range(4))
        expect(" ".join(in_order(step.tasks, row)), wanted, f"the order of device {row}")


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
            keeps_names,
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
