"""The private names of Python and PyTorch that the package uses, a function each.

A new Python or PyTorch may take one away, and the test of this module then says which. What
only one chapter needs is in a file of that chapter, which `pyproject.toml` names (SLF,
PLC2701), and in the same test. The fork server begins before PyTorch is imported.
"""

import importlib
import multiprocessing as mp
import socket
from collections.abc import Callable
from functools import cached_property, reduce
from multiprocessing import forkserver
from operator import attrgetter
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


# Close the fork server, if there is one, and wait for its end.
stop_fork_server = Private("multiprocessing.forkserver:_forkserver._stop")
# End the process that cleans up named semaphores; it ignores signals.
stop_resource_tracker = Private("multiprocessing.resource_tracker:_resource_tracker._stop")
# What multiprocessing does at the end of a process: join children, remove folders.
run_exit_handlers = Private("multiprocessing.util:_exit_function")
# safe_text(thing, "result", repr): its text, or that it has none; whatever it raises.
safe_text = Private("traceback:_safe_string")


def fork_server_pid() -> int | None:
    """The process of the fork server; None before the first start."""
    return forkserver._forkserver._forkserver_pid


def is_importing_main() -> bool:
    """Whether a child process is just importing the program's `__main__`, as spawn does."""
    return getattr(mp.current_process(), "_inheriting", False)


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
# The module whose collectives tensor-parallel and compiled code calls.
functional_collectives = Private("torch.distributed._functional_collectives:")
# What a tensor class sets as its `__torch_function__` to have none.
disabled_torch_function = Private("torch:_C._disabled_torch_function_impl")
# Name and arguments of an operator of `torch.ops`.
schema_of = attrgetter("_schema")
# The tensor of which this one is a view, or None.
base_of = attrgetter("_base")


def when_backward_ends(function: Callable[[], None]) -> None:
    """Call it once the backward that runs has come to its end."""
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(function)


def backward_number() -> int:
    """The number of the backward that runs in this thread; -1 outside of any."""
    import torch

    return torch._C._current_graph_task_id()


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


# A store for a process group that only pretends: PyTorch's "fake" backend takes no other.
fake_store = Private("torch.testing._internal.distributed.fake_pg:FakeStore")
# A mode in which tensors have shapes and no numbers.
fake_tensors = Private("torch._subclasses.fake_tensor:FakeTensorMode")
# A guard under which such modes are off.
without_modes = Private("torch.utils._python_dispatch:_disable_current_modes")
# Where a DTensor, and a tensor that is still on its way, have the tensor of this rank.
LOCAL = ("_local_tensor", "elem")
# The keyword by which a mesh of a mesh is told the numbers of its ranks.
RANK_MAP = "_rank_map"
# The class of modes that see every kernel.
dispatch_mode = Private("torch.utils._python_dispatch:TorchDispatchMode")
# Attention on a CPU, and its backward.
flash = Private("torch:ops.aten._scaled_dot_product_flash_attention_for_cpu")
flash_backward = Private(
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward"
)
