"""What DataParallel asks of its devices, its module and its batch before a step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mgpu_tutorial.lab.simulate.devices import as_device

Devices = Sequence[torch.device]


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
