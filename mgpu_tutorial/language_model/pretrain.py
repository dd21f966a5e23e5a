"""python -m mgpu_tutorial.language_model.pretrain makes the checkpoint and the four lines.

One run of 3,000 steps from seed 0, which changes its plan three times: eight ranks begin it,
and two take the long last part. At each age it writes a line, the likeliest characters after
the same words. The checkpoint is shipped without Adam's moments, in bfloat16. On another
processor rounding may lead to other lines. It took 29 minutes on two busy cores.
"""

import json
import tempfile
from pathlib import Path

import torch

from mgpu_tutorial.lab import launch
from mgpu_tutorial.language_model import PARTS, ask, train
from mgpu_tutorial.language_model.model import AGES, SHIPPED, decode, encode, load_checkpoint
from mgpu_tutorial.language_model.plan import plan_of

PROMPT = "Returns a new tensor "
LEGS = {20: "dp=2,tp=2,pp=2", 100: "dp=2,tp=2,cp=2", 300: "dp=4,pp=2", 3_000: "dp=2"}


def grow(file: str) -> list[dict]:
    """Train on one plan after the other; what was written at the end of each."""
    ages, seconds = [], 0.0
    for age, plan in LEGS.items():
        how = {"save": file, "every": 100, "lr": 2e-3, "timeout": 10_000}
        resume = file if ages else ""
        report = launch(train, plan_of(plan).ranks, plan, age, resume, **how)
        _, _, (whole, *_) = load_checkpoint(file)
        written, _ = launch(ask.write, 1, whole, encode(PROMPT), 43, PARTS).results[0]
        seconds += report.seconds
        losses = report.results[0][-20:]
        row = {"step": age, "plan": plan, "loss": round(sum(losses) / len(losses), 2)}
        ages.append(row | {"text": decode(written)})
        print(ages[-1], f"after {seconds:.0f} s", flush=True)
    return ages


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "run.pt")
        ages = grow(file)
        run = torch.load(file, weights_only=True)
    tensors = {name: [parts[0].bfloat16()] for name, parts in run["tensors"].items()}
    torch.save({"step": run["step"], "tensors": tensors}, SHIPPED)
    AGES.write_text(json.dumps(ages, indent=1) + "\n", "ascii")
