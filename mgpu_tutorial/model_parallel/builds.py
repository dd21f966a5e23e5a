"""What the split ResNet-50 and the order of its micro-batches must do."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import product
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab.devices import devices
from mgpu_tutorial.lab.teach.build import Builder, expect
from mgpu_tutorial.model_parallel.figures import in_order
from mgpu_tutorial.model_parallel.micro_batches import (
    MicroBatchStep,
    backward_stage,
    forward_backward,
    forward_stage,
    take_step,
)
from mgpu_tutorial.model_parallel.split_resnet import ModelParallelResNet50, split, units
from mgpu_tutorial.shared.vision import torchvision

CUTS = ["layer1.0", "layer3.0", "fc"]

# ModelParallelResNet50


def _split(model_class: Callable) -> nn.Module:
    """Four stages of ten classes. They are not kept: with gradients they take 0.4 GB."""
    return model_class(devices(4), num_classes=10, cuts=CUTS).double()


def has_stages_on_devices(model_class: Callable) -> None:
    """keep each stage on its device, and nothing of it elsewhere"""
    stages = split(units(_split(model_class)), CUTS)
    for device, stage in zip(devices(4), stages, strict=True):
        for name, unit in stage.items():
            for key, tensor in unit.state_dict().items():
                expect(str(tensor.device), str(device), f"the device of {name}'s {key}")


def refuses_other_numbers_of_devices(model_class: Callable) -> None:
    """raise an error if there are not as many devices as stages, one more or one less"""
    for count in 1, 3:
        try:
            with torch.device("meta") as meta:  # draws no weights, computes nothing
                model_class([meta] * count, num_classes=10)(torch.empty(1, 3, 40, 40))
        except (ValueError, IndexError) as error:
            del error
        else:
            raise AssertionError(f"2 stages and {count} device(s): no error")


def computes_as_one_network(model_class: Callable) -> None:
    """give the whole network's output on the last device, and leave all 161 gradients"""
    network = _split(model_class)
    whole = torchvision.models.resnet50(num_classes=10).double()
    names = (sorted(model.state_dict()) for model in (network, whole))
    expect(*names, "the names in the state_dict")
    network.load_state_dict(whole.state_dict())
    images = torch.randn(2, 3, 40, 40, dtype=torch.float64)
    output, wanted = network(images.to(devices(4)[0])), whole(images)
    expect(str(output.device), str(devices(4)[-1]), "the device of the output")
    expect(output.detach().cpu(), wanted.detach(), "the output", within=1e-9)
    for model in network, whole:
        model.zero_grad()
    for logits in output, wanted:
        cross_entropy(logits.cpu(), torch.arange(2)).backward()
    for name, parameter in whole.named_parameters():
        found, one = network.get_parameter(name).grad, parameter.grad
        assert found is not None, f"the gradient of {name}: there is none"
        expect(found.cpu(), one, f"the gradient of {name}", 1e-9 * one.abs().max().item())


# forward_backward

IMAGES = torch.linspace(-2, 3, 48, dtype=torch.float64).view(12, 4)
LABELS = torch.arange(12) % 4


def _linear_stages(count: int) -> SimpleNamespace:
    torch.manual_seed(0)
    stages = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(count)]
    return SimpleNamespace(stages=stages, devices=[torch.device("cpu")] * count)


def _asked(forward_backward: Callable, what: str) -> Callable:
    """The same order, and AssertionError at the first call that waits for a wrong one."""

    def said(made: tuple | None) -> str:
        return "the {} of stage {}, micro-batch {}".format(*made) if made else "nothing"

    def ask(step: MicroBatchStep) -> None:
        queue, names = step.queue, {}

        def asked(task: Callable, s: int, i: int, after: Future | None = None) -> Future:
            kind = "forward" if task is forward_stage else "backward"
            neighbour = s - 1 if kind == "forward" else s + 1
            is_inside = neighbour in range(len(step.model.stages))
            wanted = (kind, neighbour, i) if is_inside else None
            found = names.get(after)
            if not wanted and found and found[:2] == ("backward", 0):
                found = None  # late, but right: it hands on nothing
            if task in (forward_stage, backward_stage) and found != wanted:
                this = said((kind, s, i))
                raise AssertionError(
                    f"{what} {this}, waits for {said(found)}, expected {said(wanted)}"
                )
            future = queue(task, s, i, after)
            names[future] = kind, s, i
            return future

        step.queue = asked
        forward_backward(step)

    return ask


def computes_as_one_in_order(forward_backward: Callable) -> None:
    """do all forwards of each device, then all backwards, and leave the gradients of one"""
    for count, micro in product(range(1, 5), repeat=2):
        one, several = _linear_stages(count).stages, _linear_stages(count)
        cross_entropy(nn.Sequential(*one)(IMAGES), LABELS).backward()
        what = f"{count} stage(s), {micro} micro-batch(es):"
        tasks = take_step(several, IMAGES, LABELS, micro, _asked(forward_backward, what))
        forwards, backwards = ([f"{kind}{i}" for i in range(micro)] for kind in "FB")
        if in_order(tasks, 0)[micro:] == backwards[::-1]:  # as the paper draws GPipe
            backwards.reverse()
        for row in range(count):
            order = " ".join(in_order(tasks, row))
            wanted = " ".join([*forwards, *backwards])
            expect(order, wanted, f"{what} the order of device {row}")
        gradients = ([s.weight.grad for s in stages] for stages in (several.stages, one))
        expect(*gradients, f"{what} the stages' gradients", within=1e-12)


def works_at_once(forward_backward: Callable) -> None:
    """let device 0 begin its second forward while device 1 is in its first"""
    model, second, forwards, met = _linear_stages(2), threading.Event(), [], []

    def before_device_0(*_: object) -> None:
        forwards.append(0)
        if len(forwards) == 2:
            second.set()

    model.stages[0].register_forward_pre_hook(before_device_0)
    model.stages[1].register_forward_pre_hook(lambda *_: met.append(second.wait(timeout=2)))
    take_step(model, IMAGES, LABELS, 4, forward_backward)
    assert met[0], "it begins only afterwards: does the loop wait for a result?"


build = Builder(
    "model_parallel",
    {
        ModelParallelResNet50: [
            has_stages_on_devices,
            computes_as_one_network,
            refuses_other_numbers_of_devices,
        ],
        forward_backward: [computes_as_one_in_order, works_at_once],
    },
)
