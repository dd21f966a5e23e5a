"""The same model and images as for model parallel."""

from tests.model_parallel.conftest import data, expected, one_core_for_each_device, weights  # noqa: F401
