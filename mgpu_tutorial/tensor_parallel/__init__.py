"""Tensor parallel: one matrix product on several ranks, forward and backward.

`layers` has all that is sent: the operators f and g, and the linear layers between them.
`block` puts these layers into a block of a transformer, and trains it.
"""
