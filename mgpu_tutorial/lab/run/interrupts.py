"""Ctrl-C may end a launch only where somebody stops its ranks."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Ctrl-C during a launch: it raises inside `allowed()`, and waits everywhere else.

    Python raises KeyboardInterrupt between any two instructions, so also after the ranks
    have started and before anybody has a name for them, or while they are being stopped.
    Nobody would end these ranks. Further Ctrl-C while the first is being obeyed are one
    with it.
    """

    def __enter__(self) -> "Interrupts":
        self._allowed, self._waiting, self._handler = False, False, None
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._arrive)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._handler:
            signal.signal(signal.SIGINT, self._handler)
            if self._waiting and not (kind and issubclass(kind, KeyboardInterrupt)):
                self._handler(signal.SIGINT, None)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Here Ctrl-C may raise, because the caller stops the ranks."""
        try:
            self._allowed = True
            if self._waiting:
                self._arrive(signal.SIGINT, None)
            yield
        finally:
            self._allowed = False

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        if self._allowed:
            self._allowed = self._waiting = False
            self._handler(number, frame)
            self._allowed = True  # a handler of the user's own may return
        else:
            self._waiting = True
