"""One device, DataParallel, DDP, autocast, a compression hook: seconds, memory, processes.

    python benchmarks/comparison.py [--parts] [--full] [--save]

ResNet-101 and MobileNetV2 with SGD and a cosine schedule. With GPUs it uses all of them:
batch 128 and 256, 112 by 112 pixels, 20 iterations. Else it trains a smaller experiment on
two CPU cores, with `--full` the same, but 4 iterations; a device is then one core: a process
with one thread, or one of DataParallel's virtual devices. `--parts` measures the processor
seconds of the parts of a step instead, which other work on the machine hardly changes. Each
takes some five minutes with `--full`. `--save` stores the result where the notebook on the
comparison reads it, beside those of other kinds.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from mgpu_tutorial.comparison import figures
from mgpu_tutorial.comparison.training import SETUPS, Experiment, Setup, train_setup
from mgpu_tutorial.lab import launch

FULL = Experiment("resnet101", 128, 112, 20), Experiment("mobilenet_v2", 256, 112, 20)
SMALL = Experiment("resnet101", 8, 64, 4), Experiment("mobilenet_v2", 16, 64, 4)
INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "avx512_fp16")


def measure_row(
    setup: Setup, experiment: Experiment, gpus: int, timeout: float = 3600
) -> dict[str, Any]:
    """Run one row in fresh processes and summarise it."""
    count = (gpus or 2) if setup.wrapper else 1
    ranks = count if setup.wrapper == "DDP" else 1
    how = {"device": "cuda" if gpus else "cpu", "timeout": timeout}
    report = launch(train_setup, ranks, setup, experiment, count, **how)
    return figures.summarise(report.results)


def compare(experiments: Sequence[Experiment], gpus: int) -> list[dict[str, Any]]:
    """All rows of all networks; on one GPU only its own."""
    rows = []
    for experiment in experiments:
        for name, setup in SETUPS.items():
            if not setup.wrapper or gpus != 1:
                of = {"network": experiment.network, "setup": name}
                rows.append(of | measure_row(setup, experiment, gpus))
                print(rows[-1], flush=True)
    return rows


def measure_parts(experiments: Sequence[Experiment]) -> list[dict[str, Any]]:
    """Processor seconds of forward, backward and update, of the rank that takes longest."""
    alone, two, ddp = Setup(), Setup("DataParallel"), Setup("DDP")
    rows = []
    for experiment in experiments:
        half = experiment._replace(batch=experiment.batch // 2)
        runs = {
            "one device": (1, alone, experiment),
            "one device, half the pictures": (1, alone, half),
            "DataParallel on two devices": (1, two, experiment),
            "one of two DDP ranks": (2, ddp, experiment),
        }
        for name, (ranks, *how) in runs.items():
            given = *how, 2, time.process_time
            results = launch(train_setup, ranks, *given, device="cpu", timeout=3600).results
            least = [list(map(min, zip(*rank.seconds, strict=True))) for rank in results]
            seconds = [round(part, 4) for part in max(least, key=sum)]
            rows.append({"network": experiment.network, "setup": name, "seconds": seconds})
    return rows


if __name__ == "__main__":
    from common import options

    given = options(__doc__, "full", "parts", "save")
    gpus = 0 if os.environ.get("MGPU_DEVICE") == "cpu" else torch.cuda.device_count()
    kind = "parts" if given.parts else "cuda" if gpus else "cpu"
    iterations = 20 if kind == "cuda" else 4
    chosen = FULL if given.full or kind == "cuda" else SMALL
    experiments = [e._replace(iterations=iterations) for e in chosen]
    known = torch.cpu.get_capabilities()
    about = {
        "device": torch.cuda.get_device_name() if gpus else "CPU, one core per device",
        "torch": torch.__version__,
        "batch": {experiment.network: experiment.batch for experiment in experiments},
        "instructions": {name: known.get(name, False) for name in INSTRUCTIONS},
    }
    if kind == "parts":
        rows = measure_parts(experiments)
        print(figures.parts_picture(rows))
    else:
        rows = compare(experiments, gpus)
        for network, batch, side, _ in experiments:
            print(f"\n{network}, global batch {batch}, {side} x {side}")
            print(figures.table(rows, network))
    if given.save:
        figures.save(kind, [about, *rows])
        print(f"stored in {figures.STORED.name}")
