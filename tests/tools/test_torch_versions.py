"""make test-versions: the range that pyproject promises, and the pins of each end of it."""

import re
from pathlib import Path

import pytest

from tools import versions

ROOT = Path(__file__).parents[2]


def test_the_two_ends_are_read_from_pyproject_and_the_pins():
    project, pins = (
        (ROOT / n).read_text("utf-8") for n in ("pyproject.toml", "constraints.txt")
    )
    lowest, pinned = versions.promised(project, pins)
    assert f"\ntorch=={pinned}\n" in pins and f'"torch>={lowest},' in project


@pytest.mark.parametrize("pinned", ["2.14.0", "2.16.0"])
def test_a_pin_outside_of_the_last_release_that_is_promised_is_refused(pinned):
    with pytest.raises(
        ValueError, match=f"torch<2.16, and torch {re.escape(pinned)} is pinned"
    ):
        versions.promised('"torch>=2.13.0,<2.16",', f"torch=={pinned}\n")
    assert versions.promised('"torch>=2.13.0,<2.16",', "torch==2.15.1\n") == (
        "2.13.0",
        "2.15.1",
    )


def test_only_the_two_pins_change():
    pins = "numpy==1\ntorch==2.14.1\ntorchvision==0.29.1\ntqdm==4\n"
    expected = "numpy==1\ntorch==2.13.0\ntorchvision==0.28.0\ntqdm==4\n"
    assert versions.constraints_for("2.13.0", pins) == expected
