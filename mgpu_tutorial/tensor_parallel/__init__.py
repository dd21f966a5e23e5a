"""Tensor parallel: one matrix product on several ranks, forward and backward.

In the order of the lesson: `operators` (what is sent), `layers` (linear layers in pieces, and
two products with small numbers), `vocabulary` (embedding, head and loss), `block` (a whole
model, the rest of it on slices of the sequence, and what must be the same on all ranks),
`training` (the step that all ways share, and mistakes) and `torch_plan` (PyTorch's own, with
fully_shard around it). `figures` only measures and draws.
"""
