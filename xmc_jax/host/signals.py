"""SIGTERM and Ctrl-C as requests that the training loop reads when its state can be saved."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


class Interrupted(SystemExit):
    """A signal asked for the end; the state was saved."""


class StopRequests:
    """Turns SIGTERM and Ctrl-C into a request that the loop reads between steps."""

    def __enter__(self) -> StopRequests:
        """Install the handlers."""
        self.signal, self._at_once = 0, False
        self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exc: object) -> None:
        """Put the old handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Within it a signal raises `Interrupted` by itself: nothing is there to be saved."""
        self._at_once = True
        try:
            if self.signal:
                raise Interrupted(128 + self.signal)
            yield
        finally:
            self._at_once = False

    def _ask(self, number: int, frame: object) -> None:
        if self.signal:  # a second Ctrl-C does not wait
            raise KeyboardInterrupt
        self.signal = number
        if self._at_once:
            raise Interrupted(128 + number)
