"""The bars are as long as the gigabytes, up to the end of the axis, and say which fit."""

import re

from mgpu_tutorial.sharding.figures import FILLS, bars

ZERO = [0.0] * 3


def lengths(drawing, fill):
    """Of the boxes of one fill, but for the one of the legend, which stands first."""
    found = re.findall(
        rf"width='([\d.]+)' height='[^']*' rx='0'[^>]*fill='{fill}'", drawing.svg()
    )
    return [float(wide) for wide in found[1:]]


def test_bars_are_to_scale_and_end_where_the_axis_ends():
    kinds = list(FILLS)
    held = {"half": [40.0, *ZERO], "full": [80.0, *ZERO], "more": [100.0, 500.0, 0.0, 0.0]}
    drawing = bars({k: dict(zip(kinds, v, strict=True)) for k, v in held.items()}, limit=80)
    half, full, more = lengths(drawing, FILLS["parameters"])
    assert abs(full - 2 * half) < 0.01
    assert abs(more / half - 2.5) < 0.01
    assert abs(more + lengths(drawing, FILLS["gradients"])[2] - 3 * full) < 0.01
    assert "half 40.0, full 80.0, more 600.0. It fits with half and full." in drawing.alt
    assert "600 GB →" in drawing.svg() and "40 GB →" not in drawing.svg()


def test_nothing_fits():
    row = dict.fromkeys(FILLS, 30.0)
    assert bars({"a": row}, 80).alt.endswith("a 120.0. Nothing fits.")
