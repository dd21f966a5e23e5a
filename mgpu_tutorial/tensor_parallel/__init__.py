"""Tensor parallel: f, g and the linear layers in `layers`, a transformer's in `block`."""
