"""Importing the whole package changes nothing in the process that imports it."""

import subprocess
import sys

IMPORT_ALL = """
import hashlib
import torch, torch.distributed as dist
from torch.nn.modules import module
from torch.optim import optimizer

def state():
    hooks = {f"{home.__name__}.{name}": len(value) for home in (module, optimizer)
             for name, value in vars(home).items() if name.startswith("_global_") and
             hasattr(value, "__len__")}
    calls = {name: id(value) for name, value in vars(dist).items() if callable(value)}
    kinds = {name: id(value) for name, value in vars(torch.nn).items() if callable(value)}
    how = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    drawn = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    return hooks, calls, kinds, how, drawn

before = state()
import importlib, pkgutil
import mgpu_tutorial
for found in pkgutil.walk_packages(mgpu_tutorial.__path__, "mgpu_tutorial."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
after = state()
assert len(before[0]) > 3, before[0]
for one, other in zip(before, after, strict=True):
    apart = one.items() ^ other.items() if isinstance(one, dict) else {one, other}
    assert one == other, apart
"""


def test_importing_every_module_leaves_the_process_as_it_was():
    run = [sys.executable, "-c", IMPORT_ALL]
    ended = subprocess.run(run, capture_output=True, text=True)
    assert not ended.returncode, ended.stderr[-1000:]
