"""Stages on ranks: activations go to rank + 1, and their gradients come back to rank - 1."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mgpu_tutorial.model_parallel.micro_batches import equal_parts
from mgpu_tutorial.pipelines.work import Work
from mgpu_tutorial.shared.losses import require_mean_of_parts
from mgpu_tutorial.shared.parameters import fingerprint_of, require_agreement

Group = dist.ProcessGroup | None


class Stage:
    """This rank's stage; `waiting[i]` keeps input and output until the backward of i."""

    def __init__(self, work: Work, micro: int, group: Group = None) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.is_last = rank == ranks - 1
        self.module, self.loss = work.module(rank), work.loss
        batch = work.batch(micro)
        self.parts = equal_parts(*batch, micro)
        shapes = [work.shape(index, micro) for index in range(ranks + 1)]
        self.input_shape, self.output_shape = shapes[rank : rank + 2]
        self.waiting: dict[int, tuple[Tensor, Tensor]] = {}
        self.losses: list[Tensor] = []
        require_alike(self, {"micro-batches": micro, "shapes": shapes}, batch, group)

    def gradients(self) -> list[Tensor | None]:
        """Each parameter's gradient; None for one that is frozen, as in one process."""
        gradients = (parameter.grad for parameter in self.module.parameters())
        return [None if g is None else g.cpu() for g in gradients]

    def require_shape(self, output: Tensor) -> None:
        """ValueError where rank + 1 makes room for another tensor than `output`."""
        room = torch.Size(self.output_shape), torch.get_default_dtype()
        if (output.shape, output.dtype) != room:
            raise ValueError(
                f"the output is {tuple(output.shape)} of {output.dtype}, and the next rank "
                f"expects {tuple(room[0])}, as work.shape says, of the default {room[1]}"
            )


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
        stage.losses.append(output_tensor.detach())
    else:
        stage.require_shape(output_tensor)
    stage.waiting[i] = input_tensor, output_tensor
    return output_tensor.detach().contiguous()  # a message is read row after row


def backward_step(stage: Stage, i: int, output_tensor_grad: Tensor | None) -> Tensor | None:
    """The backward of micro-batch i; returns the gradient of its input."""
    input_tensor, output_tensor = stage.waiting.pop(i)
    if output_tensor.requires_grad:  # not if the first stage has nothing to train
        output_tensor.backward(output_tensor_grad)
    return input_tensor.grad


def receive(shape: list[int], source: int, group: Group = None) -> Tensor | None:
    """A tensor from rank `source` of the group, or None where there is no such rank."""
    if not 0 <= source < dist.get_world_size(group):
        return None
    tensor = torch.empty(*shape)
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


def require_alike(stage: Stage, task: dict, batch: tuple, group: Group) -> None:
    """ValueError, on every rank, for stages that cannot work together.

    The ranks disagree, the loss is no mean, or a stage overwrites what it receives.
    """
    if dist.get_backend(group) == "fake":
        return  # a priced rank has no others
    dtype, bits = torch.get_default_dtype(), fingerprint_of(batch)
    require_agreement(task | {"dtype": dtype, "batch": bits}, group)
    require_mean_of_parts(stage.loss, task["shapes"][-1], stage.parts)
    first = stage.module
    while isinstance(first, nn.Sequential) and len(first):
        first = first[0]
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, getattr(first, "inplace", False) and str(first), group)
    for rank, name in enumerate(everyone[1:], 1):
        if name:
            raise ValueError(
                f"stage {rank} begins with {name}, which would overwrite what it receives, "
                "and rank - 1 waits for the gradient of that: take inplace=False there"
            )


def require_own_rank(rank: int, world_size: int, group: Group = None) -> None:
    """ValueError for the rank among all ranks where that in the group is meant."""
    own = dist.get_rank(group), dist.get_world_size(group)
    if (rank, world_size) != own:
        raise ValueError(
            f"this is rank {own[0]} of {own[1]} in the group, not {rank} of {world_size}: "
            "give the rank and the number of ranks within the group"
        )


