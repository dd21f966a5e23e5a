"""What the fork server imports for a chapter besides torch, and no more than is used.

What a rank needs and the server has not imported, each rank of every launch imports itself.
What no rank needs only keeps the first launch waiting. The server begins before a chapter is
there to be asked, so it goes by the names in the cell that starts it.
"""

import os
import re
from importlib import import_module

from mgpu_tutorial.lab.run.server import CELL

# PyTorch imports it, and sympy, at the first optimizer or DDP of a process.
_TRAINING = ("torch._dynamo", "torch.nn.parallel.distributed", "torch.distributed.pipelining")
_PICTURES = ("mgpu_tutorial.shared.vision",)  # torchvision, a quarter of a second
_NO_CHAPTER = {"lab", "shared", "instruments", "launch"}
_NO_TRAINING = {"processes_and_ranks", "point_to_point", "nonblocking", "collectives"}
_WITH_PICTURES = {"comparison", "model_parallel", "pipelines", "language_model"}


def _needed(cell: str) -> tuple[str, ...]:
    """The modules that ranks need, by what a cell imports; one that says nothing: any."""
    named = set(re.findall(r"mgpu_tutorial(?:\.| import )(\w+)", cell)) - _NO_CHAPTER
    training = () if named and named <= _NO_TRAINING else _TRAINING
    return training + (_PICTURES if named & _WITH_PICTURES else ())


if CELL in os.environ:  # this is the server, and no rank inherits it
    for module in _needed(os.environ.pop(CELL)):
        import_module(module)
