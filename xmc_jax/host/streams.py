"""Standard streams that may be closed, full, a pipe that nobody reads, or not UTF-8."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

from xmc_jax.host.signals import PIPE_CLOSED

lost: OSError | None = None  # why standard output could not be written to


class _Stream(io.TextIOWrapper):
    """A standard stream whose loss is no traceback."""

    def __init__(self, number: int, opened: Any, *, needed: bool) -> None:
        """Over the same file as a stream that Python opened, or did not, for it was closed.

        Args:
          number: of its file.
          opened: that stream, or None; characters that its encoding lacks are written as escapes.
          needed: whether the program ends when it cannot be written to.
        """
        encoding = opened.encoding if opened else "utf-8"
        lines = number == 2 or (opened and (opened.line_buffering or opened.write_through))
        file = open(number, "wb", closefd=False)
        super().__init__(file, encoding, "backslashreplace", line_buffering=bool(lines))
        self.needed = needed

    def write(self, text: str) -> int:
        """As any stream."""
        try:
            return super().write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        """As any stream."""
        try:
            super().flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """What is still to be written goes nowhere; of standard output it is said once."""
        global lost
        _to_nowhere(self.fileno())
        if self.fileno() == 1:
            lost = error
            goes_on = "" if self.needed else " The run goes on without it."
            print(f"standard output {_reason(error)}{goes_on}", file=sys.stderr)
            if self.needed:
                raise SystemExit(code())


def code() -> int:
    """Exit code where standard output was lost: a shell's for a closed pipe, else 1; 0 if not."""
    if lost is None:
        return 0
    return PIPE_CLOSED if lost.errno == errno.EPIPE else 1


def prepare() -> None:
    """Open what is closed, before a file gets its number; have losses told in a word.

    Reading and writing a stream that was closed fail as they are tried, but for standard error.
    """
    for number, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # it gets the lowest number that is free: this one
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = _Stream(1, sys.stdout, needed=True)
    sys.stderr = _Stream(2, sys.stderr, needed=False)


def spare_output() -> None:
    """Let the program go on where standard output is lost; one that was closed is not missed."""
    if isinstance(sys.stdout, _Stream):
        sys.stdout.needed = False
        try:
            os.write(1, b"")
        except OSError as error:
            if error.errno == errno.EBADF:
                _to_nowhere(1)


def write_utf_8() -> None:
    """Write standard output in UTF-8, whatever the locale says."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")


def check(source: str, target: str) -> None:
    """Try the standard streams where ``-`` stands for them.

    Raises:
      OSError: one of them is closed or otherwise of no use.
    """
    try:
        if source == "-":
            os.read(0, 0)
    except OSError as error:
        raise OSError(f"standard input {_reason(error)} Give a file: --input=FILE.") from error
    try:
        if target == "-":
            os.write(1, b"")
    except OSError as error:
        raise OSError(f"standard output {_reason(error)} Give a file: --output=FILE.") from error


def _to_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def _reason(error: OSError) -> str:
    if error.errno == errno.EPIPE:
        return "was closed before its end."
    if error.errno == errno.EBADF:
        return "is closed."
    return f"cannot be used: {error.strerror}."