def require_work(work: Work) -> None:
    """TypeError for what is no Work, such as a model that nobody has cut into stages."""
    if isinstance(work, type):
        raise TypeError(f"{work.__name__} is a class: give one Work that it makes")
    missing = [
        name for name in ("module", "shape", "batch", "loss") if not hasattr(work, name)
    ]
    if missing:
        raise TypeError(
            f"{type(work).__name__} has no {', '.join(missing)}: give a Work, which tells "
            "each rank its stage, the shapes, the batch and the loss"
        )


def run_gpipe(
    rank: int, world_size: int, work: Work, micro: int, group: Group = None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """All forwards, then all backwards; returns the losses and this rank's gradients.

    `rank` and `world_size` are those of the group, None for all ranks. As any backward it
    adds to gradients that are there: a second step zeroes them first. A BatchNorm sees
    micro-batches.
    """
    require_work(work)
    require_own_rank(rank, world_size, group)
    stage = Stage(work, micro, group)
    for i in range(micro):
        input_tensor = receive(stage.input_shape, rank - 1, group)
        send(forward_step(stage, i, input_tensor), rank + 1, group)
    for i in range(micro):
        output_tensor_grad = receive(stage.output_shape, rank + 1, group)
        send(backward_step(stage, i, output_tensor_grad), rank - 1, group)
    return stage.losses, stage.gradients()


def order_of_1f1b(rank: int, ranks: int, micro: int) -> list[str]:
    """What `rank` does, such as F0 F1 B0: warm-up, steady state, cool-down."""
    if not 0 <= rank < ranks or micro < 1:
        wanted = f"a rank from 0 to {ranks - 1} and one micro-batch or more"
        raise ValueError(f"expected {wanted}, got rank {rank} and {micro}")
    ahead = min(micro, ranks - 1 - rank)
    order = [f"F{i}" for i in range(ahead)]
    for i in range(ahead, micro):
        order += [f"F{i}", f"B{i - ahead}"]
    return order + [f"B{i}" for i in range(micro - ahead, micro)]


def require_orders(orders: list[list[str]], micro: int) -> None:
    """ValueError, on every rank, where one of the ranks' orders cannot be right."""
    names = {kind: [f"{kind}{i}" for i in range(micro)] for kind in "FB"}
    for rank, order in enumerate(orders):
        if sorted(order) != sorted(names["F"] + names["B"]) or any(
            order.index(f) > order.index(b) for f, b in zip(*names.values(), strict=True)
        ):
            raise ValueError(
                f"rank {rank} must do each of {micro} micro-batches forward and later "
                f"backward, once; its order is {' '.join(order)}"
            )
        for kind in "FB":
            own, first = ([n for n in o if n[0] == kind] for o in (order, orders[0]))
            if own != first:
                raise ValueError(
                    f"rank 0 does {' '.join(first)} and rank {rank} does {' '.join(own)}: "
                    f"messages have no number, so all must have one order"
                )


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
    require_orders(orders, micro)
    require_work(work)
    require_own_rank(rank, world_size, group)
    stage, requests = Stage(work, micro, group), []
    for name in orders[rank]:  # such as F0 F1 B0 B1
        i = int(name[1:])
        if name[0] == "F":
            input_tensor = receive(stage.input_shape, rank - 1, group)
            output_tensor = forward_step(stage, i, input_tensor)
            requests.append(send_on(output_tensor, rank + 1, group))
        else:
            output_tensor_grad = receive(stage.output_shape, rank + 1, group)
            gradient = backward_step(stage, i, output_tensor_grad)
            requests.append(send_on(gradient, rank - 1, group))
    # what was sent must have left before its tensor goes
    for request in filter(None, requests):
        request.wait()
    return stage.losses, stage.gradients()
