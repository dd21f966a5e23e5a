"""What `make quick` leaves out although no interpreter is started.

A claim that is made once more, on other ranks or a whole ResNet-50; training on a mesh of
four; and what an exercise says of wrong answers. `make check` and `make test` take it all.
"""

import pytest

thorough = pytest.mark.thorough


def again(*values: object) -> object:
    """A case of `parametrize` that repeats a claim, on other ranks or a larger network."""
    return pytest.param(*values, marks=thorough)


# Numbers of ranks. Two cannot tell left from right in a ring; their mean is like any other.
MESSAGES = [1, 2, 3, again(4)]
TRAINED = [2, again(3), again(4)]
