"""Tensor parallel in practice: what else is cut, and how much the result may differ.

`vocabulary` cuts embedding, head and loss of a language model, `sequence` what lies between
the products, and `torch_plan` does the same with PyTorch's own tools, on a mesh too.
"""
