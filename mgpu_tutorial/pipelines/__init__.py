"""Pipelines: stages on ranks that pass micro-batches on, in the order of a schedule."""
