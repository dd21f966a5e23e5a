"""The fork server of the tests imports what their ranks import, once for all of them.

A worker that stands in a test module brings pytest into its rank, a tenth of a second for
each, and its chapter with it; the tests of `lab` say what the ranks of a notebook are born
with.
"""

import gc
from pkgutil import walk_packages

import pytest
import torch

import mgpu_tutorial
from mgpu_tutorial.lab.run import server

server.PRELOAD += [
    module.name
    for module in walk_packages(mgpu_tutorial.__path__, "mgpu_tutorial.")
    if module.name.split(".")[1] in mgpu_tutorial.CHAPTERS
]
server.PRELOAD += ["pytest", "psutil", "torch.distributed.checkpoint.state_dict"]


def pytest_collection_finish():
    """What is there before the first test stays; Python need not look for garbage in it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def one_thread():
    """As the ranks have: more of them only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
