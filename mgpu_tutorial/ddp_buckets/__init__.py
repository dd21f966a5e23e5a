"""DDP from the naive loop to buckets: the same gradients, sooner and in fewer calls."""
