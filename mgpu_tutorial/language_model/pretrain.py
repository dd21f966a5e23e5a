"""python -m mgpu_tutorial.language_model.pretrain makes the checkpoint that is shipped.

3,000 steps of one process from seed 0, a few minutes; the parameters are kept in bfloat16,
and Adam's moments are not.
"""

import tempfile
from pathlib import Path

import torch

from mgpu_tutorial.lab import launch
from mgpu_tutorial.language_model import checkpoint, train

STEPS = 3_000

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trained.pt")
        how = {
            "steps": STEPS,
            "save": str(file),
            "every": STEPS,
            "lr": 2e-3,
            "timeout": 3_000,
        }
        losses = launch(train, 1, "dp=1", **how).results[0]
        state = torch.load(file, weights_only=True)
    tensors = {name: [t[0].bfloat16()] for name, t in state["tensors"].items()}
    torch.save({"step": STEPS, "tensors": tensors}, checkpoint.SHIPPED)
    print(f"loss {sum(losses[-100:]) / 100:.2f} over the last 100 steps")
