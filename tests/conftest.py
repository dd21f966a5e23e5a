"""The fork server of the tests imports what their ranks import, once for all of them.

A worker that stands in a test module brings pytest into its rank, a tenth of a second for
each; the tests of `lab` say what the ranks of a notebook are born with.
"""

import gc

from mgpu_tutorial.lab.run import server

server.PRELOAD += ["pytest", "psutil", "torch.distributed.checkpoint.state_dict"]


def pytest_collection_finish():
    """What is there before the first test stays; Python need not look for garbage in it."""
    gc.collect()
    gc.freeze()
