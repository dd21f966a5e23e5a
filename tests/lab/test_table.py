"""A column is aligned alike as text and on a page."""

import re

from mgpu_tutorial.lab import Table


def test_only_a_column_of_numbers_alone_is_aligned_right():
    table = Table(["n", "both"], [[1, 2], [30, "four"]])
    assert repr(table).splitlines() == [" n  both", " 1  2", "30  four"]
    sides = re.findall(r'<td style="text-align:(\w+)', table._repr_html_())
    assert sides == ["right", "left"] * 2
