"""Ctrl-C may end a launch only where somebody stops its ranks."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupts:
    """Ctrl-C during a launch: it raises inside `allowed()`, and waits everywhere else.

    Python raises KeyboardInterrupt between any two instructions, so also after the ranks
    have started and before anybody has a name for them, or while they are being stopped.
    Nobody would end these ranks. Further Ctrl-C while the first is being obeyed are one
    with it. A program's own handler of SIGINT stays as it is.
    """

    def __enter__(self) -> "Interrupts":
        self._allowed, self._waiting = False, False
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._ours = usual and threading.current_thread() is threading.main_thread()
        if self._ours:
            signal.signal(signal.SIGINT, self._arrive)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # One that came outside of `allowed()` raises now, unless one is on its way.
            if self._waiting and not (kind and issubclass(kind, KeyboardInterrupt)):
                raise KeyboardInterrupt

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Here Ctrl-C may raise, because the caller stops the ranks."""
        try:
            self._allowed = True
            if self._waiting:
                self._arrive()
            yield
        finally:
            self._allowed = False

    def _arrive(self, *_: object) -> None:
        """Handle SIGINT: raise inside `allowed()`, once; else remember it for later."""
        self._waiting = not self._allowed
        if self._allowed:
            self._allowed = False
            raise KeyboardInterrupt
