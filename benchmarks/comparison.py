"""One device, DataParallel, DDP, autocast, a compression hook: seconds, memory, processes.

    python benchmarks/comparison.py [--full] [--save]

ResNet-101 and MobileNetV2 with SGD and a cosine schedule. With GPUs it uses all of them:
batch 128 and 256, 112 by 112 pixels, 20 iterations. Else it trains a smaller experiment on
two CPU cores, with `--full` the same. `--save` stores the result beside this file, where
the notebook on mixed precision reads it; what was stored for the other kind of device stays.
"""

import argparse
import json
import os
from datetime import date

import torch

from mgpu_tutorial.mixed_precision import comparison


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    gpus = 0 if os.environ.get("MGPU_DEVICE") == "cpu" else torch.cuda.device_count()
    scale = comparison.FULL if given.full or gpus else comparison.SMALL
    result = comparison.compare(scale, gpus)
    if gpus:
        result["date"] = date.today().isoformat()
    for net in result["rows"]:
        print(f"\n{net}, global batch {scale.batch[net]}, {scale.side} x {scale.side}")
        print(comparison.table(result, net))
    if given.save:
        path = comparison.STORED
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        known["cuda" if gpus else "cpu"] = result
        path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        print(f"stored in {path.name}")


if __name__ == "__main__":
    main()
