"""The same model and images as for model parallel."""

from tests.model_parallel.conftest import data, expected, weights  # noqa: F401
