"""Numbers and lists as people say them."""

from collections.abc import Sequence


def bytes_text(nbytes: float) -> str:
    """A number of bytes as people say it: 16 B, 4 KiB, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.3g} {unit}" if unit != "B" else f"{nbytes:.0f} B"
        nbytes /= 1024
    raise AssertionError


def in_a_row(things: Sequence[object]) -> str:
    """Things as people list them: a, b and c."""
    *first, last = map(str, things)
    return f"{', '.join(first)} and {last}" if first else last
