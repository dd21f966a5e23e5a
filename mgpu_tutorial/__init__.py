"""Runnable workers for the multi-GPU training notebooks, one module a chapter."""

__version__ = "0.1.0"

# First of all: in a notebook the lab's fork server then imports torch while we do.
import mgpu_tutorial.lab  # noqa: F401
