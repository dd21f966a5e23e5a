"""What the ranks are doing: a line that a worker says of it, and the bar that shows it.

It stands in a notebook only, and is emptied at the end, so that what is stored does not
depend on how long a cell took. It starts as a blank image, which nbval does not compare.
"""

import html
import os
from contextlib import AbstractContextManager
from pathlib import Path

from mgpu_tutorial.lab.colours import colour
from mgpu_tutorial.lab.run import files
from mgpu_tutorial.lab.run.server import notebook_kernel

AFTER = 1.0  # seconds without a bar
EVERY = 0.2
BLANK = {
    "image/png": "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAA"
    "YAAjCB0C8AAAAASUVORK5CYII="
}


def status(text: str) -> None:
    """Show one line of this rank under the progress bar, until its next line."""
    if folder := os.environ.get(files.FOLDER):
        files.write_whole(Path(folder, files.STATUS), text)


class ProgressBar(AbstractContextManager):
    """Shows what the ranks last said; `show` is called often and draws seldom."""

    def __init__(self, homes: list[Path], timeout: float) -> None:
        self._homes, self._timeout = homes, timeout
        self._next, self._handle = AFTER, None

    def __exit__(self, *error: object) -> None:
        if self._handle is not None:
            self._handle.update({}, raw=True)

    def show(self, seconds: float) -> None:
        """Draw the state after `seconds`, if it is time to draw."""
        from IPython.display import display

        if seconds < self._next or not notebook_kernel():
            return
        self._next = seconds + EVERY
        self._handle = self._handle or display(BLANK, raw=True, display_id=True)
        limit = f"{seconds:.0f} s of at most {self._timeout:g} s"
        bar = f"<progress></progress> the ranks are at work, {limit}"
        for rank, home in enumerate(self._homes):
            edge = f"border-left:0.5em solid {colour(rank)};padding-left:0.4em"
            if line := html.escape(files.text_of(home / files.STATUS)):
                bar += f'<br><b style="{edge}">rank {rank}</b> {line}'
        self._handle.update({"text/html": bar}, raw=True)
