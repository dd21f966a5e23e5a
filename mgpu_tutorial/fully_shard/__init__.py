"""PyTorch's `fully_shard` at work: units, steps, meshes, files, and what goes on top.

`units` has the model and the plan, `steps` what a step sets, `files` weights and checkpoints,
`large` adapters. `figures` only measures; `builds` says what the
reader's functions must do.
"""
