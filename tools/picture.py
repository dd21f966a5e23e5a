"""Draw the picture of the README from a run: python tools/picture.py writes docs/ring.svg.

Four ranks sum their numbers around a ring, the drawings of chapter 03 one after the other. A
browser plays them three times and stays on the last; with reduced motion, and in print, the
picture stands still.
"""

import sys
from pathlib import Path

from mgpu_tutorial.collectives import ring_step_by_step
from mgpu_tutorial.lab import launch, stepper

FILE = Path(__file__).parent.parent / "docs" / "ring.svg"
SECONDS, ROUNDS = 1.3, 3
HELD = 2  # the last drawing stays longer
FONT = "font-family='Helvetica,Arial,sans-serif'"
COMMAND = "launch(ring_step_by_step, 4)"


def animated(frames: list) -> str:
    """One SVG that shows the frames in turn; without animation the last."""
    width = max(frame.width for frame in frames)
    height, head = max(frame.height for frame in frames), 34
    last, turns = len(frames) - 1, len(frames) - 1 + HELD
    style, shown = "", ""
    for i, frame in enumerate(frames):
        begin, end = i / turns * 100, (100 if i == last else (i + 1) / turns * 100)
        before = f"0%,{begin:.3f}%{{visibility:hidden}}" if i else ""
        after = f"{end:.3f}%,100%{{visibility:hidden}}" if i < last else ""
        style += (
            f"@keyframes k{i}{{{before}{begin:.3f}%,{end:.3f}%{{visibility:visible}}{after}}}"
            f".f{i}{{animation:k{i} {turns * SECONDS:g}s step-end {ROUNDS} both}}"
        )
        hidden = "" if i == last else " visibility='hidden'"
        label = (
            f"<text x='{width - 14:g}' y='23' font-size='14' fill='#1a1a1a' {FONT} "
            f"text-anchor='end'>step {i} of {last}</text>"
        )
        moved = f"<g transform='translate(0 {head})'>{''.join(frame.parts)}</g>"
        shown += f"<g class='f{i}'{hidden}>{label}{moved}</g>"
    title = (
        f"A ring all-reduce in {last} steps: four ranks pass on and add up chunks of four "
        "numbers, until every rank holds the sum of all."
    )
    command = (
        f"<text x='14' y='23' font-size='14' fill='#00457a' font-weight='bold' "
        f"font-family='monospace'>{COMMAND}</text>"
    )
    whole = height + head
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:g}' height='{whole:g}' "
        f"viewBox='0 0 {width:g} {whole:g}' role='img'><title>{title}</title>"
        f"<style>@media (prefers-reduced-motion: no-preference){{{style}}}</style>"
        f"<rect width='{width:g}' height='{whole:g}' rx='6' fill='#ffffff'/>"
        f"{command}{shown}</svg>\n"
    )


def main() -> int:
    report = launch(ring_step_by_step, 4, trace=True, device="cpu")
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(animated(stepper(report).frames), encoding="utf-8")
    print(f"docs/{FILE.name}: {FILE.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
