"""Tensor parallel: one matrix product on several ranks, forward and backward.

In the order of the lesson: `product` (two products with small numbers), `operators` (what
is sent), `layers` (linear layers in pieces), `vocabulary` (embedding, head and loss),
`copies` (what must be the same on all ranks), `block` (a whole model, and the rest of it on
slices of the sequence), `training` (the step that all ways share, and mistakes) and
`torch_plan` (PyTorch's own, with fully_shard around it). `figures` only measures and draws.
"""
