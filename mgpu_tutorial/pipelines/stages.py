"""Stages on ranks: activations go to rank + 1, and their gradients come back to rank - 1."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from mgpu_tutorial.lab import span
from mgpu_tutorial.model_parallel.micro_batches import split
from mgpu_tutorial.pipelines.work import Work

Gradients = list[torch.Tensor]
Exchange = Callable[["Stage", torch.Tensor], torch.Tensor | None]


class Stage:
    """This rank's stage; `waiting[i]` keeps input and output until the backward of i."""

    def __init__(self, work: Work, micro: int) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.is_last = self.rank == self.ranks - 1
        self.module, self.loss = work.module(self.rank, self.ranks), work.loss
        self.input_shape = work.shape(self.rank, self.ranks, micro)
        self.output_shape = work.shape(self.rank + 1, self.ranks, micro)
        self.parts = split(*work.batch(micro), micro)
        self.waiting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.losses: list[float] = []
        agree_on_shapes(self)

    def gradients(self) -> Gradients:
        return [parameter.grad.cpu() for parameter in self.module.parameters()]


def agree_on_shapes(stage: Stage) -> None:
    """ValueError on all ranks if one of them sends what the next does not expect."""
    shapes = [None] * stage.ranks
    dist.all_gather_object(shapes, (stage.input_shape, stage.output_shape))
    for rank in range(1, stage.ranks):
        sends, expects = shapes[rank - 1][1], shapes[rank][0]
        if sends != expects:
            raise ValueError(
                f"stage {rank - 1} sends {sends}, and stage {rank} expects {expects}: "
                "give every rank the same cuts, batch and image size"
            )


# What a stage computes


def forward_step(stage: Stage, i: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
    """The forward of micro-batch i; on the last rank the output is the loss."""
    inputs, targets = stage.parts[i]
    if input_tensor is None:  # the first stage takes the batch
        input_tensor = inputs
    with span(f"F {stage.rank} {i}"):
        output_tensor = stage.module(input_tensor)
        if stage.is_last:
            output_tensor = stage.loss(output_tensor, targets) / len(stage.parts)
            stage.losses.append(output_tensor.item())
    stage.waiting[i] = input_tensor, output_tensor
    return output_tensor.detach()


def backward_step(
    stage: Stage, i: int, output_tensor_grad: torch.Tensor | None
) -> torch.Tensor | None:
    """The backward of micro-batch i; returns the gradient of its input."""
    input_tensor, output_tensor = stage.waiting.pop(i)
    with span(f"B {stage.rank} {i}"):
        output_tensor.backward(output_tensor_grad)
    return input_tensor.grad


# What it sends and receives


def recv_forward(stage: Stage) -> torch.Tensor | None:
    """The input from rank - 1; None on the first rank."""
    if stage.rank == 0:
        return None
    input_tensor = torch.empty(*stage.input_shape)
    dist.recv(input_tensor, stage.rank - 1)
    return input_tensor.requires_grad_()  # a new leaf: rank - 1 waits for its gradient


def send_forward(stage: Stage, output_tensor: torch.Tensor) -> None:
    """The output to rank + 1, if there is one."""
    if not stage.is_last:
        dist.send(output_tensor, stage.rank + 1)


def recv_backward(stage: Stage) -> torch.Tensor | None:
    """The gradient of the output from rank + 1; None on the last rank."""
    if stage.is_last:
        return None
    output_tensor_grad = torch.empty(*stage.output_shape)
    dist.recv(output_tensor_grad, stage.rank + 1)
    return output_tensor_grad


def send_backward(stage: Stage, input_tensor_grad: torch.Tensor | None) -> None:
    """The gradient of the input to rank - 1, if there is one."""
    if stage.rank > 0:
        dist.send(input_tensor_grad, stage.rank - 1)


# In which order


def run_gpipe(
    rank: int, world_size: int, work: Work, micro: int
) -> tuple[list[float], Gradients]:
    """All forwards, then all backwards; returns the losses and this rank's gradients."""
    stage = Stage(work, micro)
    for i in range(micro):
        output_tensor = forward_step(stage, i, recv_forward(stage))
        send_forward(stage, output_tensor)
    for i in range(micro):
        input_tensor_grad = backward_step(stage, i, recv_backward(stage))
        send_backward(stage, input_tensor_grad)
    return stage.losses, stage.gradients()


def order_of_1f1b(rank: int, ranks: int, micro: int) -> list[str]:
    """What `rank` does, such as F0 F1 B0: warm-up, steady state, cool-down."""
    ahead = min(micro, ranks - 1 - rank)
    order = [f"F{i}" for i in range(ahead)]
    for i in range(micro):
        order += [f"F{ahead + i}"] * (ahead + i < micro) + [f"B{i}"]
    return order


def send_forward_recv_backward(
    stage: Stage, output_tensor: torch.Tensor
) -> torch.Tensor | None:
    """Both at once: rank + 1 may be sending its gradient just now."""
    if stage.is_last:
        return None
    sending = dist.isend(output_tensor, stage.rank + 1)
    output_tensor_grad = recv_backward(stage)
    sending.wait()
    return output_tensor_grad


def send_and_then_receive(stage: Stage, output_tensor: torch.Tensor) -> torch.Tensor | None:
    """One after the other: a mistake."""
    send_forward(stage, output_tensor)
    return recv_backward(stage)


def run_1f1b(
    rank: int,
    world_size: int,
    work: Work,
    micro: int,
    exchange: Exchange = send_forward_recv_backward,
) -> tuple[list[float], Gradients]:
    """One forward, one backward, as soon as there is one; returns what `run_gpipe` does."""
    stage = Stage(work, micro)
    ahead = min(micro, world_size - 1 - rank)
    # warm-up: forwards, until the last rank has its first micro-batch
    for i in range(ahead):
        output_tensor = forward_step(stage, i, recv_forward(stage))
        send_forward(stage, output_tensor)
    # steady state: one forward, one backward
    for i in range(ahead, micro):
        output_tensor = forward_step(stage, i, recv_forward(stage))
        output_tensor_grad = exchange(stage, output_tensor)
        input_tensor_grad = backward_step(stage, i - ahead, output_tensor_grad)
        send_backward(stage, input_tensor_grad)
    # cool-down: the backwards that are left
    for i in range(micro - ahead, micro):
        input_tensor_grad = backward_step(stage, i, recv_backward(stage))
        send_backward(stage, input_tensor_grad)
    return stage.losses, stage.gradients()
