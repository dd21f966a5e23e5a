"""How far the ranks are: what a worker says of it, and the bar that shows it.

It stands in a notebook only, and is emptied at the end: what is stored must not depend on how
long a cell took. It starts as a blank image, which nbval does not compare.
"""

import html
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mgpu_tutorial.lab.colours import colour
from mgpu_tutorial.lab.run import files
from mgpu_tutorial.lab.run.server import notebook_kernel

AFTER = 1.0  # seconds without a bar
EVERY = 0.2
BLANK = {
    "image/png": "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAA"
    "YAAjCB0C8AAAAASUVORK5CYII="
}


# In a rank


def progress(items: Any, total: int | None = None) -> Iterator:
    """Iterate over `items` and tell the kernel how far this rank is.

    `total` is needed where `items` has no length. Outside `launch` it only iterates.
    """
    total = total if total is not None else len(items)
    folder = os.environ.get(files.FOLDER)
    with open(Path(folder, files.PROGRESS) if folder else os.devnull, "wb") as file:
        for done, item in enumerate(items):
            os.pwrite(file.fileno(), f"{done} {total}\n".encode().ljust(40), 0)
            yield item
        os.pwrite(file.fileno(), f"{total} {total}\n".encode().ljust(40), 0)


def status(text: str) -> None:
    """Show one line of this rank under the progress bar, until its next line."""
    if folder := os.environ.get(files.FOLDER):
        files.write_whole(Path(folder, files.STATUS), text)


# In the kernel


class ProgressBar:
    """Shows how far the ranks are; `show` is called often and draws seldom."""

    def __init__(self, folder: Path, world_size: int, timeout: float) -> None:
        self._homes = [files.home_of(folder, rank) for rank in range(world_size)]
        self._timeout = timeout
        self._next = AFTER
        self._handle = None

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *error: object) -> None:
        if self._handle is not None:
            self._handle.update({}, raw=True)

    def show(self, seconds: float) -> None:
        """Draw the state after `seconds`, if it is time to draw."""
        from IPython.display import display

        if seconds < self._next or not notebook_kernel():
            return
        self._next = seconds + EVERY
        texts = [files.text_of(home / files.PROGRESS).split() for home in self._homes]
        done, total = (sum(int(text[i]) for text in texts if text) for i in (0, 1))
        lines = [files.text_of(home / files.STATUS) for home in self._homes]
        if self._handle is None:
            self._handle = display(BLANK, raw=True, display_id=True)
        values = f'value="{done}" max="{total}"' if total else ""
        text = f"{done} of {total} steps" if total else "the ranks are at work"
        limit = f"{seconds:.0f} s of at most {self._timeout:g} s"
        bar = f"<progress {values}></progress> {text}, {limit}"
        for rank, line in enumerate(lines):
            edge = f"border-left:0.5em solid {colour(rank)};padding-left:0.4em"
            text = f'<br><b style="{edge}">rank {rank}</b> {html.escape(line)}'
            bar += text if line else ""
        self._handle.update({"text/html": bar}, raw=True)
