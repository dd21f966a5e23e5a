"""A new Python finds a function of a module, and none of somebody's own `__main__`."""

import os

import pytest

from mgpu_tutorial.lab import spawn_alone


@pytest.mark.fresh
@pytest.mark.parametrize("colours", ["FORCE_COLOR", "PYTHON_COLORS"])
def test_a_function_that_cannot_be_imported_cannot_be_spawned(monkeypatch, colours):
    def local():
        """Pickled by name, and the name cannot be looked up."""

    local.__module__ = local.__qualname__ = "__main__"
    __import__("__main__").__dict__["__main__"] = local
    monkeypatch.setenv(colours, "1")  # from Python 3.13 on, tracebacks have colours
    assert spawn_alone(local).startswith("exit code 1, AttributeError: ")
    assert spawn_alone(os.getcwd) == "exit code 0, no complaint"
    assert os.environ[colours] == "1"
