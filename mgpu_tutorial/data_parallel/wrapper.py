"""DataParallel taken apart: one process, one thread a device, everything through the first.

`scatter`, `replicate`, `parallel_apply` and `gather` are the four stages; `DataParallel`
calls them in this order, as `torch.nn.DataParallel` does
(https://docs.pytorch.org/docs/2.13/generated/torch.nn.DataParallel.html).
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.distributed_sgd import average_gradients
from mgpu_tutorial.lab import place, span
from mgpu_tutorial.lab.simulate.devices import as_device

Devices = Sequence[torch.device]


def scatter(value: Any, devices: Devices) -> list[Any]:
    """Device r gets piece r of every tensor in `value`, cut along dimension 0.

    Lists, tuples and dicts are taken apart; anything else goes to every device as it is.
    Each piece but the last has ceil(N / devices) rows, so there may be fewer pieces than
    devices: the list has one item for each device that is used.
    """
    if isinstance(value, torch.Tensor):
        pieces = value.chunk(len(devices))
        return [place(p, device) for p, device in zip(pieces, devices, strict=False)]
    if isinstance(value, dict) and value:
        columns = [scatter(v, devices) for v in value.values()]
        return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=False)]
    if isinstance(value, list | tuple) and value:
        columns = [scatter(v, devices) for v in value]
        return [type(value)(row) for row in zip(*columns, strict=False)]
    return [value for _ in devices]


def replicate(module: nn.Module, devices: Devices) -> list[nn.Module]:
    """Every device gets a copy of the module's parameters and buffers, from the first one.

    A copied parameter remembers its original: in backward all replicas' gradients add up
    on the original. The first replica shares the module's memory.
    """
    return [_replica(module, device, {}) for device in devices]


def _replica(module: nn.Module, device: torch.device, copies: dict) -> nn.Module:
    replica = object.__new__(type(module))
    replica.__dict__.update(module.__dict__)  # attributes and hooks: the same objects
    for kind in ("_parameters", "_buffers"):
        tensors = vars(module)[kind].items()
        vars(replica)[kind] = {name: _copy(t, device, copies) for name, t in tensors}
    replica._modules = {
        name: child and _replica(child, device, copies)
        for name, child in module._modules.items()
    }
    return replica


def _copy(tensor: torch.Tensor | None, device: torch.device, copies: dict) -> Any:
    if tensor is None:
        return None
    if id(tensor) not in copies:  # tied weights stay tied
        copy = place(tensor, device)
        original = copy is tensor and isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = copy.view_as(copy) if original else copy  # no parameter
    return copies[id(tensor)]


def parallel_apply(
    replicas: Sequence[nn.Module],
    inputs: Sequence[Any],
    devices: Devices,
    kwargs: Sequence[dict] | None = None,
) -> list[Any]:
    """Replica r works on input r, a tensor or a tuple, in its own thread; returns outputs.

    What a thread raises is raised here.
    """
    outputs: list[Any] = [None] * len(inputs)
    errors: list[Exception] = []
    grad = torch.is_grad_enabled()  # each thread begins with its own

    def run(r: int) -> None:
        arguments = inputs[r] if isinstance(inputs[r], tuple) else (inputs[r],)
        try:
            with torch.set_grad_enabled(grad), _current(devices[r]), span("3 forward"):
                outputs[r] = replicas[r](*arguments, **(kwargs[r] if kwargs else {}))
        except Exception as error:
            error.add_note(f"in replica {r} on {devices[r]}")
            errors.append(error)

    _run_threads(run, [str(device) for device in devices[: len(inputs)]])
    if errors:
        raise errors[0]
    return outputs


def _run_threads(run: Callable[[int], None], names: list[str]) -> None:
    threads = [
        threading.Thread(target=run, args=(r,), name=name) for r, name in enumerate(names)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _current(device: torch.device):
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def gather(outputs: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """All outputs go to `device` and are joined along dimension 0, in the devices' order.

    Scalars become a vector with one element a device. TypeError for anything but tensors.
    """
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            raise TypeError(
                f"gather joins tensors, got {type(output).__name__}: let forward return a "
                "tensor, or gather the parts one by one."
            )
    moved = [place(output, device) for output in outputs]
    return torch.cat(moved) if moved[0].dim() else torch.stack(moved)


class DataParallel(nn.Module):
    """The first device hands out pieces and copies, all compute, the first one collects.

    `device_ids` are the devices in order, the module's own first; the output goes to
    `output_device` (the first). ValueError for devices that repeat and for a batch that is
    empty or too small; RuntimeError for a module that is not on the first device.
    """

    def __init__(
        self, module: nn.Module, device_ids: Devices, output_device: Any = None
    ) -> None:
        super().__init__()
        self.devices = checked_devices(device_ids)
        self.output_device = as_device(output_device or self.devices[0])
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> torch.Tensor:
        check_home(self.module, self.devices[0])
        check_batch((inputs, kwargs), self.devices)
        with span("1 scatter"):
            inputs, kwargs = scatter(inputs, self.devices), scatter(kwargs, self.devices)
            used = self.devices[: min(len(inputs), len(kwargs))]
        if len(used) == 1:
            return self.module(*inputs[0], **kwargs[0])
        with span("2 replicate"):
            replicas = replicate(self.module, used)
        outputs = parallel_apply(replicas, inputs[: len(used)], used, kwargs)
        with span("4 gather"):
            return gather(outputs, self.output_device)


def checked_devices(device_ids: Devices) -> tuple[torch.device, ...]:
    """The devices named by `device_ids`; ValueError where there is none, or one twice."""
    if isinstance(device_ids, str | int) or not len(device_ids):
        raise ValueError(
            f"device_ids must be a list of devices, such as devices(2), got {device_ids!r}."
        )
    found = tuple(as_device(device) for device in device_ids)
    repeated = [str(d) for d in dict.fromkeys(found) if found.count(d) > 1]
    if repeated:
        raise ValueError(
            f"device_ids names {', '.join(repeated)} more than once: each replica needs a "
            "device of its own."
        )
    return found


def check_home(module: nn.Module, home: torch.device) -> None:
    """RuntimeError where a parameter or buffer of `module` is not on its home device."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device != home:
            raise RuntimeError(
                f"module must have its parameters and buffers on device {home} "
                f"(device_ids[0]) but found one of them on device: {tensor.device}. "
                f"Call module.to('{home}') first."
            )


