"""Sharding: optimizer state, gradients and parameters that no rank holds whole."""
