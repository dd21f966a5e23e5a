"""Distributed SGD: each rank computes a gradient, they average, all take the same step."""
