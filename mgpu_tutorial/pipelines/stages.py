"""Stages on ranks: activations go to rank + 1, and their gradients come back to rank - 1."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from mgpu_tutorial.pipelines.work import Work


class Stage:
    """This rank's stage; `waiting[i]` keeps input and output until the backward of i."""

    def __init__(self, work: Work, micro: int) -> None:
        rank = dist.get_rank()
        self.is_last = rank == dist.get_world_size() - 1
        self.module, self.loss = work.module(rank), work.loss
        self.input_shape = work.shape(rank, micro)
        self.output_shape = work.shape(rank + 1, micro)
        inputs, targets = (whole.chunk(micro) for whole in work.batch(micro))
        self.parts = list(zip(inputs, targets, strict=True))
        self.waiting: dict[int, tuple[Tensor, Tensor]] = {}
        self.losses: list[float] = []

    def gradients(self) -> list[Tensor]:
        return [parameter.grad.cpu() for parameter in self.module.parameters()]


def forward_step(stage: Stage, i: int, input_tensor: Tensor | None) -> Tensor:
    """The forward of micro-batch i; on the last rank the output is the loss."""
    inputs, targets = stage.parts[i]
    if input_tensor is None:  # the first stage takes the batch
        input_tensor = inputs
    else:  # a new leaf: rank - 1 waits for its gradient
        input_tensor.requires_grad_()
    output_tensor = stage.module(input_tensor)
    if stage.is_last:
        output_tensor = stage.loss(output_tensor, targets) / len(stage.parts)
        stage.losses.append(output_tensor.item())
    stage.waiting[i] = input_tensor, output_tensor
    return output_tensor.detach()


def backward_step(stage: Stage, i: int, output_tensor_grad: Tensor | None) -> Tensor | None:
    """The backward of micro-batch i; returns the gradient of its input."""
    input_tensor, output_tensor = stage.waiting.pop(i)
    output_tensor.backward(output_tensor_grad)
    return input_tensor.grad


def receive(shape: list[int], source: int) -> Tensor | None:
    """A tensor from rank `source`, or None where there is no such rank."""
    if not 0 <= source < dist.get_world_size():
        return None
    tensor = torch.empty(*shape)
    dist.recv(tensor, source)
    return tensor


def send(tensor: Tensor | None, target: int) -> None:
    """The tensor to rank `target`, if there is one."""
    if 0 <= target < dist.get_world_size():
        dist.send(tensor, target)


def isend(tensor: Tensor, target: int) -> dist.Work | None:
    """Begin to send, and go on; the request that it returns must be waited for."""
    if 0 <= target < dist.get_world_size():
        return dist.isend(tensor, target)
    return None


def run_gpipe(
    rank: int, world_size: int, work: Work, micro: int
) -> tuple[list[float], list[Tensor]]:
    """All forwards, then all backwards; returns the losses and this rank's gradients."""
    stage = Stage(work, micro)
    for i in range(micro):
        input_tensor = receive(stage.input_shape, rank - 1)
        send(forward_step(stage, i, input_tensor), rank + 1)
    for i in range(micro):
        output_tensor_grad = receive(stage.output_shape, rank + 1)
        send(backward_step(stage, i, output_tensor_grad), rank - 1)
    return stage.losses, stage.gradients()


def order_of_1f1b(rank: int, ranks: int, micro: int) -> list[str]:
    """What `rank` does, such as F0 F1 B0: warm-up, steady state, cool-down."""
    ahead = min(micro, ranks - 1 - rank)
    order = [f"F{i}" for i in range(ahead)]
    for i in range(ahead, micro):
        order += [f"F{i}", f"B{i - ahead}"]
    return order + [f"B{i}" for i in range(micro - ahead, micro)]


def run_in_order(
    rank: int, world_size: int, work: Work, micro: int, order_of: Callable, send_on: Callable
) -> tuple[list[float], list[Tensor]]:
    """Each rank in its own order; returns what `run_gpipe` does."""
    stage, requests = Stage(work, micro), []
    for name in order_of(rank, world_size, micro):
        i = int(name[1:])
        if name[0] == "F":
            input_tensor = receive(stage.input_shape, rank - 1)
            requests.append(send_on(forward_step(stage, i, input_tensor), rank + 1))
        else:
            output_tensor_grad = receive(stage.output_shape, rank + 1)
            send(backward_step(stage, i, output_tensor_grad), rank - 1)
    for request in filter(None, requests):
        request.wait()
    return stage.losses, stage.gradients()
