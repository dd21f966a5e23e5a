"""The memory ledger: which device holds how many bytes, and what for.

Counted from the tensors themselves, so that it works without a GPU and gives the same
numbers in every run. What autograd keeps for backward is seen through
`torch.autograd.graph.saved_tensors_hooks`
(https://docs.pytorch.org/docs/2.13/autograd.html#torch.autograd.graph.saved_tensors_hooks).
Every storage is counted once, under the first category that names it, and stays in the
sums when it is freed. What autograd holds at this moment, and held at most, is counted
besides. What an operation needs only while it runs is not seen; on a GPU the table adds the
peak that CUDA saw.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef as Key  # of a storage

from mgpu_tutorial.lab.draw.drawing import INK, Drawing
from mgpu_tutorial.lab.draw.sequence_chart import bytes_text
from mgpu_tutorial.lab.draw.tables import Table
from mgpu_tutorial.lab.record.report import colour_of

CATEGORIES = ("parameters", "buffers", "gradients", "optimizer state", "activations")
BAR, GAP, LEFT, LONG = 30, 12, 150, 560
# Ground and pattern of each category in turn: told apart in grey and by the colour-blind.
STYLES = (
    ("#4d4d4d", ""),
    ("#ffffff", "<path d='M4 0V8' stroke='#1a1a1a' stroke-width='1.6'/>"),
    ("#ffffff", "<path d='M0 8L8 0' stroke='#1a1a1a' stroke-width='1.8'/>"),
    ("#bdbdbd", "<circle cx='4' cy='4' r='1.7' fill='#1a1a1a'/>"),
    ("#e6e6e6", ""),
    ("#8c8c8c", "<path d='M0 0L8 8M0 8L8 0' stroke='#ffffff' stroke-width='1.4'/>"),
    ("#ffffff", "<path d='M0 4H8' stroke='#1a1a1a' stroke-width='1.6'/>"),
    ("#9a9a9a", "<path d='M4 0V8' stroke='#ffffff' stroke-width='2'/>"),
)


class _Storage(NamedTuple):
    """The memory of a tensor and of its views; `saved` if autograd was first to name it."""

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
        self._now: Counter[tuple[str, str]] = Counter()  # by device and category
        self._peak: Counter[str] = Counter()  # by device
        self._lock = threading.RLock()  # freeing a tensor may interrupt the counting of one

    def __getitem__(self, device: torch.device | str) -> dict[str, int]:
        row: dict[str, int] = {}
        for storage in self._storages.values():
            if storage.device == str(device):
                row[storage.category] = row.get(storage.category, 0) + storage.nbytes
        return row

    @property
    def devices(self) -> list[str]:
        """The devices that hold anything, in order."""
        return sorted({storage.device for storage in self._storages.values()})

    @property
    def categories(self) -> list[str]:
        """What is counted anywhere, the usual categories first."""
        found = dict.fromkeys(storage.category for storage in self._storages.values())
        usual = [name for name in CATEGORIES if name in found]
        return list(dict.fromkeys([*usual, *found]))

    def total(self, device: torch.device | str) -> int:
        """All bytes of one device."""
        return sum(self[device].values())

    def storages(self, category: str) -> dict[Key, int]:
        """The bytes of each storage under `category`, by a key that all ledgers share.

        So the union of two ledgers counts once what both have seen.
        """
        found = self._storages.items()
        return {key: storage.nbytes for key, storage in found if storage.category == category}

    def saved_now(self, device: torch.device | str, name: str | None = None) -> int:
        """Bytes of one device that autograd holds for backward now; of one `name`, or all."""
        names = {name} if name is not None else {named for _, named in self._now}
        return sum(self._now[str(device), named] for named in names)

    def saved_peak(self, device: torch.device | str) -> int:
        """The most bytes of one device that autograd held for backward at one moment."""
        return self._peak[str(device)]

    def add(self, category: str, things: Any) -> None:
        """Count the tensors in `things`: a tensor, or lists, tuples, dicts of such things."""
        if isinstance(things, torch.Tensor):
            self._count(category, things)
        elif isinstance(things, Mapping):
            self.add(category, list(things.values()))
        elif isinstance(things, list | tuple):
            for thing in things:
                self.add(category, thing)

    def record_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Count parameters, buffers, gradients and optimizer state as they are now."""
        self._count_module(model)
        self.add("gradients", [parameter.grad for parameter in model.parameters()])
        if optimizer is not None:
            self.add("optimizer state", list(optimizer.state.values()))

    @contextmanager
    def saved_for_backward(
        self, *modules: nn.Module, name: str = "activations"
    ) -> Iterator["Ledger"]:
        """Count what is kept for backward by this thread, and by the modules in any thread.

        Copies of a module that run in threads of their own (DataParallel's replicas) are
        seen too, with their parameters and buffers, because they inherit its hooks. What
        was counted before under another category (by `add`, such as the batch) stays there
        and is not counted as saved. `name` is the category, such as "micro-batch 0".
        `saved_now` goes down when backward, or the end of the graph, frees what was saved,
        inside the block or after it.
        """
        local = threading.local()

        def enter(module: nn.Module, _: Any) -> None:
            self._count_module(module)
            local.hooks = [*getattr(local, "hooks", []), self._hooks(name)]
            local.hooks[-1].__enter__()

        def leave(*_: Any) -> None:
            local.hooks.pop().__exit__(None, None, None)

        handles = [m.register_forward_pre_hook(enter) for m in modules]
        handles += [m.register_forward_hook(leave, always_call=True) for m in modules]
        if torch.cuda.is_initialized():
            for device in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(device)
        try:
            with self._hooks(name):
                yield self
        finally:
            for handle in handles:
                handle.remove()

    def table(self) -> Table:
        """A row a device, a column a category, in bytes; on a GPU also CUDA's peak."""
        _check_any(self)
        header, rows = ["", *self.categories, "total"], []
        for device in self.devices:
            row: list[object] = [self[device].get(name, 0) for name in self.categories]
            rows.append([device, *row, self.total(device)])
            if device.startswith("cuda"):
                rows[-1].append(torch.cuda.max_memory_allocated(device))
        peak = any(len(row) > len(header) for row in rows)
        rows = [row + [0] * (len(header) + peak - len(row)) for row in rows]
        return Table(header + (["CUDA's peak"] if peak else []), rows)

    def _hooks(self, name: str) -> saved_tensors_hooks:
        return saved_tensors_hooks(
            lambda tensor: _Saved(self, tensor, name), lambda saved: saved.tensor
        )

    def _count_module(self, module: nn.Module) -> None:
        self.add("parameters", list(module.parameters()))
        self.add("buffers", list(module.buffers()))

    def _count(self, category: str, tensor: torch.Tensor, saved: bool = False) -> Key:
        storage = tensor.untyped_storage()
        key = Key(storage)  # its address is not used again while we have it
        with self._lock:
            if key not in self._storages:
                facts = (str(tensor.device), category, storage.nbytes(), saved)
                self._storages[key] = _Storage(*facts)
        return key

    def _hold(self, name: str, tensor: torch.Tensor) -> Key:
        """Autograd holds `tensor` from now on, until `_release` of the key returned here."""
        with self._lock:
            if isinstance(tensor, nn.Parameter):
                key = self._count("parameters", tensor)
            else:
                key = self._count(name, tensor, saved=True)
            self._holds[key] += 1
            storage = self._storages[key]
            if storage.saved and self._holds[key] == 1:
                self._now[storage.device, storage.category] += storage.nbytes
                now = self.saved_now(storage.device)
                self._peak[storage.device] = max(self._peak[storage.device], now)
        return key

    def _release(self, key: Key) -> None:
        """Autograd has freed what `_hold` gave the key for."""
        with self._lock:
            self._holds[key] -= 1
            storage = self._storages[key]
            if storage.saved and not self._holds[key]:
                self._now[storage.device, storage.category] -= storage.nbytes


