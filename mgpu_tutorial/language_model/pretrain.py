"""python -m mgpu_tutorial.language_model.pretrain makes the checkpoint that is shipped.

3,000 steps of one process from seed 0, a few minutes; the parameters are kept in bfloat16,
and Adam's moments are not.
"""

import torch

from mgpu_tutorial.lab import launch
from mgpu_tutorial.language_model import train
from mgpu_tutorial.language_model.model import SHIPPED

if __name__ == "__main__":
    how = {"save": str(SHIPPED), "every": 3_000, "lr": 2e-3, "timeout": 3_000}
    losses = launch(train, 1, "dp=1", 3_000, **how).results[0]
    whole = torch.load(SHIPPED, weights_only=True)["tensors"]
    tensors = {name: [parts[0].bfloat16()] for name, parts in whole.items()}
    torch.save({"step": len(losses), "tensors": tensors}, SHIPPED)
    print(f"loss {sum(losses[-100:]) / 100:.2f} over the last 100 steps")
