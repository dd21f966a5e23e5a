"""Tensor parallel in practice: `vocabulary`, `sequence`, and PyTorch's own `torch_plan`."""
