"""Every private name of Python and PyTorch that the package uses, one line each.

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


def tensor_parts() -> tuple[Callable, Callable, Any]:
    """Of tensors that pretend a device: torch's switch-off, parser of `to`, and guard."""
    import torch

    return (
        torch._C._disabled_torch_function_impl,
        torch._C._nn._parse_to,
        torch._C._DisableTorchDispatch,
    )
