"""Signals as requests to stop that the training loop reads when its state can be saved."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

PIPE_CLOSED = 128 + signal.SIGPIPE  # what a shell says of a program whose reader went away


class Interrupted(SystemExit):
    """A signal asked for the end; the state was saved."""


class StopRequests:
    """Turns SIGTERM, SIGHUP and Ctrl-C into a request that the loop reads between steps."""

    def __enter__(self) -> StopRequests:
        """Install the handlers; a SIGHUP that is ignored (nohup) stays so."""
        self.signal, self._at_once, self._saving = 0, False, False
        asked = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            asked.append(signal.SIGHUP)
        self._before = {s: signal.signal(s, self._ask) for s in asked}
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

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Within it a second signal changes nothing: the end is near."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def _ask(self, number: int, frame: object) -> None:
        if self.signal and not self._saving:  # a second one does not wait
            raise KeyboardInterrupt(number)
        self.signal = self.signal or number
        if self._at_once:
            raise Interrupted(128 + number)
