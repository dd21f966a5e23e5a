"""Comparison: one network and one global batch, trained in six ways, and what each cost."""
