"""The picture of an answer: a lane for each rank or link, and bars along one axis."""

from collections.abc import Sequence

from mgpu_tutorial.lab.colours import tone
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, PAPER, Drawing

WIDTH, LEFT, LANE = 640, 110, 24
MOST_LANES, MOST_BARS = 64, 400  # that are drawn, and of each lane
IDLE = -1  # the colour of a bar that only waits

Bar = tuple[float, float, str, int]  # begin, end, text, colour of a rank or IDLE


def lanes(rows: Sequence[tuple[str, Sequence[Bar]]], title: str, unit: str) -> Drawing:
    """Bars on lanes, all on one scale; of an enormous answer only the beginning."""
    if len(rows) > MOST_LANES or any(len(bars) > MOST_BARS for _, bars in rows):
        title += f" (drawn: {MOST_LANES} lanes of up to {MOST_BARS} bars)"
        rows = [(name, bars[:MOST_BARS]) for name, bars in rows[:MOST_LANES]]
    last = max((bar[1] for _, bars in rows for bar in bars), default=1) or 1
    scale, height = WIDTH / last, 34 + LANE * len(rows)
    words = [f"{name}: " + " ".join(bar[2] for bar in bars if bar[2]) for name, bars in rows]
    alt = f"{title}, as {len(rows)} lanes of bars: {rows[0][0]} to {rows[-1][0]}."
    drawing = Drawing(LEFT + WIDTH + 30, height + 28, "\n".join([title, *words]), alt)
    drawing.label(LEFT, 20, title, 14, anchor="start", weight="bold")
    for row, (name, bars) in enumerate(rows):
        top = 30 + LANE * row
        drawing.label(LEFT - 8, top + 16, name, 12, anchor="end")
        drawing.line(LEFT, top + LANE, LEFT + WIDTH, top + LANE, FAINT, 0.4)
        for begin, end, text, colour in bars:
            left, wide = LEFT + scale * begin, max(scale * (end - begin) - 1, 0.5)
            fill, on = (PAPER, INK) if colour < 0 else (tone(colour).fill, tone(colour).on)
            edge, dash = (FAINT, "3 2") if colour < 0 else (fill, "")
            drawing.box(left, top + 3, wide, LANE - 6, edge, fill, 0.6, dash, radius=2)
            if wide > 7 * len(text) and text:
                drawing.label(left + wide / 2, top + 16, text, 11, on)
    bottom = 34 + LANE * len(rows)
    for at in ticks(last):
        drawing.line(LEFT + scale * at, bottom - 4, LEFT + scale * at, bottom + 1, INK, 0.8)
        drawing.label(LEFT + scale * at, bottom + 14, f"{at:,.10g}", 11)
    drawing.label(LEFT - 8, bottom + 14, unit, 11, anchor="end")
    return drawing


def ticks(last: float) -> list[float]:
    """Up to nine round numbers from 0 on."""
    steps = (base * 10**power for power in range(12) for base in (1, 2, 5))
    step = next(step for step in steps if last / step <= 8)
    return [step * i for i in range(int(last / step) + 1)]
