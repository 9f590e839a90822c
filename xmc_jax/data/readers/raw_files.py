"""Opening data files: one kind of error, compressed or not."""

from __future__ import annotations

import codecs
import collections
import contextlib
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

_MARK = codecs.BOM_UTF8
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_BLOCK_BYTES = 1 << 24
_SHOWN_BAD_ROWS = 3
BROKEN = (EOFError, gzip.BadGzipFile, zlib.error)
_GZIP, _GZIP_FORMAT = b"\x1f\x8b", 16 + zlib.MAX_WBITS
_HEAD_BYTES = 512
_CONTROLS = bytes({*range(32)} - set(b"\t\n\x0b\x0c\r\x1a\x1c\x1d\x1e\x1f"))
_NO_TEXT = {
    _GZIP: "a gzip file",
    b"PK\x03\x04": "a zip file (a spreadsheet is one)",
    b"\xfd7zXZ\x00": "an xz file",
    b"BZh91AY&SY": "a bzip2 file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"PAR1\x15": "a Parquet file",
}


class DataError(ValueError):
    """A data file is missing, broken, or does not fit the others.

    Attributes:
      expected: what was expected; errors of rows are counted by it.
    """

    expected = ""


def problem(path: Path, line: int | None, found: str, expected: str, advice: str) -> DataError:
    """Returns the error that names file, line, what was found, what was expected, what to do."""
    where = str(path) if line is None else f"{path}, line {line}"
    error = DataError(f"{where}: found {found}; expected {expected}. {advice}")
    error.expected = expected
    return error


class BadRows:
    """Errors of single rows, collected so that one run counts them all and shows three a kind."""

    def __init__(self) -> None:
        """None so far."""
        self._shown: dict[str, list[DataError]] = {}
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, error: DataError) -> None:
        """Keep an error and go on."""
        shown = self._shown.setdefault(error.expected, [])
        if len(shown) < _SHOWN_BAD_ROWS:
            shown.append(error)
        self._counts[error.expected] += 1

    def check(self) -> None:
        """Refuse the file if a row was bad.

        Raises:
          DataError: the error of the one bad row, or the first three of each kind and their count.
        """
        total = self._counts.total()
        if not total:
            return
        rows = []
        for expected, errors in self._shown.items():
            rows += [f"  {error}" for error in errors]
            more = self._counts[expected] - len(errors)
            rows += [f"  and {more:,} more rows where {expected} was expected"] if more else []
        raise errors[0] if total == 1 else DataError("\n".join([f"{total:,} bad rows:", *rows]))


def listed(numbers: list[int]) -> str:
    """Returns the first few of a list of line numbers, for a message."""
    return ", ".join(str(number) for number in numbers[:5]) + (", ..." if len(numbers) > 5 else "")


def open_binary(path: Path) -> BinaryIO:
    """Opens a file for reading, through gzip where its first bytes say so.

    Raises:
      DataError: something else than text.
    """
    file: Any = open(path, "rb")  # once: what a pipe gives is not given again
    head = file.peek(_HEAD_BYTES)[:_HEAD_BYTES]
    if head.startswith(_GZIP):
        unpacked = gzip.GzipFile(fileobj=file)
        unpacked.myfileobj = file  # closed with it
        inner = b""
        with contextlib.suppress(zlib.error):  # reading it will say where
            inner = zlib.decompressobj(_GZIP_FORMAT).decompress(head, _HEAD_BYTES)
        if other := _no_text(inner):
            unpacked.close()
            shown, advice = f"{other} within a gzip file", "Unpack it until it is text."
            raise problem(path, None, shown, "text, or text in a gzip file", advice)
        return cast(BinaryIO, unpacked)
    other = _no_text(head)
    is_text = head.startswith(_UTF_16) or head.translate(None, _CONTROLS) == head
    if path.suffix == ".gz" and not (other or is_text):
        other = "no gzip file: its first bytes are others"
    if other:
        file.close()
        advice = "Export it as text, or download it again."
        raise problem(path, None, other, "text, or text in a gzip file", advice)
    return file


def _no_text(head: bytes) -> str | None:
    """What else than text begins so, if that is known."""
    if head[257:262] == b"ustar":
        return "a tar archive"
    return next((name for start, name in _NO_TEXT.items() if head.startswith(start)), None)


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
