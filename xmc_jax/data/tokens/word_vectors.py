"""Pretrained word vectors as text files: GloVe's, and fastText's ``.vec``."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

SUFFIXES = (".txt", ".vec", ".gz")
_EXPECTED = (
    "expected word vectors as text, a word and its numbers a line, such as glove.6B.300d.txt "
    "(nlp.stanford.edu/projects/glove) or wiki-news-300d-1M.vec (fasttext.cc), unpacked"
)


def is_file(name: str) -> bool:
    """Whether a name means such a file, there or not, rather than a model's folder."""
    path = Path(os.path.expanduser(name))
    return path.is_file() or (path.suffix in SUFFIXES and not path.is_dir())


def read(path: str | Path, words: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of the words that a file has.

    The file is read once, line by line; lines of other words are not parsed. Of a word that stands
    twice the first line counts. A first line of two integers is fastText's header.

    Args:
      path: plain text or gzip.
      words: the rows of the words that are wanted.

    Returns:
      ``[n]`` int64 rows, ascending, and ``[n, D]`` float32 vectors.

    Raises:
      ValueError: no such file, another kind of file, a line that does not fit (it is named), or a
        file that has none of the words.
    """
    path = Path(os.path.expanduser(path))
    wanted = {word.encode(): row for word, row in words.items()}
    vectors: dict[int, np.ndarray] = {}
    dim = 0
    for number, line in _lines(path):
        word, _, rest = line.rstrip().partition(b" ")
        row = wanted.get(word)
        if row is None or row in vectors:
            continue
        try:
            vector = np.array(rest.split(), np.bytes_).astype(np.float32)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}; {_EXPECTED}.") from error
        dim = dim or vector.size
        if not vector.size or vector.size != dim or not np.isfinite(vector).all():
            raise ValueError(
                f"{path}, line {number}: {vector.size} numbers for {word.decode()!r}; expected "
                f"{dim or 'some'}, all finite, as in the lines before."
            )
        vectors[row] = vector
    if not vectors:
        raise ValueError(
            f"{path} has none of the {len(words):,} words of the texts (words are lower-cased); "
            f"{_EXPECTED}."
        )
    rows = sorted(vectors)
    return np.array(rows, np.int64), np.stack([vectors[row] for row in rows])


def table(path: str | Path, words: Mapping[str, int], *, seed: int) -> np.ndarray:
    """A token table: the file's vectors, and noise of the same deviation for words it lacks.

    Args:
      path: of the file.
      words: the tokenizer's vocabulary; ids from 0, none left out.
      seed: of the noise.

    Returns:
      ``[V, D]`` float32.

    Raises:
      ValueError: as `read`.
    """
    rows, vectors = read(path, words)
    shape = len(words), vectors.shape[1]
    values = np.random.default_rng(seed).standard_normal(shape, np.float32) * vectors.std()
    values[rows] = vectors
    return values


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines without fastText's header."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; {_EXPECTED}.")
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    if b"\0" in line or line.startswith(b"PK"):
                        raise ValueError(f"{path} is no text file; {_EXPECTED}.")
                    fields = line.split()
                    if len(fields) == 2 and all(field.isdigit() for field in fields):
                        continue
                yield number, line
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is no whole gzip file ({error}); {_EXPECTED}.") from error
