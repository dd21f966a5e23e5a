"""The private names of others: each exists; ruff sees that one module alone knows them."""

import pytest

from mgpu_tutorial.lab import borrowed

TABLE = [p.place for p in vars(borrowed).values() if isinstance(p, borrowed.Private)]
ATTRIBUTES = [  # that functions of the module read or set, the last one a notebook
    "multiprocessing.forkserver:_forkserver._forkserver_pid",
    "multiprocessing.forkserver:_forkserver._forkserver_address",
    "torch.distributed._functional_collectives:all_reduce",
    "torch.distributed._functional_collectives:all_gather_tensor",
    "torch.distributed._functional_collectives:reduce_scatter_tensor",
    "torch:Tensor._version",
    "torch:ops.aten.add.Tensor._schema",
    "torch:_C._distributed_c10d._dump_fr_trace",
    "torch.distributed.distributed_c10d:_world.pg_group_ranks",
    "torch.distributed.rendezvous:TCPStore",
    "torch.distributed.tensor.experimental._context_parallel._attention:custom_ops",
    "torch.cuda:_parse_visible_devices",
]


@pytest.mark.parametrize("place", [*TABLE, *ATTRIBUTES])
def test_a_borrowed_name_exists(place):
    borrowed.Private(place).thing  # noqa: B018  raises where there is none
