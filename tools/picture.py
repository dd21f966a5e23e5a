"""Draw the picture of the README from a run: python tools/picture.py writes docs/ring.svg.

Four ranks sum their numbers around a ring, the drawings of chapter 03 one after the other. A
browser plays them three times and stays on the last; with reduced motion, and in print, the
picture stands still.
"""

from pathlib import Path

from mgpu_tutorial.collectives.figures import ring_step_by_step
from mgpu_tutorial.lab import launch, stepper

FILE = Path(__file__).parent.parent / "docs" / "ring.svg"
SECONDS, ROUNDS = 1.3, 3
HELD = 2  # the last drawing stays longer
HEAD = 34
TEXT = "y='23' font-size='14'"
FONT = "font-family='Helvetica,Arial,sans-serif'"
MOTION = "@media (prefers-reduced-motion: no-preference)"


def animated(frames: list) -> str:
    """One SVG that shows the frames in turn; without animation the last."""
    width = max(frame.width for frame in frames)
    height = max(frame.height for frame in frames) + HEAD
    last, turns = len(frames) - 1, len(frames) - 1 + HELD
    style = shown = ""
    for i, frame in enumerate(frames):
        begin, end = i / turns * 100, (100 if i == last else (i + 1) / turns * 100)
        before = f"0%,{begin:.3f}%{{visibility:hidden}}" if i else ""
        after = f"{end:.3f}%,100%{{visibility:hidden}}" if i < last else ""
        style += (
            f"@keyframes k{i}{{{before}{begin:.3f}%,{end:.3f}%{{visibility:visible}}{after}}}"
            f".f{i}{{animation:k{i} {turns * SECONDS:g}s step-end {ROUNDS} both}}"
        )
        hidden = "" if i == last else " visibility='hidden'"
        shown += (
            f"<g class='f{i}'{hidden}><text x='{width - 14:g}' {TEXT} fill='#1a1a1a' {FONT} "
            f"text-anchor='end'>step {i} of {last}</text>"
            f"<g transform='translate(0 {HEAD})'>{''.join(frame.parts)}</g></g>"
        )
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:g}' height='{height:g}' "
        f"viewBox='0 0 {width:g} {height:g}' role='img'><title>A ring all-reduce in {last} "
        "steps: four ranks pass on and add up chunks of four numbers, until every rank holds "
        f"the sum of all.</title><style>{MOTION}{{{style}}}</style>"
        f"<rect width='{width:g}' height='{height:g}' rx='6' fill='#ffffff'/>"
        f"<text x='14' {TEXT} fill='#00457a' font-weight='bold' font-family='monospace'>"
        f"launch(ring_step_by_step, 4)</text>{shown}</svg>\n"
    )


if __name__ == "__main__":
    report = launch(ring_step_by_step, 4, trace=True, device="cpu")
    FILE.write_text(animated(stepper(report).frames), "utf-8")
