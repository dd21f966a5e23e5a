"""PyTorch's `fully_shard` at work: `units` has plan, steps and adapters, `files` weights."""
