"""Numbers and lists as people say them."""

from collections.abc import Sequence


def bytes_text(nbytes: float) -> str:
    """A number of bytes as people say it: 16 B, 4 KiB, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"


def in_a_row(things: Sequence[object]) -> str:
    """Things as people list them: a, b and c."""
    *first, last = map(str, things)
    return f"{', '.join(first)} and {last}" if first else last
