"""What a cell waits for: a line and a bar under it, and what each rank says of its work.

The bar stands in a notebook only, and is emptied at the end, so that what is stored does not
depend on how long a cell took. It starts as a blank image, which nbval does not compare. On
the command line rank 0's line is printed every ten seconds instead, into a log file too.
"""

import html
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from mgpu_tutorial.lab.colours import colour
from mgpu_tutorial.lab.run import files
from mgpu_tutorial.lab.run.server import notebook_kernel

AFTER = 1.0  # seconds without a bar
EVERY = 0.2
PRINTED_EVERY = 10.0
_printing: list[bool] = []  # filled by the command line
BLANK = {
    "image/png": "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAA"
    "YAAjCB0C8AAAAASUVORK5CYII="
}


def status(text: str) -> None:
    """Show one line of this rank under the progress bar, until its next line."""
    if folder := os.environ.get(files.FOLDER):
        files.write_whole(Path(folder, files.STATUS), text)


def to_terminal() -> None:
    """Print what rank 0 says, from now on: this program is no notebook."""
    _printing.append(True)


class Line(AbstractContextManager):
    """A line under a cell, from a second after its begin; emptied at its end."""

    def __init__(self) -> None:
        self._next, self._handle = AFTER, None

    def __exit__(self, *error: object) -> None:
        if self._handle is not None:
            self._handle.update({}, raw=True)

    def draw(self, seconds: float, page: Callable[[float], str]) -> None:
        """Draw what `page` says of so many seconds, if it is time to draw."""
        if seconds < self._next or not notebook_kernel():
            return
        from IPython.display import display  # half a second, where there is no notebook

        self._next = seconds + EVERY
        self._handle = self._handle or display(BLANK, raw=True, display_id=True)
        self._handle.update({"text/html": f"<progress></progress> {page(seconds)}"}, raw=True)


class ProgressBar(Line):
    """Shows what the ranks last said; `show` is called often and draws seldom."""

    def __init__(self, homes: list[Path], timeout: float) -> None:
        super().__init__()
        self._homes, self._timeout = homes, timeout
        self._next_printed = PRINTED_EVERY

    def show(self, seconds: float) -> None:
        """Draw the state after `seconds`, or print it, if it is time to."""
        self.draw(seconds, self._page)
        if not _printing or seconds < self._next_printed:
            return
        self._next_printed = seconds + PRINTED_EVERY
        if line := files.text_of(self._homes[0] / files.STATUS):
            print(f"{seconds:6,.0f} s  {line}", file=sys.stderr, flush=True)

    def _page(self, seconds: float) -> str:
        bar = f"the ranks are at work, {seconds:.0f} s of at most {self._timeout:g} s"
        for rank, home in enumerate(self._homes):
            edge = f"border-left:0.5em solid {colour(rank)};padding-left:0.4em"
            if line := html.escape(files.text_of(home / files.STATUS)):
                bar += f'<br><b style="{edge}">rank {rank}</b> {line}'
        return bar
