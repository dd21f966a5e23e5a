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

_MISSING = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _declare_missing_operators() -> None:
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return  # the import below says that it is not installed
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        for schema in _MISSING:
            name, _, signature = schema.partition("(")
            torch.library.define(f"torchvision::{name}", f"({signature}")


_declare_missing_operators()

import torchvision  # noqa: E402  (after the declarations that it needs)

__all__ = ["torchvision"]
