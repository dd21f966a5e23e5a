"""The private names of others: each exists; ruff sees that only named files know them."""

import pytest

from mgpu_tutorial.lab import borrowed

TABLE = [p.place for p in vars(borrowed).values() if isinstance(p, borrowed.Private)]
ATTRIBUTES = [  # of functions of the module, then those of chapters and of a notebook
    "multiprocessing.forkserver:_forkserver._forkserver_pid",
    "torch.distributed._functional_collectives:all_reduce",
    "torch.distributed._functional_collectives:all_gather_tensor",
    "torch.distributed._functional_collectives:reduce_scatter_tensor",
    "torch:Tensor._version",
    "torch.autograd:Variable._execution_engine.queue_callback",
    "torch:_C._current_graph_task_id",
    "torch:Tensor._base",
    "torch:ops.aten.add.Tensor._schema",
    "torch.distributed.rendezvous:TCPStore",
    "torch:_C._autograd._top_saved_tensors_default_hooks",
    "torch.distributed.tensor.experimental._context_parallel._attention:custom_ops",
    "torch.distributed.tensor.experimental._attention:set_rotate_method",
    "torch.testing._internal.distributed.fake_pg:FakeStore",
    "torch.utils._python_dispatch:TorchDispatchMode",
    "torch.cuda:_parse_visible_devices",
]


@pytest.mark.parametrize("place", [*TABLE, *ATTRIBUTES])
def test_a_borrowed_name_exists(place):
    borrowed.Private(place).thing  # noqa: B018  raises where there is none
