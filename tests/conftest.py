"""The fork server of the tests imports what their ranks import, once for all of them.

A worker that stands in a test module brings pytest into its rank, a tenth of a second for
each; the tests of `lab` say what the ranks of a notebook are born with.
"""

from mgpu_tutorial.lab.run import server

server.PRELOAD += ["pytest", "psutil", "torch.distributed.checkpoint.state_dict"]
