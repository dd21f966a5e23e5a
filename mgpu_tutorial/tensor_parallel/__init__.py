"""Tensor parallel: one matrix product on several ranks, forward and backward.

In the order of the lesson: `product` (two products with small numbers), `operators` (what
is sent), `layers` (linear layers in pieces), `vocabulary` (embedding, head and loss),
`block` (a whole model), `sequence` (the rest of it on slices of the sequence), `dropout`,
`training` (the step that all ways share), `mistakes`, `torch_plan` (PyTorch's own) and
`mesh` (with fully_shard around it). Only measuring or drawing: `rounding_measurements`,
`measurements`, `exercises` and `drawings`.
"""
