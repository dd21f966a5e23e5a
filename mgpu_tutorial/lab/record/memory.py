"""The memory ledger: which device holds how many bytes, and what for.

Counted from the tensors themselves, so that it works without a GPU and gives the same
numbers in every run; what autograd keeps for backward through its saved_tensors_hooks
(https://docs.pytorch.org/docs/2.14/autograd.html#torch.autograd.graph.saved_tensors_hooks).
Every storage is counted once, under the first category that names it, and stays in the sums
when it is freed. What autograd holds at this moment, and held at most, is counted too. What
an operation needs only while it runs is not seen.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef as Key  # of a storage

from mgpu_tutorial.lab import borrowed

CATEGORIES = ("parameters", "buffers", "gradients", "optimizer state", "activations")


class _Storage(NamedTuple):
    # of a tensor and of its views; `saved` if autograd was first to name it
    device: str
    category: str
    nbytes: int
    saved: bool


class Ledger:
    """Bytes by device and category: `ledger["virtual:0"]["parameters"]`.

    `saved_for_backward` counts while a forward pass runs, `record_state` what training leaves
    behind, and `add` whatever else there is. No tensor is kept alive by it.
    """

    def __init__(self) -> None:
        self._storages: dict[Key, _Storage] = {}
        self._holds: Counter[Key] = Counter()  # how often autograd holds each
        self._now: Counter[str] = Counter()  # by device
        self._peak: Counter[str] = Counter()
        self._lock = threading.RLock()  # freeing a tensor may interrupt the counting of one

    def __getitem__(self, device: torch.device | str) -> dict[str, int]:
        row: Counter[str] = Counter()
        for storage in self._storages.values():
            if storage.device == str(device):
                row[storage.category] += storage.nbytes
        return dict(row)

    @property
    def devices(self) -> list[str]:
        return sorted({storage.device for storage in self._storages.values()})

    def total(self, device: torch.device | str) -> int:
        return sum(self[device].values())

    def storages(self, category: str) -> dict[Key, int]:
        """The bytes of each storage under `category`, by a key that all ledgers share."""
        found = self._storages.items()
        return {key: storage.nbytes for key, storage in found if storage.category == category}

    def saved_now(self, device: torch.device | str) -> int:
        """The bytes of one device that autograd holds for backward now."""
        return self._now[str(device)]

    def saved_peak(self, device: torch.device | str) -> int:
        """The most bytes of one device that autograd held for backward at one moment."""
        return self._peak[str(device)]

    def add(self, category: str, things: Any) -> None:
        """Count the tensors in `things`: a tensor, or lists, tuples, dicts of such things."""
        for thing in borrowed.leaves_of(things):
            if isinstance(thing, torch.Tensor):
                self.count(category, thing)

    def record_state(self, model: nn.Module, optimizer: Any = None) -> None:
        """Count parameters, buffers, gradients and optimizer state as they are now."""
        self._count_module(model)
        self.add("gradients", [parameter.grad for parameter in model.parameters()])
        if optimizer is not None:
            self.add("optimizer state", list(optimizer.state.values()))

    @contextmanager
    def saved_for_backward(self, *modules: nn.Module, name: str = "activations") -> Iterator:
        """Count under `name` what is kept for backward by this thread, and by the modules.

        Copies of a module that run in threads of their own (DataParallel's replicas) are
        seen too, because they inherit its hooks. What was counted before stays under its
        category, such as a batch, and is not counted as saved.
        """
        local = threading.local()

        def enter(module: nn.Module, _: Any) -> None:
            self._count_module(module)
            local.hooks = [*getattr(local, "hooks", []), hooks()]
            local.hooks[-1].__enter__()

        def leave(*_: Any) -> None:
            local.hooks.pop().__exit__(None, None, None)

        saved = partial(_Saved, self, name)
        hooks = partial(saved_tensors_hooks, saved, attrgetter("tensor"))
        handles = [m.register_forward_pre_hook(enter) for m in modules]
        handles += [m.register_forward_hook(leave, always_call=True) for m in modules]
        try:
            with hooks():
                yield self
        finally:
            for handle in handles:
                handle.remove()

    def _count_module(self, module: nn.Module) -> None:
        self.add("parameters", list(module.parameters()))
        self.add("buffers", list(module.buffers()))

    def count(self, category: str, tensor: torch.Tensor, saved: bool = False) -> Key:
        """Note the storage of one tensor, under the category where it was seen first."""
        storage = tensor.untyped_storage()
        key = Key(storage)  # its address is not used again while we have it
        facts = _Storage(str(tensor.device), category, storage.nbytes(), saved)
        with self._lock:
            self._storages.setdefault(key, facts)
        return key

    def hold(self, key: Key, by: int) -> None:
        """Autograd holds a storage once more, or once less."""
        with self._lock:
            was_held = self._holds[key] > 0
            self._holds[key] += by
            storage = self._storages[key]
            if storage.saved and was_held != (self._holds[key] > 0):
                self._now[storage.device] += by * storage.nbytes
                self._peak |= self._now  # a union of counters is their maximum


class _Saved:
    """A tensor as long as autograd holds it."""

    def __init__(self, ledger: Ledger, name: str, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # an output knows its graph, which would keep itself
        is_saved = not isinstance(tensor, nn.Parameter)
        self._ledger = ledger
        self._key = ledger.count(name if is_saved else "parameters", tensor, is_saved)
        ledger.hold(self._key, 1)

    def __del__(self) -> None:
        self._ledger.hold(self._key, -1)
