"""One device, DataParallel, DDP, autocast, a compression hook: seconds, memory, processes.

    python benchmarks/comparison.py [--parts] [--full] [--save]

With GPUs it uses all of them for 20 iterations. Else it trains a smaller experiment, with
`--full` the same (five minutes), for 4 iterations on two CPU cores, which play the devices.
`--parts` measures the processor seconds of the parts of a step, which other work hardly
changes. `--save` stores the result where the notebook on the comparison reads it.
"""

import json
import os
import statistics
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from mgpu_tutorial.comparison import figures, stored
from mgpu_tutorial.comparison.training import SETUPS, Experiment, Setup, train_setup
from mgpu_tutorial.lab import launch
from mgpu_tutorial.shared.data import pictures

FULL = ("resnet101", 128, 112), ("mobilenet_v2", 256, 112)
SMALL = ("resnet101", 8, 64), ("mobilenet_v2", 16, 64)
INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "avx512_fp16")


def wall() -> float:
    """The clock in seconds, once the GPU has done what it was told."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(rank: int, world_size: int, *how: Any) -> dict[str, list]:
    """Seconds of each iteration, and the bytes of each device: counted, or CUDA's peak."""
    found = train_setup(rank, world_size, pictures(), *how, wall)
    gpus = range(torch.cuda.device_count())
    peaks = [peak for gpu in gpus if (peak := torch.cuda.max_memory_allocated(gpu))]
    counted = [sum(device.values()) for device in found["memory"]]
    return {"seconds": list(map(sum, found["seconds"])), "memory": peaks or counted}


def measure_row(setup: Setup, experiment: Experiment, gpus: int) -> dict[str, Any]:
    """Run one row in fresh processes and summarise it."""
    count = (gpus or 2) if setup.wrapper else 1
    ranks = count if setup.wrapper == "DDP" else 1
    how = {"device": "cuda" if gpus else "cpu", "timeout": 3600}
    return summarise(launch(measure, ranks, setup, experiment, count, **how).results)


def summarise(ranks: Sequence[dict[str, list]]) -> dict[str, Any]:
    """20 times the median iteration of the slowest rank; the bytes of every device."""
    slowest = map(max, zip(*(rank["seconds"] for rank in ranks), strict=True))
    memory = [peak for rank in ranks for peak in rank["memory"]]
    seconds = round(20 * statistics.median(slowest), 2)
    return {"seconds": seconds, "memory": memory, "processes": len(ranks)}


def save(kind: str, found: Sequence[dict[str, Any]]) -> None:
    """Store what was measured, a row a line; what other kinds have stays."""
    kinds = json.loads(stored.STORED.read_text(encoding="utf-8")) | {kind: found}
    text = json.dumps(kinds).replace("}, {", "},\n{")
    stored.STORED.write_text(f"{text}\n", encoding="utf-8")


def compare(experiments: Sequence[Experiment], gpus: int) -> list[dict[str, Any]]:
    """All rows of all networks; on one GPU only its own."""
    rows = []
    for experiment, (name, setup) in product(experiments, SETUPS.items()):
        if not setup.wrapper or gpus != 1:
            of = {"network": experiment.network, "setup": name}
            rows.append(of | measure_row(setup, experiment, gpus))
            print(rows[-1], flush=True)
    return rows


def measure_parts(experiments: Sequence[Experiment]) -> list[dict[str, Any]]:
    """Processor seconds of forward, backward and update, of the rank that takes longest."""
    runs = {  # ranks, what the pictures are divided by, and the setup
        "one device": (1, 1, Setup()),
        "one device, half the pictures": (1, 2, Setup()),
        "DataParallel on two devices": (1, 1, Setup("DataParallel")),
        "one of two DDP ranks": (2, 1, Setup("DDP")),
    }
    rows = []
    for experiment, (name, (ranks, share, setup)) in product(experiments, runs.items()):
        less = experiment._replace(batch=experiment.batch // share)
        given = pictures(), setup, less, 2, time.process_time
        results = launch(train_setup, ranks, *given, device="cpu", timeout=3600).results
        least = [list(map(min, zip(*rank["seconds"], strict=True))) for rank in results]
        seconds = [round(part, 4) for part in max(least, key=sum)]
        rows.append({"network": experiment.network, "setup": name, "seconds": seconds})
    return rows


if __name__ == "__main__":
    from common import options

    given = options(__doc__, "full", "parts", "save")
    gpus = 0 if os.environ.get("MGPU_DEVICE") == "cpu" else torch.cuda.device_count()
    kind = "parts" if given.parts else "cuda" if gpus else "cpu"
    sizes = FULL if given.full or kind == "cuda" else SMALL
    iterations = 20 if kind == "cuda" else 4
    experiments = [Experiment(*size, iterations=iterations) for size in sizes]
    about = {
        "device": torch.cuda.get_device_name() if gpus else "CPU, one core per device",
        "torch": torch.__version__,
        "batch": {experiment.network: experiment.batch for experiment in experiments},
        "instructions": {n: torch.cpu.get_capabilities().get(n, False) for n in INSTRUCTIONS},
    }
    if kind == "parts":
        rows = measure_parts(experiments)
        print(figures.parts_picture(rows))
    else:
        rows = compare(experiments, gpus)
        for network, batch, side, _ in experiments:
            print(f"{network}: global batch {batch}, {side} x {side}")
        print(stored.table(rows))
    if given.save:
        save(kind, [about, *rows])
