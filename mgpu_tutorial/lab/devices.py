"""Devices to place tensors on: this machine's GPUs, or virtual ones where it has too few.

A virtual device is a label over CPU memory: a tensor that is placed on "virtual:0" computes
on the CPU, and its results, gradients and optimizer state carry the same label. As on GPUs,
`.to(device)` copies, `.device` tells where a tensor is, and an operation that mixes two
devices is refused with PyTorch's own words. So code that is written for ("cuda:0", "cuda:1")
runs on ("virtual:0", "virtual:1") unchanged, and computes the same bits as on the CPU.

It stands on two documented extension points: the name that PyTorch reserves for devices from
outside (https://docs.pytorch.org/docs/2.14/generated/torch.utils.rename_privateuse1_backend.html)
and `__torch_dispatch__` (https://docs.pytorch.org/docs/2.14/notes/extending.html).
"""

import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from mgpu_tutorial.lab import borrowed

NAME = "virtual"
CPU = torch.device("cpu")


def devices(count: int) -> tuple[torch.device, ...]:
    """`count` devices: GPUs where this machine has as many, else virtual devices.

    MGPU_DEVICE=cpu in the environment asks for virtual ones everywhere.
    """
    forced = os.environ.get("MGPU_DEVICE") == "cpu"
    real = not forced and torch.cuda.device_count() >= count
    if not real:
        _register()
    return tuple(torch.device("cuda" if real else NAME, i) for i in range(count))


def place(thing: Any, device: torch.device | str) -> Any:
    """Copy a tensor to `device`, so that its gradient comes back, or move a module there.

    The same as `thing.to(device)`, and also right for a CPU tensor that requires a gradient
    and goes to a virtual device.
    """
    device = as_device(device)
    if isinstance(thing, nn.Module) or device.type != NAME or thing.device == device:
        return thing.to(device)
    return _Move.apply(thing, device)


def as_device(device: torch.device | str) -> torch.device:
    """The device that a string names; "virtual:1" is known here before any was made."""
    if str(device).startswith(NAME):
        _register()
    return torch.device(device)


class VirtualTensor(torch.Tensor):
    """A tensor in CPU memory with the label of a virtual device."""

    __torch_function__ = borrowed.disabled_torch_function.thing
    label: torch.device

    @property
    def device(self) -> torch.device:
        return self.label

    def get_device(self) -> int:
        return self.label.index

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As on any tensor; a copy to another device brings its gradient back."""
        copy = kwargs.pop("copy", False)
        target, dtype, *_ = borrowed.parse_to(*args, **kwargs)
        if args and isinstance(args[0], torch.Tensor):
            target, dtype = args[0].device, args[0].dtype
        moved = self.clone() if copy else self
        if target is not None and as_device(target) != self.label:
            moved = _Move.apply(self, as_device(target))
        return moved if dtype in (None, self.dtype) else torch.Tensor.to(moved, dtype)

    def cpu(self) -> torch.Tensor:
        return self.to(CPU)

    def tolist(self) -> Any:
        return self.detach().to(CPU).tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {self.label} tensor to numpy: use Tensor.cpu()")

    def __repr__(self) -> str:
        text = repr(self.detach().to(CPU))
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{text[:-1]}, device='{self.label}'{grad})"

    def __reduce_ex__(self, protocol: int) -> Any:
        """Saved, it is a CPU tensor, as with map_location="cpu"."""
        plain = self.detach().to(CPU).requires_grad_(self.requires_grad)
        if isinstance(self, nn.Parameter):
            plain = nn.Parameter(plain, self.requires_grad)
        return plain.__reduce_ex__(protocol)

    def __tensor_flatten__(self, *_: Any) -> Any:
        raise NotImplementedError("virtual devices do not run compiled code")

    # Module.to looks for both before it swaps a parameter for one of another type.
    __tensor_unflatten__ = __tensor_flatten__

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None) -> Any:
        """Check that all tensors agree, compute on the CPU, label what comes out."""
        kwargs = dict(kwargs or {})
        label = _device_of_call(func, args, kwargs)
        kwargs.pop("pin_memory", None)
        target = kwargs.pop("device", None)
        if target is not None and target.type != "cpu":  # "cpu" is what C++ believes we are
            label = as_device(target)
        with borrowed.meet_without_dispatch():
            result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return _with_label(result, label)
        return borrowed.map_tree(functools.partial(_with_label, label=label), result)


class _Move(torch.autograd.Function):
    """Copy to another device; the gradient is copied back."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
        ctx.source = tensor.device
        with borrowed.meet_without_dispatch():
            copy = tensor.detach().clone()
        return _with_label(copy, target) if target.type == NAME else copy.to(target)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return place(gradient, ctx.source), None


def _with_label(value: Any, label: torch.device) -> Any:
    if type(value) is not torch.Tensor or label.type != NAME:
        return value
    tensor = borrowed.make_subclass(VirtualTensor, value)
    tensor.label = label
    return tensor


def _device_of_call(func: Any, args: tuple, kwargs: dict) -> torch.device:
    """The one device of all tensors of a call; RuntimeError where they are on several."""
    tensors = _tensors([*args, *kwargs.values()])
    label = next(t.label for t in tensors if isinstance(t, VirtualTensor))
    if all(t.device == label for t in tensors):
        return label
    schema = borrowed.schema_of(func)
    if schema.name == "aten::copy_":
        return _checked_copy(*tensors)
    names = [argument.name for argument in schema.arguments]
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        for tensor in _tensors(value):
            on_host = tensor.device == CPU and (tensor.dim() == 0 or name == "indices")
            if tensor.device != label and not on_host:
                method = f"wrapper_{NAME}_{schema.name.removeprefix('aten::')}"
                raise RuntimeError(  # PyTorch's words
                    f"Expected all tensors to be on the same device, but got {name} is on "
                    f"{tensor.device}, different from other tensors on {label} "
                    f"(when checking argument in method {method})"
                )
    return label


def _checked_copy(target: torch.Tensor, source: torch.Tensor) -> torch.device:
    """copy_ may cross devices, but then autograd would not find the way back."""
    if source.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"a copy from {source.device} to {target.device} would lose the gradient here. "
            f"With place of mgpu_tutorial.lab write place(tensor, '{target.device}')"
        )
    return target.device


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in borrowed.leaves_of(value) if isinstance(leaf, torch.Tensor)]


@functools.cache
def _register() -> torch.library.Library:
    """Teach PyTorch the device name, and what new memory on such a device is."""
    torch.utils.rename_privateuse1_backend(NAME)
    answers = {"is_available": False, "is_initialized": True, "device_count": 0}
    answers |= {"manual_seed_all": None, "_is_in_bad_fork": False}
    module = {name: lambda *_, answer=answer: answer for name, answer in answers.items()}
    borrowed.register_device(NAME, SimpleNamespace(**module))

    def new(make: Callable, *shape: Any, device: Any, dtype: Any = None, **_: Any) -> Any:
        return _with_label(make(*shape, dtype=dtype), as_device(device))

    library = torch.library.Library("aten", "IMPL")
    makers = {"empty.memory_format": torch.empty, "empty_strided": torch.empty_strided}
    for name, make in makers.items():
        library.impl(name, functools.partial(new, make), "PrivateUse1")
    return library
