"""Draw the picture of the README from a run: python tools/picture.py writes docs/ring.svg.

Four ranks sum their numbers around a ring, the film of chapter 03. A browser plays it
three times and stays on the last frame; with reduced motion, and in print, it stands still.
"""

from pathlib import Path

from mgpu_tutorial.collectives.figures import ring_film
from mgpu_tutorial.lab import film, launch
from mgpu_tutorial.lab.draw.drawing import animated

FILE = Path(__file__).parent.parent / "docs" / "ring.svg"

if __name__ == "__main__":
    report = launch(ring_film, 4, trace=True, device="cpu")
    FILE.write_text(animated(film(report).frames).svg() + "\n", "utf-8")
