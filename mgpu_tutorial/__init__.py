"""Runnable workers for the multi-GPU training notebooks, a file or a folder per chapter."""

from importlib import import_module
from typing import Any

# Importing it in a notebook starts the fork server, which imports torch while a chapter does.
import mgpu_tutorial.lab  # noqa: F401

__version__ = "0.1.0"

# In the order of the notebooks. Their numbers stand on the notebooks only.
CHAPTERS = (
    "processes_and_ranks",
    "point_to_point",
    "nonblocking",
    "collectives",
    "the_machine",
    "data_partitioning",
    "distributed_sgd",
    "data_parallel",
    "ddp_buckets",
    "ddp_reducer",
    "ddp_in_practice",
    "when_it_breaks",
    "survival",
    "mixed_precision",
    "comparison",
    "sharding",
    "fully_shard",
    "model_parallel",
    "pipelines",
    "tensor_parallel",
    "tensor_parallel_in_practice",
    "long_sequences",
    "experts",
    "step_time",
    "at_scale",
    "wrong_gradient",
    "language_model",
    "challenges",
)

# The front door: each is imported when it is asked for.
HOMES = {"launch": "lab", "price": "instruments.price", "prove": "instruments.prove"}
HOMES["watched"] = HOMES["prove"]


def __getattr__(name: str) -> Any:
    """`from mgpu_tutorial import launch, prove, price`."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
