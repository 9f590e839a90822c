"""Opening data files: one kind of error, compressed or not."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

_MARK = codecs.BOM_UTF8
_BLOCK_BYTES = 1 << 24
_MOST_BAD_ROWS = 20
BROKEN = (EOFError, gzip.BadGzipFile, zlib.error)


class DataError(ValueError):
    """A data file is missing, broken, or does not fit the others."""


def problem(path: Path, line: int | None, found: str, expected: str, advice: str) -> DataError:
    """Returns the error that names file, line, what was found, what was expected, what to do."""
    where = str(path) if line is None else f"{path}, line {line}"
    return DataError(f"{where}: found {found}; expected {expected}. {advice}")


class BadRows:
    """Errors of single rows, collected so that one run names them all, or the first 20."""

    def __init__(self) -> None:
        """None so far."""
        self._errors: list[DataError] = []

    def add(self, error: DataError) -> None:
        """Keep an error and go on.

        Raises:
          DataError: these are enough.
        """
        self._errors.append(error)
        if len(self._errors) == _MOST_BAD_ROWS:
            self.check()

    def check(self) -> None:
        """Refuse the file if a row was bad.

        Raises:
          DataError: the error of the one bad row, or a list.
        """
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            most = len(self._errors) == _MOST_BAD_ROWS
            number = f"the first {_MOST_BAD_ROWS}" if most else f"{len(self._errors)}"
            rows = "\n".join(f"  {error}" for error in self._errors)
            raise DataError(f"{number} bad rows:\n{rows}")


def listed(numbers: list[int]) -> str:
    """Returns the first few of a list of line numbers, for a message."""
    return ", ".join(str(number) for number in numbers[:5]) + (", ..." if len(numbers) > 5 else "")


def open_binary(path: Path) -> BinaryIO:
    """Opens a file for reading, through gzip where its first bytes say so."""
    file = open(path, "rb")  # once: what a pipe gives is not given again
    if file.peek(2)[:2] != b"\x1f\x8b":
        return file
    file.close()
    return cast(BinaryIO, gzip.open(path, "rb"))


def truncated(path: Path, line: int | None, error: Exception) -> DataError:
    """Returns the error of a compressed file that cannot be read on."""
    return problem(
        path,
        line,
        f"a broken compressed file ({error})",
        "a complete gzip file",
        "Download it again, or compress it again.",
    )


def line_blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number of the first line, block of whole lines); the last line gets its end."""
    number, rest = 1, b""
    with open_binary(path) as file:
        while True:
            try:
                block = file.read(_BLOCK_BYTES)
            except BROKEN as error:
                raise truncated(path, number, error) from error
            if not block:
                break
            cut = block.rfind(b"\n") + 1
            if cut == 0:
                rest += block
                continue
            whole, rest = rest + block[:cut], block[cut:]
            yield number, whole.removeprefix(_MARK) if number == 1 else whole
            number += whole.count(b"\n")
    if rest:
        yield number, (rest.removeprefix(_MARK) if number == 1 else rest) + b"\n"