class _Saved:
    """A tensor as long as autograd holds it."""

    def __init__(self, ledger: Ledger, tensor: torch.Tensor, name: str) -> None:
        self.tensor = tensor.detach()  # an output knows its graph, which would keep itself
        self._ledger, self._key = ledger, ledger._hold(name, tensor)

    def __del__(self) -> None:
        self._ledger._release(self._key)


def memory_bars(ledgers: Ledger | Mapping[str, Ledger]) -> Drawing:
    """Draw a bar a device, cut by category; several named ledgers share one scale.

    Raises ValueError for a ledger in which nothing is counted.
    """
    named = {"": ledgers} if isinstance(ledgers, Ledger) else dict(ledgers)
    for ledger in named.values():
        _check_any(ledger)
    categories = list(dict.fromkeys(c for one in named.values() for c in one.categories))
    order = [c for c in CATEGORIES if c in categories]
    categories = order + [c for c in categories if c not in order]
    most = max(one.total(device) for one in named.values() for device in one.devices)
    rows = sum(len(one.devices) for one in named.values())
    titles = 26 * sum(bool(name) for name in named)
    top = 44 if len(categories) < 5 else 68
    height = top + rows * (BAR + GAP) + titles + 8
    alt = "Bytes by device and category, as bars"
    drawing = Drawing(LEFT + LONG + 110, height, _text(named), alt)
    drawing.parts.append(f"<defs>{''.join(map(_pattern, range(len(STYLES))))}</defs>")
    _legend(drawing, categories)
    y = top
    for name, ledger in named.items():
        if name:
            drawing.label(14, y + 14, name, 14, anchor="start", weight="bold")
            y += 26
        for device in ledger.devices:
            _bar(drawing, y, device, ledger, categories, LONG / most)
            y += BAR + GAP
    return drawing


