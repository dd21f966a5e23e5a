"""Numbers are written as people say them."""

import pytest

from mgpu_tutorial.lab.words import bytes_text


@pytest.mark.parametrize(
    "nbytes, text", [(0, "0 B"), (4, "4 B"), (1024, "1 KiB"), (1536 * 1024, "1.5 MiB")]
)
def test_sizes_are_written_as_people_say_them(nbytes, text):
    assert bytes_text(nbytes) == text
