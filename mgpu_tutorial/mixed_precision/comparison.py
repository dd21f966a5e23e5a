"""The great comparison: one network, one global batch, trained in six ways.

`benchmarks/comparison.py` runs it and stores the result; the notebook on mixed precision
reads it. On a CPU every device is one core: one process with one thread, or DataParallel's
virtual devices in one process. A row that needs more GPUs than there are is not measured.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.data_parallel.wrapper import DataParallel
from mgpu_tutorial.ddp_buckets.hooks import HOOKS
from mgpu_tutorial.lab import Ledger, Table, devices, launch
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.draw.sequence_chart import bytes_text
from mgpu_tutorial.shared.data import pictures

STORED = Path(__file__).with_name("comparison.json")
FIELD_REPORT = {"DataParallel": 20.4, "DDP": 8.7, "best half precision": 7.2}
NOT_MEASURED = "not measured"


class Way(NamedTuple):
    """How a row trains: on one device or several, in one process or one a device."""

    several: bool = False
    processes: bool = False
    autocast: bool = False
    hook: str = ""


WAYS = {
    "one device": Way(),
    "one device + autocast": Way(autocast=True),
    "DataParallel": Way(several=True),
    "DDP": Way(several=True, processes=True),
    "DDP + autocast": Way(several=True, processes=True, autocast=True),
    "DDP + compression hook": Way(several=True, processes=True, hook="bfloat16"),
}


class Scale(NamedTuple):
    """How large the experiment is: global batch by network, image side, iterations."""

    batch: dict[str, int]
    side: int
    iterations: int


FULL = Scale({"resnet101": 128, "mobilenet_v2": 256}, side=112, iterations=20)
SMALL = Scale({"resnet101": 8, "mobilenet_v2": 16}, side=64, iterations=4)


def measure(
    rank: int, world_size: int, net: str, way: Way, scale: Scale, count: int, kind: str
) -> dict[str, Any]:
    """Train on this rank's share of each global batch; with DDP the ranks average gradients.

    `kind` is "cpu" or "cuda". Returns the seconds of each iteration but the first, what the
    ledger counts in the first by device, CUDA's peaks, the process id, and the last loss.
    """
    where = devices(count) if way.several and not way.processes else ()
    home = where[0] if where else torch.empty(0, device=kind).device
    module, optimizer, schedule = network(net, scale.iterations + 1, home)
    model, ledger, seconds = wrapped(module, way, where), Ledger(), []
    for step in range(scale.iterations + 1):
        images, labels = batch(rank, world_size, scale.batch[net], scale.side, step, home)
        begin = now(kind)
        book = ledger.saved_for_backward(module) if step == 0 else nullcontext()
        with book, torch.autocast(kind, torch.bfloat16, way.autocast):
            loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        seconds.append(now(kind) - begin)
        if step == 0:
            ledger.record_state(module, optimizer)
    held = [ledger[device] for device in ledger.devices]
    result = {"seconds": seconds[1:], "memory": held, "peaks": peaks(where or [home])}
    return result | {"pid": os.getpid(), "loss": loss.item()}


def peaks(where: Sequence[torch.device]) -> list[int]:
    """The most bytes that CUDA had given out on each device; nothing for other devices."""
    return [torch.cuda.max_memory_allocated(d) for d in where if d.type == "cuda"]


def network(net: str, steps: int, home: torch.device) -> tuple:
    """One of torchvision's networks for ten classes, SGD, and a cosine schedule."""
    from mgpu_tutorial.shared.vision import torchvision  # seconds: only for who needs it

    torch.manual_seed(0)
    module = getattr(torchvision.models, net)(num_classes=10).to(home)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    return module, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def wrapped(module: nn.Module, way: Way, where: tuple) -> Callable:
    """The module as `way` trains it."""
    if way.processes:
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        if way.hook:
            HOOKS[way.hook](model)
        return model
    if not where:
        return module
    gpu = where[0].type == "cuda"
    return nn.DataParallel(module) if gpu else DataParallel(module, where)


def batch(rank: int, world_size: int, whole: int, side: int, step: int, home) -> tuple:
    """This rank's share of a global batch of pictures, enlarged, on its device."""
    with torch.device("cpu"):
        data = pictures()
    mine = range(step * whole + rank, (step + 1) * whole, world_size)
    images, labels = data.batch([i % len(data) for i in mine], side)
    return images.to(home), labels.to(home)


