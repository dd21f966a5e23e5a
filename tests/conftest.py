"""The fork server of the tests imports what their ranks import, once for all of them.

A worker that stands in a test module brings pytest into its rank, a tenth of a second for
each, and its chapter with it; the tests of `lab` say what the ranks of a notebook are born
with.
"""

import gc
from pkgutil import walk_packages


def pytest_configure(config):
    """Before the first test; a process that only hands tests to others needs none of it."""
    if config.getoption("numprocesses", None):
        return
    gc.disable()  # until all is imported: it would look at each module again and again
    import torch

    import mgpu_tutorial
    from mgpu_tutorial.lab.run import server

    torch.set_num_threads(1)  # as the ranks have; on a busy machine more only wait
    server.PRELOAD += [
        module.name
        for module in walk_packages(mgpu_tutorial.__path__, "mgpu_tutorial.")
        if module.name.split(".")[1] in mgpu_tutorial.CHAPTERS
    ]
    server.PRELOAD += ["pytest", "psutil", "torch.distributed.checkpoint.state_dict"]


def pytest_collection_finish():
    """All is imported, and stays; Python need not look for garbage in it."""
    gc.collect()
    gc.freeze()
    gc.enable()
