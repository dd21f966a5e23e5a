"""The four stages of a forward on several devices, and the wrapper that they make up.

`scatter`, `replicate`, `parallel_apply` and `gather` are the four stages; `DataParallel`
calls them in this order, as `torch.nn.DataParallel` does
(https://docs.pytorch.org/docs/2.13/generated/torch.nn.DataParallel.html).
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from mgpu_tutorial.lab import borrowed, place
from mgpu_tutorial.lab.simulate.devices import as_device

Devices = Sequence[torch.device]
Copies = dict[int, torch.Tensor]  # the copy of each tensor on one device, by the tensor's id


def scatter(value: Any, devices: Devices) -> list[Any]:
    """Device r gets piece r of every tensor in `value`, cut along dimension 0.

    Returns one item for each device that gets a piece.
    """
    if isinstance(value, torch.Tensor):
        pieces = value.chunk(len(devices))
        return [place(p, device) for p, device in zip(pieces, devices, strict=False)]
    return scatter_parts(value, devices)


def scatter_parts(value: Any, devices: Devices) -> list[Any]:
    """Lists, tuples and dicts are taken apart; the rest goes to every device as it is."""
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
    return [replica_of(module, device, {}) for device in devices]


def replica_of(module: nn.Module, device: torch.device, copies: Copies) -> nn.Module:
    """A new module with the attributes and hooks of `module`, and copies of its tensors.

    No constructor runs: attributes are the same objects, only parameters, buffers and
    submodules are the replica's own. In PyTorch `nn.Module._replicate_for_data_parallel`
    makes the new object. `copies` are the tensors copied so far.
    """
    replica = module.__new__(type(module))
    replica.__dict__ = module.__dict__.copy()
    parameters, buffers, children = borrowed.contents_of(module)
    borrowed.set_contents(
        replica,
        {name: copy_for_replica(p, device, copies) for name, p in parameters.items()},
        {name: copy_for_replica(b, device, copies) for name, b in buffers.items()},
        {
            name: None if child is None else replica_of(child, device, copies)
            for name, child in children.items()
        },
    )
    return replica


def copy_for_replica(
    tensor: torch.Tensor | None, device: torch.device, copies: Copies
) -> torch.Tensor | None:
    """A copy of `tensor` on `device`, through which its gradient finds the original.

    On the tensor's own device nothing is copied: a parameter becomes a view of itself, which
    is the result of an operation too, and a buffer stays what it is.
    """
    if tensor is None:
        return None
    if id(tensor) not in copies:  # tied weights stay tied
        if tensor.device != device:
            copies[id(tensor)] = place(tensor, device)
        elif isinstance(tensor, nn.Parameter):
            copies[id(tensor)] = tensor.view_as(tensor)
        else:
            copies[id(tensor)] = tensor
    return copies[id(tensor)]


def parallel_apply(
    replicas: Sequence[nn.Module],
    inputs: Sequence[Any],
    devices: Devices,
    kwargs: Sequence[dict] | None = None,
) -> list[Any]:
    """Replica r works on input r, a tensor or a tuple, in its own thread; returns outputs."""
    outputs: list[Any] = [None] * len(inputs)
    grad = torch.is_grad_enabled()  # each thread begins with its own

    def run(r: int) -> None:
        arguments = inputs[r] if isinstance(inputs[r], tuple) else (inputs[r],)
        with torch.set_grad_enabled(grad), current_device(devices[r]):
            outputs[r] = replicas[r](*arguments, **(kwargs[r] if kwargs else {}))

    run_threads(run, [str(device) for device in devices[: len(inputs)]])
    return outputs


def run_threads(run: Callable[[int], None], names: Sequence[str]) -> None:
    """Call `run(r)` in a thread of its own for each of the `names`; wait for all of them.

    What a thread raises is raised here.
    """
    errors: list[Exception] = []

    def caught(r: int) -> None:
        try:
            run(r)
        except Exception as error:
            error.add_note(f"in replica {r} on {names[r]}")
            errors.append(error)

    threads = [
        threading.Thread(target=caught, args=(r,), name=name) for r, name in enumerate(names)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def current_device(device: torch.device) -> AbstractContextManager:
    """A block in which `device` is the current one, where there is such a thing: on GPUs."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def gather(outputs: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """All outputs go to `device` and are joined along dimension 0, in the devices' order.

    Scalars become a vector with one element per device. TypeError for anything but tensors.
    """
    check_tensors(outputs)
    moved = [place(output, device) for output in outputs]
    return torch.cat(moved) if moved[0].dim() else torch.stack(moved)


class DataParallel(nn.Module):
    """The first device hands out pieces and copies, all compute, the first one collects."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Devices,
        output_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.devices = checked_devices(device_ids)
        self.output_device = as_device(output_device or self.devices[0])
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> torch.Tensor:
        check_home(self.module, self.devices[0])
        check_batch((inputs, kwargs), self.devices)
        inputs, kwargs = scatter(inputs, self.devices), scatter(kwargs, self.devices)
        used = self.devices[: min(len(inputs), len(kwargs))]
        if len(used) == 1:
            return self.module(*inputs[0], **kwargs[0])
        replicas = replicate(self.module, used)
        outputs = parallel_apply(replicas, inputs[: len(used)], used, kwargs)
        return gather(outputs, self.output_device)


# What a step asks of its devices, its module and its batch


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
        raise ValueError("the batch is empty: give at least one sample per device.")
    if sizes and min(sizes) < len(devices):
        raise ValueError(
            f"a batch of {min(sizes)} cannot fill {len(devices)} devices: "
            "give at least one sample per device, or fewer devices."
        )


def check_tensors(outputs: Sequence[Any]) -> None:
    """TypeError where a replica returned anything but a tensor."""
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            raise TypeError(
                f"gather joins tensors, got {type(output).__name__}: let forward return a "
                "tensor, or gather the parts one by one."
            )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    nested = isinstance(value, dict | list | tuple)
    return [t for part in parts for t in _tensors(part)] if nested else []