def now(kind: str) -> float:
    """The clock, once the GPU has done what it was told."""
    if kind == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def row(net: str, way: Way, scale: Scale, gpus: int, timeout: float = 600.0) -> Any:
    """Run one row in fresh processes: seconds, bytes, number of processes; or why not."""
    count = (gpus or 2) if way.several else 1
    if gpus == 1 and way.several:
        return NOT_MEASURED
    ranks = count if way.processes else 1
    kind = "cuda" if gpus else "cpu"
    arguments = (net, way, scale, count, kind)
    results = launch(measure, ranks, *arguments, device=kind, timeout=timeout).results
    slowest = map(max, zip(*(r["seconds"] for r in results), strict=True))
    return {
        "seconds": round(20 * statistics.median(slowest), 2),
        "memory": [held for r in results for held in r["memory"]],
        "peaks": [n for r in results for n in r["peaks"]],
        "processes": len({r["pid"] for r in results}),
        "devices": count,
    }


def compare(scale: Scale, gpus: int, say: Callable = print) -> dict[str, Any]:
    """All rows of both networks, and with what they were run."""
    rows = {}
    for net in scale.batch:
        for name, way in WAYS.items():
            rows.setdefault(net, {})[name] = row(net, way, scale, gpus)
            say(f"{net}, {name}: {rows[net][name]}")
    card = torch.cuda.get_device_name(0) if gpus else "CPU, one core a device"
    versions = {name: version(name) for name in ("torch", "torchvision")}
    versions["python"] = platform.python_version()
    known = torch.cpu.get_capabilities()
    short = {k: known.get(k, False) for k in ("avx512_bf16", "amx_bf16", "avx512_fp16")}
    head = {"device": card, "instructions": short, "versions": versions}
    return head | {"scale": scale._asdict(), "rows": rows}


# Reading the stored result


def stored(kind: str = "cpu") -> dict[str, Any] | None:
    """The stored result for "cpu" or "cuda"; None where that was never measured."""
    if not STORED.exists():
        raise FileNotFoundError(
            f"no stored comparison: {STORED.name} is missing. Make it with "
            "python benchmarks/comparison.py --save"
        )
    return json.loads(STORED.read_text(encoding="utf-8")).get(kind)


def table(result: dict[str, Any], net: str) -> Table:
    """A row a way: seconds, ratio to one device, memory of each device, processes."""
    rows = []
    first = result["rows"][net]["one device"]["seconds"]
    for name, found in result["rows"][net].items():
        if found == NOT_MEASURED:
            rows.append([name, *[NOT_MEASURED] * 4])
            continue
        counted = [sum(held.values()) for held in found["memory"]]
        memory = ", ".join(bytes_text(n) for n in found["peaks"] or counted)
        seconds = found["seconds"]
        ratio = f"{first / seconds:.2f}"
        rows.append([name, f"{seconds:.1f}", ratio, memory, found["processes"]])
    header = ["way", "s per 20 iterations", "speed", "memory per device", "processes"]
    return Table(header, rows)


def chart(result: dict[str, Any]) -> Drawing:
    """Seconds as bars, a panel a network, and the field report's figures below."""
    panels = {
        f"{net}: {result['device']}": {
            name: found if found == NOT_MEASURED else found["seconds"]
            for name, found in rows.items()
        }
        for net, rows in result["rows"].items()
    }
    panels["quoted from the field report, other hardware, years ago"] = FIELD_REPORT
    bars = sum(map(len, panels.values()))
    text = "\n".join(
        f"{title}\n" + "\n".join(f"  {n}: {s}" for n, s in panel.items())
        for title, panel in panels.items()
    )
    alt = "Seconds for 20 iterations, by way to train, as bars"
    drawing = Drawing(760, 30 * bars + 46 * len(panels) + 8, text, alt)
    y = 8
    for title, panel in panels.items():
        drawing.label(12, y + 22, f"{title} (s per 20 iterations)", 15, INK, "start", "bold")
        y += 36
        longest = max(s for s in panel.values() if s != NOT_MEASURED)
        for name, seconds in panel.items():
            _bar(drawing, y, name, seconds, longest, quoted=panel is FIELD_REPORT)
            y += 30
        y += 10
    return drawing


def _bar(drawing: Drawing, y: float, name: str, seconds, longest: float, quoted: bool):
    drawing.label(215, y + 16, name, 14, INK, "end")
    if seconds == NOT_MEASURED:
        drawing.label(225, y + 16, NOT_MEASURED, 14, FAINT, "start")
        return
    width = 440 * seconds / longest
    fill = "#ffffff" if quoted else "#0072B2" if "autocast" not in name else "#D55E00"
    drawing.box(225, y, width, 22, INK, fill, 1.5, "5 3" if quoted else "", radius=0)
    drawing.label(233 + width, y + 16, f"{seconds:.1f}", 14, INK, "start", "bold")
