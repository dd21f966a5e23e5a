"""torchvision, also beside a PyTorch that was built without CUDA.

    from mgpu_tutorial.shared.vision import torchvision

The torchvision of the package index is built for CUDA. Beside a CPU-only PyTorch its
compiled library does not load, and the import stops at "operator torchvision::nms does
not exist", though networks, data sets and transforms need nothing of that library. So
where it does not load, the two operators that the import asks for are declared, without
code behind them. Where it loads, nothing is done.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

try:
    for library in Path(find_spec("torchvision").origin).parent.glob("_C*.so"):
        torch.ops.load_library(library)
except OSError:
    for name in ("nms", "qnms"):
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", schema)

import torchvision

__all__ = ["torchvision"]
