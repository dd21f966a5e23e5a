"""Every private name of Python and PyTorch that the package uses, a function each.

None of them is promised to anybody: a new Python or PyTorch may take one away. They are
here and nowhere else, so that the test of this module then says which, and who needs it.
PyTorch is imported where it is used, because the fork server begins before it.
"""

import importlib
import multiprocessing as mp
import pickle
import socket
from functools import cached_property, reduce
from multiprocessing import forkserver
from typing import Any


class Private:
    """A private function or class of another package, found at its first call."""

    def __init__(self, place: str) -> None:
        self.place = place

    @cached_property
    def thing(self) -> Any:
        module, _, path = self.place.partition(":")
        return reduce(getattr, filter(None, path.split(".")), importlib.import_module(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.thing(*args, **kwargs)


# Python

# Close the fork server and wait for its end; its socket's file must exist.
stop_fork_server = Private("multiprocessing.forkserver:_forkserver._stop")
# End the process that cleans up named semaphores; it ignores signals.
stop_resource_tracker = Private("multiprocessing.resource_tracker:_resource_tracker._stop")
# What multiprocessing does at the end of a process: join children, remove folders.
run_exit_handlers = Private("multiprocessing.util:_exit_function")


def fork_server_pid() -> int | None:
    """The process of the fork server; None before the first start."""
    return forkserver._forkserver._forkserver_pid


def fork_server_address() -> str | None:
    """The path of the fork server's socket."""
    return forkserver._forkserver._forkserver_address


def forget_fork_server() -> None:
    """After this, the next start makes a new fork server; the old one is not waited for."""
    forkserver._forkserver._forkserver_pid = None
    forkserver._forkserver._forkserver_address = None


def is_importing_main() -> bool:
    """Whether a child process is just importing the program's `__main__`, as spawn does."""
    return getattr(mp.current_process(), "_inheriting", False)


# PyTorch

# The process group that functional collectives know by this name.
process_group_of = Private("torch.distributed.distributed_c10d:_resolve_process_group")
# A guard under which tensors that pretend a device meet the real operations.
meet_without_dispatch = Private("torch:_C._DisableTorchDispatch")
# What `tensor.to(…)` was asked for: device, dtype, and more.
parse_to = Private("torch:_C._nn._parse_to")
# make_subclass(kind, tensor): the tensor seen as one of the tensor class `kind`.
make_subclass = Private("torch:Tensor._make_subclass")
# register_device(name, module): make it the `torch.<name>` of a device type.
register_device = Private("torch:_register_device_module")
# map_tree(function, tree): apply it to every leaf of nested lists, tuples and dicts.
map_tree = Private("torch.utils._pytree:tree_map")
# leaves_of(tree): all of them, in order.
leaves_of = Private("torch.utils._pytree:tree_leaves")
# The store of the backend "fake", which moves nothing; importing it registers that.
fake_store = Private("torch.testing._internal.distributed.fake_pg:FakeStore")

# The module whose collectives tensor-parallel and compiled code calls.
functional_collectives = Private("torch.distributed._functional_collectives:")
# The class of guards that see each operator below Python.
dispatch_mode = Private("torch.utils._python_dispatch:TorchDispatchMode")
# What a tensor class sets as its `__torch_function__` to have none.
disabled_torch_function = Private("torch:_C._disabled_torch_function_impl")

# "allgather" or "alltoall": how `context_parallel` brings the keys and values around.
rotate_by = Private("torch.distributed.tensor.experimental._attention:set_rotate_method")


def schema_of(operator: Any) -> Any:
    """Name and arguments of an operator of `torch.ops`."""
    return operator._schema


def keep_stores_on_loopback() -> None:
    """A store that `init_process_group` opens is reached from this machine only.

    PyTorch's own listens on every network interface and asks nobody for a password.
    """
    rendezvous = importlib.import_module("torch.distributed.rendezvous")

    def open_or_visit(port: int, is_master: bool = False, **settings: Any) -> Any:
        if is_master:
            listener = socket.create_server(("127.0.0.1", port))
            settings["master_listen_fd"] = listener.detach()
        return store(port=port, is_master=is_master, **settings)

    store, rendezvous.TCPStore = rendezvous.TCPStore, open_or_visit


def flight_record() -> bytes:
    """What the flight recorder holds of this process, pickled; with the stacks of Python."""
    from torch._C import _distributed_c10d
    from torch.distributed import distributed_c10d

    record = pickle.loads(_distributed_c10d._dump_fr_trace(True, True, False))
    members = distributed_c10d._world.pg_group_ranks  # with a number where it is no member
    record["pg_config"] = {  # on gloo it does not name the groups as its entries do
        g.group_name: {
            "name": g.group_name,
            "desc": g.group_desc,
            "ranks": str(sorted(ranks)),
        }
        for g, ranks in members.items()
        if isinstance(g, distributed_c10d.ProcessGroup)
    }
    return pickle.dumps(record)


def let_context_parallel_run_on_cpu() -> None:
    """Teach `context_parallel` the CPU's attention: PyTorch's handlers know the GPU's only.

    Its sums of partial results then keep the dtype of the queries.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    aten = torch.ops.aten
    attend = aten._scaled_dot_product_flash_attention_for_cpu.default
    go_back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def attend_to_block(q, k, v, is_causal, **_):
        return attend(q.contiguous(), k.contiguous(), v.contiguous(), 0.0, is_causal)

    def go_back_through_block(query, key, value, out, logsumexp, is_causal, grad_out, **_):
        return go_back(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

    def forward(operator, given, named):
        mesh, local = given[0].device_mesh, [tensor.to_local() for tensor in given[:3]]
        is_causal = given[4] if len(given) > 4 else named.get("is_causal", False)
        ring = theirs._templated_ring_attention
        found = ring(mesh.get_group(), 2, attend_to_block, *local, is_causal=is_causal)
        return tuple(DTensor.from_local(x, mesh, given[0].placements) for x in found[:2])

    def backward(operator, given, named):
        mesh, (gradient, *local) = given[0].device_mesh, [t.to_local() for t in given[:6]]
        ring = theirs._templated_ring_attention_backward
        end = go_back_through_block, gradient, "grad_out", *local, given[7]
        found = ring(mesh.get_group(), 2, *end)
        return tuple(DTensor.from_local(x, mesh, given[0].placements) for x in found[:3])

    theirs.custom_ops |= {attend: forward, go_back: backward}
    theirs._cp_options.convert_to_f32 = False
