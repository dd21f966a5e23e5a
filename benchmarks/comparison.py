"""One device, DataParallel, DDP, autocast, a compression hook: seconds, memory, processes.

    python benchmarks/comparison.py [--full] [--save]
    python benchmarks/comparison.py --parts [--full] [--save]

ResNet-101 and MobileNetV2 with SGD and a cosine schedule. With GPUs it uses all of them:
batch 128 and 256, 112 by 112 pixels, 20 iterations. Else it trains a smaller experiment on
two CPU cores, with `--full` the same, but 4 iterations; a device is then one core: a process
with one thread, or one of DataParallel's virtual devices. `--parts` measures the processor
seconds of the parts of a step instead, which other work on the machine hardly changes. Each
of the two takes some five minutes with `--full`.
`--save` stores the result in the package, where the notebook on the comparison reads it;
what was stored beside it, or for the other kind of device, stays.
"""

import argparse
import json
import os
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from typing import Any

import torch

from mgpu_tutorial.comparison import figures
from mgpu_tutorial.comparison.figures import STORED, summarise, time_parts
from mgpu_tutorial.comparison.training import SETUPS, Experiment, Setup, train_setup
from mgpu_tutorial.lab import launch

FULL = Experiment("resnet101", 128, 112, 20), Experiment("mobilenet_v2", 256, 112, 20)
SMALL = Experiment("resnet101", 8, 64, 4), Experiment("mobilenet_v2", 16, 64, 4)
INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "avx512_fp16")


def measure_row(
    setup: Setup, experiment: Experiment, gpus: int, timeout: float = 3600.0
) -> dict[str, Any]:
    """Run one row in fresh processes and summarise it."""
    count = (gpus or 2) if setup.wrapper else 1
    ranks = count if setup.wrapper == "DDP" else 1
    device = "cuda" if gpus else "cpu"
    what = setup, experiment, count
    report = launch(train_setup, ranks, *what, device=device, timeout=timeout)
    return summarise(report.results) | {"devices": count}


def compare(experiments: Sequence[Experiment], gpus: int) -> dict[str, Any]:
    """All rows of all networks, and with what they were run; on one GPU only its own."""
    rows: dict[str, dict] = {}
    for experiment in experiments:
        for name, setup in SETUPS.items():
            if setup.wrapper and gpus == 1:
                continue
            found = measure_row(setup, experiment, gpus)
            rows.setdefault(experiment.network, {})[name] = found
            print(f"{experiment.network}, {name}: {found}", flush=True)
    return {
        "device": torch.cuda.get_device_name(0) if gpus else "CPU, one core per device",
        **describe(experiments),
        "rows": rows,
    }


def describe(experiments: Sequence[Experiment]) -> dict[str, Any]:
    """With what something was measured: instructions, versions, and the experiments' size."""
    known = torch.cpu.get_capabilities()
    versions = {name: version(name) for name in ("torch", "torchvision")}
    return {
        "instructions": {name: known.get(name, False) for name in INSTRUCTIONS},
        "versions": versions | {"python": platform.python_version()},
        "scale": {
            "batch": {e.network: e.batch for e in experiments},
            "side": experiments[0].side,
            "iterations": experiments[0].iterations,
        },
    }


def measure_parts(experiments: Sequence[Experiment], turns: int = 2) -> dict[str, Any]:
    """Processor seconds of forward, backward and update: the least of all ways' turns."""
    alone, two, ddp = Setup(), Setup("DataParallel"), Setup("DDP")
    rows: dict[str, dict] = {}
    for experiment in experiments:
        half = experiment._replace(batch=experiment.batch // 2)
        runs = {
            "one device": (1, alone, experiment),
            "one device, half the pictures": (1, alone, half),
            "DataParallel on two devices": (1, two, experiment),
            "one of two DDP ranks": (2, ddp, experiment),
            "one of two DDP ranks, no average": (2, ddp, experiment, False),
        }
        found: dict[str, list] = {name: [] for name in runs}
        for _ in range(turns):
            for name, (ranks, *how) in runs.items():
                report = launch(time_parts, ranks, *how, device="cpu", timeout=3600)
                found[name].append(max(report.results, key=sum))
        rows[experiment.network] = {
            name: [round(min(part), 4) for part in zip(*parts, strict=True)]
            for name, parts in found.items()
        }
    return {**describe(experiments), "rows": rows}


def save(result: dict[str, Any], kind: str) -> None:
    """Store the result as "cpu", "cuda" or "parts"; the others stay as they are."""
    known = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    known[kind] = result
    STORED.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(f"stored in {STORED.name}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="as on GPUs, also without one")
    parser.add_argument("--parts", action="store_true", help="processor seconds by parts")
    parser.add_argument("--save", action="store_true", help="store the result")
    given = parser.parse_args()
    gpus = 0 if os.environ.get("MGPU_DEVICE") == "cpu" else torch.cuda.device_count()
    kind = "parts" if given.parts else "cuda" if gpus else "cpu"
    full = given.full or kind == "cuda"
    iterations = {"parts": 2, "cpu": 4, "cuda": 20}[kind] if full else 4
    experiments = [e._replace(iterations=iterations) for e in (FULL if full else SMALL)]
    result = measure_parts(experiments) if given.parts else compare(experiments, gpus)
    if kind == "cuda":
        result["date"] = date.today().isoformat()
    for network, batch, side, _ in experiments:
        print(f"\n{network}, global batch {batch}, {side} x {side}")
        print("" if given.parts else figures.table(result, network))
    if given.parts:
        print(figures.parts_picture(result))
    if given.save:
        save(result, kind)


if __name__ == "__main__":
    main()
