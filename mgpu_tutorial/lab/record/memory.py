"""The memory ledger: which device holds how many bytes, and what for.

Counted from the tensors themselves, so that it works without a GPU and gives the same
numbers in every run. What autograd keeps for backward is seen through
`torch.autograd.graph.saved_tensors_hooks`
(https://docs.pytorch.org/docs/2.13/autograd.html#torch.autograd.graph.saved_tensors_hooks).
Every storage is counted once, under the first category that names it. What an operation
needs only while it runs is not seen; on a GPU the table adds the peak that CUDA saw.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

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


class Ledger:
    """Bytes by device and category: `ledger["virtual:0"]["parameters"]`.

    `saved_for_backward` counts while a forward pass runs, `record_state` what training leaves
    behind, and `add` whatever else there is. No tensor is kept alive by it.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, dict[str, int]] = {}
        self._seen: set[StorageWeakRef] = set()
        self._lock = threading.Lock()

    def __getitem__(self, device: torch.device | str) -> dict[str, int]:
        return self._bytes.get(str(device), {})

    @property
    def devices(self) -> list[str]:
        """The devices that hold anything, in order."""
        return sorted(self._bytes)

    @property
    def categories(self) -> list[str]:
        """What is counted anywhere, the usual categories first."""
        used = {name for row in self._bytes.values() for name in row}
        rows = [name for row in self._bytes.values() for name in row]
        return [n for n in dict.fromkeys([*CATEGORIES, *rows]) if n in used]

    def total(self, device: torch.device | str) -> int:
        """All bytes of one device."""
        return sum(self[device].values())

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
        seen too, with their parameters and buffers, because they inherit its hooks.
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
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self._count("parameters" if isinstance(tensor, nn.Parameter) else name, tensor)
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def _count_module(self, module: nn.Module) -> None:
        self.add("parameters", list(module.parameters()))
        self.add("buffers", list(module.buffers()))

    def _count(self, category: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage)  # its address is not used again while we have it
        with self._lock:
            if key in self._seen:
                return
            self._seen.add(key)
            row = self._bytes.setdefault(str(tensor.device), {})
            row[category] = row.get(category, 0) + storage.nbytes()


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
