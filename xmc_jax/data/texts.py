"""Texts on disk, one a line: a memory-mapped sequence of strings and its writer."""

from __future__ import annotations

import array
import itertools
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from xmc_jax import files

# Everything that some reader takes for the end of a line; one of them inside a text would shift
# every later row.
_SEPARATORS = re.compile("[\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029]+")
# Soft hyphens, zero-width blanks and joiners, marks of direction and order, variation selectors.
INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufe00-\ufe0f\ufeff]"
)
_BLOCK_ROWS = 1 << 14
_FLUSH_BYTES = 1 << 22
_SCAN_BYTES = 1 << 26


def clean(text: str) -> str:
    """Returns the text as one line: each run of line separators becomes one space."""
    return _SEPARATORS.sub(" ", text)


def is_blank(text: str) -> bool:
    """Whether nothing of a text can be seen."""
    text = text.strip()
    return not (text if text.isprintable() else INVISIBLE.sub("", text).strip())


class LineTexts(Sequence[str]):
    """A utf-8 file with one text a line, memory-mapped: memory does not grow with its length.

    An index gives a string and a slice a list of strings; ``take`` gives a view of some rows. Only
    ``\\n`` ends a line. Instances can be pickled (the file is mapped again where they arrive).

    Example::

      texts = LineTexts("labels.txt")
      len(texts), texts[0], texts[10:20], texts.take([5, 3])
    """

    def __init__(self, path: str | os.PathLike[str], *, offsets: np.ndarray | None = None):
        """Maps the file; with ``offsets`` (int64 ``[n + 1]``: where lines start) it is not read."""
        self.path: Path | None = Path(path)
        self._buffer = _map_file(self.path)
        if offsets is None:
            offsets = _line_offsets(self._buffer)
        self._starts, self._stops = offsets[:-1], offsets[1:]

    @classmethod
    def from_bytes(cls, buffer: bytes, offsets: np.ndarray | None = None) -> LineTexts:
        """Returns the same kind of sequence over bytes in memory."""
        texts = cls.__new__(cls)
        texts.path, texts._buffer = None, buffer
        offsets = _line_offsets(buffer) if offsets is None else offsets
        texts._starts, texts._stops = offsets[:-1], offsets[1:]
        return texts

    def take(self, rows: np.ndarray) -> LineTexts:
        """Returns a view of these rows, in this order, over the same file."""
        rows = np.asarray(rows, dtype=np.int64)
        texts = LineTexts.__new__(LineTexts)
        texts.path, texts._buffer = self.path, self._buffer
        texts._starts, texts._stops = self._starts[rows], self._stops[rows]
        return texts

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self._slice(index)
        row = int(index)
        return self._buffer[int(self._starts[row]) : int(self._stops[row]) - 1].decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _BLOCK_ROWS):
            yield from self[start : start + _BLOCK_ROWS]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other))

    __hash__ = None  # type: ignore[assignment]  # the way to say unhashable

    def __getstate__(self) -> tuple[Any, ...]:
        source = self._buffer if self.path is None else None
        return self.path, source, np.asarray(self._starts), np.asarray(self._stops)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.path, source, self._starts, self._stops = state
        self._buffer = _map_file(self.path) if source is None else source

    def _slice(self, index: slice) -> list[str]:
        starts, stops = self._starts[index], self._stops[index]
        if len(starts) == 0:
            return []
        if np.array_equal(starts[1:], stops[:-1]):  # neighbours in the file: decode them at once
            block = self._buffer[int(starts[0]) : int(stops[-1]) - 1]
            return block.decode("utf-8").split("\n")
        buffer = self._buffer
        pairs = zip(starts.tolist(), stops.tolist())
        return [buffer[start : stop - 1].decode("utf-8") for start, stop in pairs]

    def encoded(self, start: int, stop: int) -> bytes:
        """Returns rows ``start`` to ``stop`` as they stand in the file, each ended by ``\\n``."""
        starts, stops = self._starts[start:stop], self._stops[start:stop]
        if len(starts) and np.array_equal(starts[1:], stops[:-1]):
            block = self._buffer[int(starts[0]) : int(stops[-1]) - 1]
            return block + b"\n"  # the last line of a file may lack its end
        return b"".join(
            self._buffer[start : stop - 1] + b"\n"
            for start, stop in zip(starts.tolist(), stops.tolist())
        )

    def is_whole(self, path: Path) -> bool:
        """Returns whether these are all the lines of that file, in its order."""
        if self.path != path or len(self) == 0 or self._starts[0] != 0:
            return False
        is_end = int(self._stops[-1]) == len(self._buffer)
        return is_end and np.array_equal(self._starts[1:], self._stops[:-1])

    def offsets(self) -> np.ndarray:
        """Returns where lines start when written in this order, and their end: int64 [n + 1]."""
        return np.concatenate([[0], np.cumsum(self.byte_lengths() + 1)]).astype(np.int64)

    def byte_lengths(self) -> np.ndarray:
        """Returns the bytes of each text, line end not counted: int64 ``[n]``."""
        return np.asarray(self._stops) - np.asarray(self._starts) - 1