def _bar(drawing: Drawing, y: float, device: str, ledger: Ledger, categories, scale) -> None:
    drawing.label(LEFT - 12, y + 20, device, 14, colour_of(device), "end", "bold")
    x = LEFT
    for name in categories:
        nbytes = ledger[device].get(name, 0)
        width = nbytes * scale
        if not nbytes:
            continue
        drawing.box(x, y, width, BAR, INK, f"url(#m{categories.index(name)})", 1, radius=0)
        if width > 64:
            middle = x + width / 2
            drawing.box(middle - 31, y + 6, 62, BAR - 12, "none", "#ffffff", 0, radius=3)
            drawing.label(middle, y + 20, bytes_text(nbytes), 12)
        x += width
    drawing.label(x + 8, y + 20, bytes_text(ledger.total(device)), 13, INK, "start", "bold")


def _legend(drawing: Drawing, categories: list[str]) -> None:
    for i, name in enumerate(categories):
        x, y = 14 + 165 * (i % 4), 12 + 24 * (i // 4)
        drawing.box(x, y, 26, 16, INK, f"url(#m{i})", 1, radius=0)
        drawing.label(x + 33, y + 13, name, 13, anchor="start")


def _pattern(i: int) -> str:
    ground, marks = STYLES[i]
    return (
        f"<pattern id='m{i}' width='8' height='8' patternUnits='userSpaceOnUse'>"
        f"<rect width='8' height='8' fill='{ground}'/>{marks}</pattern>"
    )


def _text(named: Mapping[str, Ledger]) -> str:
    lines = []
    for name, ledger in named.items():
        lines += [name] if name else []
        for device in ledger.devices:
            row = ledger[device]
            parts = [f"{c} {bytes_text(row[c])}" for c in ledger.categories if c in row]
            lines.append(f"{device}  {bytes_text(ledger.total(device))}: {', '.join(parts)}")
    return "\n".join(lines)


def _check_any(ledger: Ledger) -> None:
    if not ledger.devices:
        raise ValueError(
            "nothing is counted: use ledger.saved_for_backward, record_state or add"
        )
