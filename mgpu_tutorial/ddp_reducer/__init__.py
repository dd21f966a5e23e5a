"""Inside DistributedDataParallel: which gradients travel together, when, and as what."""
