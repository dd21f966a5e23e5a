"""The fork server of the tests imports what their ranks import, once for all of them.

A worker that stands in a test module brings pytest into its rank, a tenth of a second for
each; the tests of `lab` say what the ranks of a notebook are born with.
"""

import pytest
import torch

from mgpu_tutorial.lab.run import server

server.PRELOAD += ["pytest", "psutil", "torch.distributed.checkpoint.state_dict"]


@pytest.fixture(scope="module")
def one_thread():
    """As the ranks have: more of them only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
