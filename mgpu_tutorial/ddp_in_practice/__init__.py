"""DistributedDataParallel in a training script: what fails there, and what it costs."""
