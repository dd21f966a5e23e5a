"""A fingerprint stands for every bit of every parameter."""

import copy

import pytest
import torch
from torch import nn

from mgpu_tutorial.shared.parameters import fingerprint


def mixed():
    """Layers of three dtypes, from the same seed each time."""
    torch.manual_seed(0)
    kinds = (torch.float32, torch.float64, torch.bfloat16)
    return nn.Sequential(*(nn.Linear(3, 3, dtype=kind) for kind in kinds))


def test_equal_models_have_equal_fingerprints():
    assert fingerprint(mixed()) == fingerprint(mixed())
    assert fingerprint(mixed()) != fingerprint(copy.deepcopy(mixed()[:2]))


@pytest.mark.parametrize("name", [name for name, _ in mixed().named_parameters()])
def test_the_last_bit_of_any_parameter_counts(name):
    changed = mixed()
    values = changed.get_parameter(name).data.view(-1)
    upwards = torch.full_like(values[-1:], float("inf"))
    values[-1] = torch.nextafter(values[-1:], upwards)[0]
    assert fingerprint(changed) != fingerprint(mixed())