def check_batch(value: Any, devices: Devices) -> None:
    """ValueError where the tensors in `value` have no common batch that fills the devices."""
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in _tensors(value)}
    if None in sizes:
        raise ValueError("a scalar tensor has no batch to cut: pass it as a number.")
    if len(sizes) > 1:
        raise ValueError(f"the inputs have different batch sizes: {sorted(sizes)}.")
    if sizes and 0 in sizes:
        raise ValueError("the batch is empty: give at least one sample a device.")
    if sizes and min(sizes) < len(devices):
        raise ValueError(
            f"a batch of {min(sizes)} cannot fill {len(devices)} devices: "
            "give at least one sample a device, or fewer devices."
        )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    nested = isinstance(value, dict | list | tuple)
    return [t for part in parts for t in _tensors(part)] if nested else []


# What the notebook runs


def eight_steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    devices: Devices,
) -> float:
    """The first device leads the others through one training step; returns the loss."""
    optimizer.zero_grad()
    with span("1 scatter"):
        pieces = scatter(images, devices)
        devices = devices[: len(pieces)]
    with span("2 replicate"):
        replicas = replicate(module, devices)
    outputs = parallel_apply(replicas, pieces, devices)  # step 3, in threads
    with span("4 gather"):
        output = gather(outputs, devices[0])
    with span("5 loss"):
        loss = cross_entropy(output, labels.to(devices[0]))
    with span("6+7 backward"):  # back to every replica, and summed on the module
        loss.backward()
    with span("8 update"):
        optimizer.step()
    return loss.item()


def process_each(
    rank: int, world_size: int, net: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> tuple[int, list[torch.Tensor]]:
    """Every rank takes its piece in a process of its own, and all average their gradients.

    The alternative: nothing passes through a first device. Returns process id and gradients.
    """
    device = torch.get_default_device()
    mine = slice(rank * len(images) // world_size, (rank + 1) * len(images) // world_size)
    output = net.to(device)(images[mine].to(device))
    cross_entropy(output, labels[mine].to(device)).backward()
    average_gradients(net)
    return os.getpid(), [parameter.grad for parameter in net.parameters()]
