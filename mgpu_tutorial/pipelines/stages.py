"""Stages on ranks: activations go to rank + 1, and their gradients come back to rank - 1."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mgpu_tutorial.model_parallel.micro_batches import equal_parts, labels_in
from mgpu_tutorial.pipelines.work import Work, require_untied

Group = dist.ProcessGroup | None


class Room(NamedTuple):
    """What both ends of a message know of it beforehand."""

    shape: list[int]
    dtype: torch.dtype
    device: torch.device


class Stage:
    """This rank's stage; `waiting[i]` keeps input and output until the backward of i."""

    def __init__(self, work: Work, micro: int, group: Group = None) -> None:
        if not isinstance(work, Work):
            kind, what = type(work).__name__, "loss, module, shape and batch"
            raise TypeError(f"{kind} is no Work, which has {what}")
        require_untied(getattr(work, "stages", []))
        rank = dist.get_rank(group)
        self.is_last = rank == dist.get_world_size(group) - 1
        self.module, self.loss = work.module(rank), work.loss
        inputs, targets = work.batch(micro)
        self.parts = equal_parts(inputs, targets, micro)
        self.labels = labels_in(targets)
        kind = kind_of_messages(work, self.module)
        self.input_room = Room(work.shape(rank, micro), *kind)
        self.output_room = Room(work.shape(rank + 1, micro), *kind)
        self.waiting: dict[int, tuple[Tensor, Tensor]] = {}
        self.losses: list[Tensor] = []

    def gradients(self) -> list[Tensor | None]:
        """Each parameter's gradient; None for one that is frozen, as in one process."""
        gradients = (parameter.grad for parameter in self.module.parameters())
        return [None if g is None else g.cpu() for g in gradients]


def kind_of_messages(work: Work, module: nn.Module) -> tuple[torch.dtype, torch.device]:
    """Dtype and device; ValueError on a rank whose parameters all have another dtype."""
    parameters = [*module.parameters()] or [torch.empty(0)]
    default = torch.get_default_dtype()
    if not hasattr(work, "dtype") and default not in {p.dtype for p in parameters}:
        found = parameters[0].dtype
        raise ValueError(f"messages of {default}, parameters of {found}: set `work.dtype`")
    return getattr(work, "dtype", default), parameters[0].device


def forward_step(stage: Stage, i: int, input_tensor: Tensor | None) -> Tensor:
    """The forward of micro-batch i; on the last rank the output is the loss."""
    inputs, targets = stage.parts[i]
    if input_tensor is None:  # the first stage takes the batch
        input_tensor = inputs
    else:  # a new leaf: rank - 1 waits for its gradient
        input_tensor.requires_grad_()
    output_tensor = stage.module(input_tensor)
    if stage.is_last:
        loss = stage.loss(output_tensor, targets)
        output_tensor = loss * labels_in(targets) / stage.labels
        stage.losses.append(output_tensor.detach())
    else:
        require_room(output_tensor, stage.output_room)
    stage.waiting[i] = input_tensor, output_tensor
    return output_tensor.detach().contiguous()  # a message is read row after row


def require_room(output: Tensor, room: Room) -> None:
    """ValueError for an output that doesn't fit: gloo takes fewer bytes too, in silence."""
    if (output.shape, output.dtype) != (torch.Size(room.shape), room.dtype):
        raise ValueError(
            f"the next rank expects {room.shape} of {room.dtype}, and the output "
            f"is {[*output.shape]} of {output.dtype}"
        )


def backward_step(stage: Stage, i: int, output_tensor_grad: Tensor | None) -> Tensor | None:
    """The backward of micro-batch i; returns the gradient of its input."""
    input_tensor, output_tensor = stage.waiting.pop(i)
    if output_tensor.requires_grad:  # not if the first stage has nothing to train
        output_tensor.backward(output_tensor_grad)
    return input_tensor.grad


def receive(room: Room, source: int, group: Group = None) -> Tensor | None:
    """A tensor from rank `source` of the group, or None where there is no such rank."""
    if not 0 <= source < dist.get_world_size(group):
        return None
    tensor = torch.empty(room.shape, dtype=room.dtype, device=room.device)
    dist.recv(tensor, group=group, group_src=source)
    return tensor


def send(tensor: Tensor | None, target: int, group: Group = None) -> None:
    """The tensor to rank `target` of the group, if there is one; returns once it has it.

    So two ranks that send to each other before they receive wait forever: see `isend`.
    """
    if 0 <= target < dist.get_world_size(group):
        dist.send(tensor, group=group, group_dst=target)


def isend(tensor: Tensor, target: int, group: Group = None) -> dist.Work | None:
    """Begin to send, and go on; the request that it returns must be waited for."""
    if 0 <= target < dist.get_world_size(group):
        return dist.isend(tensor, group=group, group_dst=target)
    return None


def run_gpipe(
    rank: int, world_size: int, work: Work, micro: int, group: Group = None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """All forwards, then all backwards; returns the losses and this rank's gradients.

    `rank` and `world_size` are those in the group, None for all ranks. The loss is the mean
    of its samples. Not general: `prove` it on your model.
    """
    stage = Stage(work, micro, group)
    for i in range(micro):
        input_tensor = receive(stage.input_room, rank - 1, group)
        send(forward_step(stage, i, input_tensor), rank + 1, group)
    for i in range(micro):
        output_tensor_grad = receive(stage.output_room, rank + 1, group)
        send(backward_step(stage, i, output_tensor_grad), rank - 1, group)
    return stage.losses, stage.gradients()


def order_of_1f1b(rank: int, ranks: int, micro: int) -> list[str]:
    """What `rank` does, such as F0 F1 B0: warm-up, steady state, cool-down."""
    ahead = min(micro, ranks - 1 - rank)
    order = [f"F{i}" for i in range(ahead)]
    for i in range(ahead, micro):
        order += [f"F{i}", f"B{i - ahead}"]
    order += [f"B{i}" for i in range(micro - ahead, micro)]
    return order


def require_one_order(orders: list[list[str]]) -> None:
    """ValueError where two ranks do the forwards, or the backwards, in different orders."""
    for kind in "FB":
        first, *others = ([n for n in order if n[0] == kind] for order in orders)
        for rank, other in enumerate(others, 1):
            if other != first:
                own, theirs = " ".join(other), " ".join(first)
                raise ValueError(f"rank 0 does {theirs} and rank {rank} does {own}")


def run_in_order(
    rank: int,
    world_size: int,
    work: Work,
    micro: int,
    order_of: Callable,
    send_on: Callable,
    group: Group = None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Each rank in its own order; returns what `run_gpipe` does.

    `send_on` must go on before its message is received, as `isend` does. With `send` 1F1B
    hangs: in its steady state two neighbours send to each other.
    """
    orders = [order_of(r, world_size, micro) for r in range(world_size)]
    require_one_order(orders)  # messages have no number
    stage, requests = Stage(work, micro, group), []
    for name in orders[rank]:  # such as F0 F1 B0 B1
        i = int(name[1:])
        if name[0] == "F":
            input_tensor = receive(stage.input_room, rank - 1, group)
            output_tensor = forward_step(stage, i, input_tensor)
            requests.append(send_on(output_tensor, rank + 1, group))
        else:
            output_tensor_grad = receive(stage.output_room, rank + 1, group)
            gradient = backward_step(stage, i, output_tensor_grad)
            requests.append(send_on(gradient, rank - 1, group))
    # what was sent must have left before its tensor goes
    for request in filter(None, requests):
        request.wait()
    return stage.losses, stage.gradients()
