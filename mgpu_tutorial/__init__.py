"""Runnable workers for the multi-GPU training notebooks, one module a chapter."""

__version__ = "0.1.0"
