"""From the bytes of a file to lines of text: byte order marks, odd bytes, other encodings."""

from __future__ import annotations

import codecs
import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from absl import logging

from xmc_jax.data.readers.raw_files import BROKEN, DataError, open_binary, problem, truncated
from xmc_jax.data.readers.reading import Reading

_Result = TypeVar("_Result")
_MARKS = {  # UTF-32's begins as UTF-16's does
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_SAMPLE_BYTES = 4096
_MOST_REPAIRED, _MOST_REPAIRED_SHARE = 10, 0.01
_ENCODINGS = "Western Europe; cp1251: Cyrillic, gb18030: Chinese, shift_jis: Japanese"
STANDARD_INPUT = Path("-")


def _as_cp1252(error: UnicodeError) -> tuple[str, int]:
    """What old Western software meant by bytes that are not UTF-8."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return error.object[error.start : error.end].decode("cp1252", "replace"), error.end


codecs.register_error("xmc_jax.cp1252", _as_cp1252)


class Decoder:
    """Lines of one file as text; remembers those that had to be repaired.

    Attributes:
      path: the file, or `STANDARD_INPUT`.
    """

    def __init__(self, path: Path, encoding: str = "", *, otherwise: str = ""):
        """Say in which encoding the file is, unless it has a byte order mark.

        Args:
          path: the file.
          encoding: "" = UTF-8, where odd bytes are repaired as if they were cp1252.
          otherwise: with UTF-8: the encoding of lines that are not, however many they are.
        """
        self.path = path
        self._encoding = encoding or "utf-8"
        self._otherwise = otherwise
        self._lines = self._repaired = 0
        self._first = (0, "")  # line that was repaired, and what stood there

    def lines(self) -> Iterator[str]:
        r"""Yields lines without their ends; only ``\n`` and ``\r\n`` end a line.

        Raises:
          DataError: a broken gzip file, with the line up to which it could be read; UTF-16 without
            its mark.
        """
        self._lines = self._repaired = 0
        is_input = self.path == STANDARD_INPUT
        source = contextlib.nullcontext(sys.stdin.buffer) if is_input else open_binary(self.path)
        with source as file:
            try:
                self._encoding = self._encoding_of(_first_bytes(file))
                for line in self._decoded(file):
                    yield line.removesuffix("\n").removesuffix("\r")
            except BROKEN as error:
                raise truncated(self.path, self._lines + 1, error) from error

    def _encoding_of(self, first: bytes) -> str:
        for mark, encoding in _MARKS.items():
            if first.startswith(mark):
                return encoding
        if not _cuts_at_newlines(self._encoding) or first.count(0) * 10 <= len(first):
            return self._encoding
        if self._otherwise and not _cuts_at_newlines(self._otherwise):
            return self._otherwise
        raise problem(
            self.path,
            1,
            "zero bytes (as in UTF-16)",
            "UTF-8, or a byte order mark",
            f"Say --encoding=utf-16-{'le' if first.find(0) % 2 else 'be'}, or save it as UTF-8.",
        )

    def _decoded(self, file: BinaryIO) -> Iterator[str]:
        encoding = self._encoding
        if not _cuts_at_newlines(encoding):
            reader = io.TextIOWrapper(file, encoding, "replace", newline="\n")
            for self._lines, text in enumerate(reader, 1):
                if "\ufffd" in text:
                    self._note_repair("bytes")
                yield text.removeprefix("\ufeff") if self._lines == 1 else text
            reader.detach()
            return
        for self._lines, line in enumerate(file, 1):
            if self._lines == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            try:
                text = line.decode(encoding)
            except UnicodeDecodeError as error:
                text = self._repair(line, error)
            yield text

    def _repair(self, line: bytes, error: UnicodeDecodeError) -> str:
        self._note_repair(f"byte 0x{line[error.start]:02x}")
        if self._otherwise and _cuts_at_newlines(self._otherwise):
            return line.decode(self._otherwise, "replace")
        errors = "xmc_jax.cp1252" if self._encoding == "utf-8" else "replace"
        return line.decode(self._encoding, errors)

    def _note_repair(self, found: str) -> None:
        self._repaired += 1
        if self._repaired == 1:
            self._first = (self._lines, found)

    def check(self) -> list[str]:
        """Returns the note on lines that were repaired.

        Raises:
          DataError: they are so many that the file must be in another encoding.
        """
        if not self._repaired:
            return []
        line, odd = self._first
        few = self._repaired <= max(_MOST_REPAIRED, _MOST_REPAIRED_SHARE * self._lines)
        if not few and not self._otherwise:
            raise problem(
                self.path,
                line,
                f"{odd}, and {self._repaired:,} of {self._lines:,} lines with such",
                self._encoding.upper(),
                f"Say in which encoding the file is, as in --encoding=cp1252 ({_ENCODINGS}), or "
                "save it as UTF-8.",
            )
        instead = "cp1252" if self._encoding == "utf-8" else "U+FFFD"
        return [
            f"{self.path.name}, line {line}: {odd} is not {self._encoding.upper()}, read "
            f"as {self._otherwise or instead}; {self._repaired:,} such lines in all"
        ]


class _OldDecoder(Decoder):
    """That of version 1: the first odd byte ends the reading."""

    def _repair(self, line: bytes, error: UnicodeDecodeError) -> str:
        raise error


def _first_bytes(file: Any) -> bytes:
    return file.peek(_SAMPLE_BYTES)[:_SAMPLE_BYTES]


def _cuts_at_newlines(encoding: str) -> bool:
    """Whether lines of bytes are lines of text."""
    return "\n".encode(encoding) == b"\n"


def with_decoder(
    path: Path, read: Callable[[Decoder], _Result], reading: Reading
) -> tuple[_Result, list[str]]:
    """Returns what ``read`` makes of a file, and a note on lines whose bytes were repaired.

    Raises:
      DataError: too many such lines; what ``read`` raises.
    """
    logging.info("reading %s", path)
    if reading.version == 1:
        try:
            return read(_OldDecoder(path)), []
        except UnicodeDecodeError:
            return read(Decoder(path, "latin-1")), [f"{path.name}: not utf-8, read as latin-1"]
    decoder = Decoder(path, reading.encoding)
    try:
        result = read(decoder)
    except DataError as error:
        if not isinstance(error.__cause__, BROKEN):
            decoder.check()  # many odd bytes explain whatever else is wrong
        raise
    return result, decoder.check()
