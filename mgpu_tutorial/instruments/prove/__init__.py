"""Does a parallel job compute what one process computes? `prove(worker, 4, …)` says it.

`proof.py`    notes what a rank computes, and compares; it needs torch alone, for use at work
`picture.py`  draws which tensors are wrong, in a notebook
"""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map  # noqa: PLC2701

from mgpu_tutorial.instruments.prove.picture import Shown
from mgpu_tutorial.instruments.prove.proof import (
    Notes,
    Proof,
    Row,
    compare,
    watched,
    watching,
)
from mgpu_tutorial.lab.run.launch import launch

__all__ = ["Proof", "Row", "prove", "watched"]


def prove(
    worker: Callable,
    ranks: int,
    *args: Any,
    alone: Callable | None = None,
    dtype: torch.dtype | None = torch.float64,
    device: str | torch.device = "cpu",
    timeout: float = 60.0,
    **kwargs: Any,
) -> Proof:
    """Whether `worker(rank, world_size, *args, **kwargs)` on N ranks is that on one.

    The worker runs unchanged: on one rank, on one rank with every number a unit in the last
    place off, which says how far rounding goes, and on `ranks`. Compared are the gradients of
    each step, the parameters after it, buffers, what is returned, and copies bit by bit. Give
    it the same global batch on any number of ranks, and two steps.

    alone    the worker of one process, if it is another one
    dtype    of models, of floating arguments, and torch's usual one; None: as they are
    """
    if dtype:
        args, kwargs = tree_map(
            lambda t: t.to(dtype) if is_floating(t) else t, (args, kwargs)
        )
    off = tree_map(lambda t: nudged(t) if is_floating(t) else t, (args, kwargs))
    how = {"device": device, "timeout": timeout}
    first = alone or worker
    one = launch(watch_worker, 1, first, args, kwargs, dtype, False, **how).results
    moved = launch(watch_worker, 1, first, *off, dtype, True, **how).results
    every = launch(watch_worker, ranks, worker, args, kwargs, dtype, False, **how).results
    proof = compare(*one, *moved, every)
    return Shown(proof.ranks, proof.rows, proof.remarks)


def is_floating(value: Any) -> bool:
    """True for a tensor of floating numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def nudged(t: Tensor) -> Tensor:
    """Each number a unit in the last place away, up or down."""
    numbers = torch.Generator().manual_seed(t.numel())
    signs = torch.randint(2, t.shape, generator=numbers) * 2 - 1
    return torch.nextafter(t, (torch.inf * signs).to(t))


def watch_worker(
    rank: int,
    world_size: int,
    worker: Callable,
    args: tuple,
    kwargs: dict,
    dtype: torch.dtype | None,
    moved: bool,
) -> Notes:
    """As one rank: run a worker whose models are watched; what was noted."""
    with watching(dtype, moved) as watch:
        watch_makers(worker)
        args = [watching_maker(each) for each in args]
        kwargs = {name: watching_maker(each) for name, each in kwargs.items()}
        returned = worker(rank, world_size, *args, **kwargs)
    return watch.notes(returned)


def watching_maker(value: Any) -> Any:
    """A function whose new models are watched as they come out; all else as it is."""
    is_function = isinstance(getattr(value, "func", value), FunctionType)
    if not is_function or value is watched:
        return value

    @functools.wraps(value)
    def making(*args: Any, **kwargs: Any) -> Any:
        made = value(*args, **kwargs)
        is_new = not any(isinstance(a, nn.Module) for a in (*args, *kwargs.values()))
        return watched(made) if isinstance(made, nn.Module) and is_new else made

    return making


def watch_makers(worker: Callable) -> None:
    """The same for the functions that a worker names, in this process."""
    function = inspect.unwrap(getattr(worker, "func", worker))
    around = getattr(function, "__globals__", {})
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    places = [around, *(vars(around[n]) for n in names if is_own_module(around.get(n)))]
    for name in names:
        for place in places:  # as `new_model`, and as `models.new_model`
            if isinstance(place.get(name), FunctionType):
                place[name] = watching_maker(place[name])


def is_own_module(value: Any) -> bool:
    """True for a module of a program, but not for one of torch."""
    return isinstance(value, ModuleType) and not value.__name__.startswith("torch")
