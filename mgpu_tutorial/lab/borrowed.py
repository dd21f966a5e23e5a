"""Every private name of Python and PyTorch that the package uses, a function each.

None of them is promised to anybody: a new Python or PyTorch may take one away. They are
here and nowhere else, so that the test of this module then says which, and who needs it.
Names that need PyTorch are imported where they are used, because the fork server begins
before it.
"""

import multiprocessing as mp
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker, util
from typing import Any

# Python


def fork_server_pid() -> int | None:
    """The process of the fork server; None before the first start."""
    return forkserver._forkserver._forkserver_pid


def fork_server_address() -> str | None:
    """The path of the fork server's socket."""
    return forkserver._forkserver._forkserver_address


def stop_fork_server() -> None:
    """Close the fork server and wait for its end; its socket's file must exist."""
    forkserver._forkserver._stop()


def forget_fork_server() -> None:
    """After this, the next start makes a new fork server; the old one is not waited for."""
    forkserver._forkserver._forkserver_pid = None
    forkserver._forkserver._forkserver_address = None


def stop_resource_tracker() -> None:
    """End the process that cleans up named semaphores; it ignores signals."""
    resource_tracker._resource_tracker._stop()


def run_exit_handlers() -> None:
    """What multiprocessing does at the end of a process: join children, remove folders."""
    util._exit_function()


def is_importing_main() -> bool:
    """Whether a child process is just importing the program's `__main__`, as spawn does."""
    return getattr(mp.current_process(), "_inheriting", False)


# PyTorch


def functional_collectives() -> Any:
    """The module whose collectives tensor-parallel and compiled code calls."""
    from torch.distributed import _functional_collectives

    return _functional_collectives


def process_group_of(name: str) -> Any:
    """The process group that functional collectives know by this name."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)


def meet_without_dispatch() -> Any:
    """A guard under which tensors that pretend a device meet the real operations."""
    import torch

    return torch._C._DisableTorchDispatch()


def parse_to(*args: Any, **kwargs: Any) -> tuple:
    """What `tensor.to(…)` was asked for: device, dtype, and more."""
    import torch

    return torch._C._nn._parse_to(*args, **kwargs)


def version_of(tensor: Any) -> int:
    """How often a tensor, or one that shares its memory, was changed in place."""
    return tensor._version


def dispatch_mode() -> type:
    """The class of guards that see each operator below Python."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def make_subclass(kind: type, tensor: Any) -> Any:
    """`tensor` seen as one of the tensor class `kind`."""
    import torch

    return torch.Tensor._make_subclass(kind, tensor)


def schema_of(operator: Any) -> Any:
    """Name and arguments of an operator of `torch.ops`."""
    return operator._schema


def register_device(name: str, module: Any) -> None:
    """Make `module` the `torch.<name>` of a device type."""
    import torch

    torch._register_device_module(name, module)


def disabled_torch_function() -> Callable:
    """What a tensor class sets as its `__torch_function__` to have none."""
    import torch

    return torch._C._disabled_torch_function_impl


def map_tree(function: Callable, tree: Any) -> Any:
    """Apply a function to every leaf of nested lists, tuples and dicts."""
    from torch.utils._pytree import tree_map

    return tree_map(function, tree)


def ddp_logging_data(model: Any) -> dict[str, Any]:
    """What DDP has noted of its buckets and times."""
    return model._get_ddp_logging_data()


def is_distributed_tensor(types: Any) -> bool:
    """Whether one of these is the class of tensors that are shared out over a mesh."""
    from torch.distributed.tensor import DTensor

    return DTensor in types


def fake_store() -> Any:
    """The store of the backend "fake", which moves nothing; importing it registers that."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def fake_tensor_mode() -> Any:
    """A guard under which tensors have a shape and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)  # those of the device meta


def contents_of(module: Any) -> tuple[dict, dict, dict]:
    """A module's own parameters, buffers and submodules by name, also those that are None."""
    return module._parameters, module._buffers, module._modules


def set_contents(module: Any, parameters: dict, buffers: dict, submodules: dict) -> None:
    """Give a module these, any tensors as its parameters; no constructor need have run."""
    module._parameters, module._buffers, module._modules = parameters, buffers, submodules


def refuse_ddp(wrapper: type, why: str) -> None:
    """Give a class of modules the attribute that DDP asks for first, so that it raises."""

    def ask(module: Any) -> None:
        raise ValueError(why)

    wrapper._ddp_params_and_buffers_to_ignore = property(ask)


def flight_record() -> bytes:
    """What the flight recorder holds of this process, pickled; with the stacks of Python."""
    from torch._C import _distributed_c10d

    return _distributed_c10d._dump_fr_trace(True, True, False)


def groups() -> list[tuple[str, str, list[int]]]:
    """Name, description and ranks of each process group that this rank is in."""
    from torch.distributed import distributed_c10d

    members = distributed_c10d._world.pg_group_ranks  # with a number where it is no member
    return [
        (group.group_name, group.group_desc, sorted(ranks))
        for group, ranks in members.items()
        if isinstance(group, distributed_c10d.ProcessGroup)
    ]
