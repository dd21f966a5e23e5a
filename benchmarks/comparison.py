"""One device, DataParallel, DDP, autocast, a compression hook: seconds, memory, processes.

    python benchmarks/comparison.py [--full] [--save]
    python benchmarks/comparison.py [--full] [--networks resnet101] [--iterations 1]

ResNet-101 and MobileNetV2 with SGD and a cosine schedule. With GPUs it uses all of them:
batch 128 and 256, 112 by 112 pixels, 20 iterations. Else it trains a smaller experiment on
two CPU cores, with `--full` the same; a device is then one core: a process with one thread,
or one of DataParallel's virtual devices. `--save` stores the result in the package, where
the notebook on mixed precision reads it; what was stored for the other kind of device stays.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import date
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.data_parallel.wrapper import DataParallel
from mgpu_tutorial.ddp_buckets.hooks import HOOKS
from mgpu_tutorial.lab import Ledger, devices, launch
from mgpu_tutorial.mixed_precision.comparison import NOT_MEASURED, STORED, table
from mgpu_tutorial.shared.data import Pictures, pictures


class Setup(NamedTuple):
    """How a row trains: "" on one device, "DataParallel" or "DDP" on several."""

    wrapper: str = ""
    autocast: bool = False
    hook: str = ""


SETUPS = {
    "one device": Setup(),
    "one device + autocast": Setup(autocast=True),
    "DataParallel": Setup("DataParallel"),
    "DDP": Setup("DDP"),
    "DDP + autocast": Setup("DDP", autocast=True),
    "DDP + compression hook": Setup("DDP", hook="bfloat16"),
}


class Experiment(NamedTuple):
    """A network of torchvision, pictures in a global batch, pixels of a side, iterations."""

    network: str
    batch: int
    side: int
    iterations: int


FULL = Experiment("resnet101", 128, 112, 20), Experiment("mobilenet_v2", 256, 112, 20)
SMALL = Experiment("resnet101", 8, 64, 4), Experiment("mobilenet_v2", 16, 64, 4)


class Measured(NamedTuple):
    """What one rank found.

    Seconds of each iteration but the first, losses of all; bytes on each of its devices by
    category, counted in the first iteration; CUDA's peaks in bytes; its process.
    """

    seconds: list[float]
    losses: list[float]
    memory: list[dict[str, int]]
    peaks: list[int]
    pid: int


def train_setup(
    rank: int, world_size: int, setup: Setup, experiment: Experiment, count: int = 1
) -> Measured:
    """Train on this rank's share of each global batch; with DDP all ranks average gradients.

    `count` is the number of devices that DataParallel's one process takes.
    """
    taken = devices(count) if setup.wrapper == "DataParallel" else ()
    home = taken[0] if taken else torch.get_default_device()
    steps = experiment.iterations + 1
    module, optimizer, schedule = new_network(experiment.network, steps, home)
    model, ledger = wrap(module, setup, taken), Ledger()
    with torch.device("cpu"):
        data = pictures()
    seconds, losses = [], []
    for step in range(steps):
        images, labels = draw_share(rank, world_size, data, experiment, step)
        images, labels = images.to(home), labels.to(home)
        counting = ledger.saved_for_backward(module) if step == 0 else nullcontext()
        begin = now()
        with counting, torch.autocast(kind(), torch.bfloat16, setup.autocast):
            loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        seconds.append(now() - begin)
        losses.append(loss.item())
        if step == 0:
            ledger.record_state(module, optimizer)
    memory = [ledger[device] for device in ledger.devices]
    return Measured(seconds[1:], losses, memory, peaks(taken or [home]), os.getpid())


def new_network(
    name: str, steps: int, home: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """One of torchvision's networks for ten classes, SGD, and a cosine schedule."""
    from mgpu_tutorial.shared.vision import torchvision  # seconds: only for who needs it

    torch.manual_seed(0)
    module = getattr(torchvision.models, name)(num_classes=10).to(home)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    return module, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def wrap(
    module: nn.Module, setup: Setup, taken: Sequence[torch.device]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The module as `setup` trains it; DataParallel takes the devices `taken`."""
    if setup.wrapper == "DDP":
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        if setup.hook:
            HOOKS[setup.hook](model)
        return model
    if setup.wrapper == "DataParallel":
        return nn.DataParallel(module) if kind() == "cuda" else DataParallel(module, taken)
    return module


def draw_share(
    rank: int, world_size: int, data: Pictures, experiment: Experiment, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every world_size-th picture of the step's global batch, from number `rank` on."""
    first = step * experiment.batch
    mine = range(first + rank, first + experiment.batch, world_size)
    return data.batch([i % len(data) for i in mine], experiment.side)


def kind() -> str:
    """ "cuda" in a rank that computes on a GPU, else "cpu"."""
    return torch.get_default_device().type


def now() -> float:
    """The clock in seconds, once the GPU has done what it was told."""
    if kind() == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peaks(taken: Sequence[torch.device]) -> list[int]:
    """The most bytes that CUDA had given out on each device; nothing for other devices."""
    return [torch.cuda.max_memory_allocated(d) for d in taken if d.type == "cuda"]


def measure_row(
    setup: Setup, experiment: Experiment, gpus: int, timeout: float = 600.0
) -> dict[str, Any] | str:
    """Run one row in fresh processes and summarise it; NOT_MEASURED for want of GPUs."""
    count = (gpus or 2) if setup.wrapper else 1
    if gpus == 1 and setup.wrapper:
        return NOT_MEASURED
    ranks = count if setup.wrapper == "DDP" else 1
    device = "cuda" if gpus else "cpu"
    report = launch(
        train_setup, ranks, setup, experiment, count, device=device, timeout=timeout
    )
    return summarise(report.results) | {"devices": count}


def summarise(ranks: Sequence[Measured]) -> dict[str, Any]:
    """One row: 20 times the median iteration of the slowest rank; every device's bytes."""
    slowest = map(max, zip(*(rank.seconds for rank in ranks), strict=True))
    return {
        "seconds": round(20 * statistics.median(slowest), 2),
        "memory": [device for rank in ranks for device in rank.memory],
        "peaks": [peak for rank in ranks for peak in rank.peaks],
        "processes": len({rank.pid for rank in ranks}),
    }


def compare(experiments: Sequence[Experiment], gpus: int) -> dict[str, Any]:
    """All rows of all networks, and with what they were run."""
    rows: dict[str, dict] = {}
    for experiment in experiments:
        for name, setup in SETUPS.items():
            found = measure_row(setup, experiment, gpus)
            rows.setdefault(experiment.network, {})[name] = found
            print(f"{experiment.network}, {name}: {found}", flush=True)
    versions = {name: version(name) for name in ("torch", "torchvision")}
    known = torch.cpu.get_capabilities()
    return {
        "device": torch.cuda.get_device_name(0) if gpus else "CPU, one core per device",
        "instructions": {
            name: known.get(name, False)
            for name in ("avx512_bf16", "amx_bf16", "avx512_fp16")
        },
        "versions": versions | {"python": platform.python_version()},
        "scale": {
            "batch": {e.network: e.batch for e in experiments},
            "side": experiments[0].side,
            "iterations": experiments[0].iterations,
        },
        "rows": rows,
    }


def save(result: dict[str, Any], device: str) -> None:
    """Store the result for "cpu" or "cuda"; the other one stays as it is."""
    known = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    known[device] = result
    STORED.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(f"stored in {STORED.name}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="as on GPUs, also without one")
    parser.add_argument("--iterations", type=int, help="instead of 4, or 20 in full")
    parser.add_argument("--networks", nargs="+", help="only these of the two")
    parser.add_argument("--save", action="store_true", help="store the result")
    given = parser.parse_args()
    if given.save and (given.networks or given.iterations):
        parser.error("--save stores the whole comparison: no --networks, no --iterations")
    gpus = 0 if os.environ.get("MGPU_DEVICE") == "cpu" else torch.cuda.device_count()
    experiments = [
        experiment._replace(iterations=given.iterations or experiment.iterations)
        for experiment in (FULL if given.full or gpus else SMALL)
        if experiment.network in (given.networks or [experiment.network])
    ]
    if not experiments:
        parser.error(f"--networks: known are {', '.join(e.network for e in SMALL)}")
    result = compare(experiments, gpus)
    if gpus:
        result["date"] = date.today().isoformat()
    for network, batch, side, _ in experiments:
        print(f"\n{network}, global batch {batch}, {side} x {side}")
        print(table(result, network))
    if given.save:
        save(result, "cuda" if gpus else "cpu")


if __name__ == "__main__":
    main()
