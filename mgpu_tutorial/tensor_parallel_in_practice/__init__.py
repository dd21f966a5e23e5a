"""Tensor parallel in practice: `vocabulary` and `sequence`."""
