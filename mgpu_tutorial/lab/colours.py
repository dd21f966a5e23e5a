"""The colour of a rank, a thread or a device: the same in every panel and drawing."""

import re

# Okabe and Ito's colours, told apart by most colour-blind readers and in grey.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#B8860B",
    "#56B4E9",
    "#7F3C8D",
    "#666666",
)


def colour(rank: int) -> str:
    """The colour of a rank, the same in every panel and drawing."""
    return COLOURS[rank % len(COLOURS)]


def colour_of(name: str) -> str:
    """The colour of "rank 1" or "cuda:1" by its number; grey for a name without one."""
    number = re.search(r"\d+$", name)
    return colour(int(number[0])) if number else "#444444"