class LineWriter:
    """Collects texts one by one into a file (or, without a path, into memory), cleaned.

    Lone surrogates, which no utf-8 file can hold, become ``?``.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None):
        self.path = None if path is None else Path(path)
        self._file = None if self.path is None else open(self.path, "wb")
        self._memory = bytearray()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._position = 0
        self._offsets = array.array("q", [0])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def append(self, text: str) -> None:
        """Adds one text."""
        line = clean(text).encode("utf-8", "replace")
        self._pending.append(line)
        self._position += len(line) + 1
        self._offsets.append(self._position)
        self._pending_bytes += len(line) + 1
        if self._pending_bytes > _FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        block = b"".join(line + b"\n" for line in self._pending)
        if self._file is None:
            self._memory += block
        else:
            self._file.write(block)
        self._pending, self._pending_bytes = [], 0

    def offsets(self) -> np.ndarray:
        """Returns where lines start, and the end of the file: int64 ``[n + 1]``."""
        return np.array(self._offsets, dtype=np.int64)

    def close(self) -> LineTexts:
        """Writes what is left and returns the texts."""
        self._flush()
        if self._file is None or self.path is None:
            return LineTexts.from_bytes(bytes(self._memory), self.offsets())
        self._file.close()
        return LineTexts(self.path, offsets=self.offsets())

    def __enter__(self) -> LineWriter:
        return self

    def __exit__(self, *error: object) -> None:
        # Not left to the garbage collector: its late flush would hit a second try at this file.
        if self._file is not None:
            self._file.close()


def write_lines(path: str | os.PathLike[str], texts: Iterable[str]) -> LineTexts:
    """Writes the texts, one a line, under a temporary name first, and returns them mapped."""
    path = Path(path)
    with files.replacing_path(path, shared=True) as temporary:
        offsets = _write(temporary, texts)
    return LineTexts(path, offsets=offsets)


def take(texts: Sequence[str], rows: np.ndarray) -> Sequence[str]:
    """Returns some rows of any sequence of texts; a view where it is a `LineTexts`."""
    if isinstance(texts, LineTexts):
        return texts.take(rows)
    return [texts[row] for row in np.asarray(rows).tolist()]


def encoded_blocks(texts: Sequence[str]) -> Iterator[bytes]:
    """Yields the texts as utf-8 lines, some thousand at a time; the blocks' cut says nothing."""
    for start in range(0, len(texts), _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, len(texts))
        if isinstance(texts, LineTexts):
            yield texts.encoded(start, stop)
        else:
            lines = (clean(texts[row]).encode("utf-8", "replace") for row in range(start, stop))
            yield b"".join(line + b"\n" for line in lines)


def _write(path: Path, texts: Iterable[str]) -> np.ndarray:
    if isinstance(texts, LineTexts):
        with open(path, "wb") as file:
            for block in encoded_blocks(texts):
                file.write(block)
        return texts.offsets()
    with LineWriter(path) as writer:
        for text in texts:
            writer.append(text)
        writer.close()
        return writer.offsets()


def _map_file(path: Path) -> mmap.mmap | bytes:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:  # an empty file cannot be mapped
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _line_offsets(buffer: mmap.mmap | bytes) -> np.ndarray:
    size = len(buffer)
    starts = [np.zeros(1, dtype=np.int64)]
    for start in range(0, size, _SCAN_BYTES):
        block = np.frombuffer(buffer, np.uint8, min(_SCAN_BYTES, size - start), start)
        starts.append(np.flatnonzero(block == 10) + (start + 1))
    offsets = np.concatenate(starts)
    if size and buffer[size - 1] != 10:  # as if the last line had its end
        offsets = np.append(offsets, size + 1)
    return offsets


class JoinedTexts:
    """Several collections of texts as one that can be read more than once."""

    def __init__(self, *collections: Sequence[str]) -> None:
        """Keep the collections."""
        self._collections = collections

    def __iter__(self) -> Iterator[str]:
        """All texts, one collection after the other."""
        return itertools.chain(*self._collections)
