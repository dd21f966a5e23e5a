"""The colours of ranks, threads and devices, and of what memory holds."""

import re
from typing import NamedTuple


class Tone(NamedTuple):
    """A colour as a fill or a line, as text on white, and what is written on the fill."""

    fill: str
    text: str
    on: str


# Close to Okabe and Ito's colours, told apart by most colour-blind readers and in grey. Words
# on a fill keep WCAG's contrast of 4.5 to 1 in the dark too, where a filter turns the drawing
# round (custom.css); as text each colour is as much darker as white paper needs.
TONES = (
    Tone("#0072B2", "#0072B2", "#ffffff"),
    Tone("#C35000", "#B75100", "#ffffff"),
    Tone("#00825A", "#007E5C", "#ffffff"),
    Tone("#E691BE", "#995B7D", "#000000"),
    Tone("#DCA532", "#8E6708", "#000000"),
    Tone("#5AB9F0", "#387597", "#000000"),
    Tone("#7F3C8D", "#7F3C8D", "#ffffff"),
    Tone("#666666", "#666666", "#ffffff"),
)
MEMORY = {  # by what the bytes are for; of these no rank has one
    "parameters": "#5e6b7a",
    "gradients": "#c9688f",
    "optimizer": "#74ad5e",
    "buffers": "#9b7fc4",
    "activations": "#bfa640",
}
NAMELESS = Tone("#444444", "#444444", "#ffffff")
COLOURS = tuple(tone.fill for tone in TONES)


def tone(rank: int) -> Tone:
    """The colour of a rank."""
    return TONES[rank % len(TONES)]


def tone_of(name: str) -> Tone:
    """The colour of "rank 1" or "cuda:1" by its number; grey for a name without one."""
    number = re.search(r"\d+$", name)
    return tone(int(number[0])) if number else NAMELESS


def colour(rank: int) -> str:
    """What fills the boxes of a rank, and draws its lines."""
    return tone(rank).fill
