"""Texts found by their words and by pieces of them: cosines of TF-IDF vectors, an inverted index.

A term is a lower-cased word or, for "word+char", also a piece of 3 to 5 characters of a word, its
boundaries included. It weighs ``(1 + ln tf) * (1 + ln((1 + n) / (1 + df)))``; ``n`` and ``df`` are
counted over all texts that are given. Terms are hashes of 64 bits, made for a block of texts at
once: there is no dictionary, and of a word 100 characters count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix, hstack

ANALYZERS = ("word", "word+char")
PACKED = 256  # terms of a text in a row of numbers
BUDGET = 1 << 17  # postings of a query that are read, unless its rarest term has more
_WORD = re.compile(r"\w+")
_PIECES = (3, 4, 5)  # characters of a piece
_LONGEST = 100  # characters of a word
_BLOCK_TEXTS, _BLOCK_CHARACTERS = 1 << 13, 1 << 18
_BLOCK_SCORES = 1 << 22  # 12 bytes each, more only where one query has more
_MERGED = 1 << 22  # terms of blocks that wait to be merged
_BASE = 0x9E3779B97F4A7C15  # odd
_INVERSE = pow(_BASE, -1, 1 << 64)


class Vocabulary:
    """Terms and what they weigh.

    Attributes:
      hashes: ``[V]`` uint64, ascending.
      numbers: ``[V]`` int32, the column of each.
      idf: ``[V]`` by column.
      analyzer: one of `ANALYZERS`.
    """

    def __init__(
        self,
        hashes: np.ndarray,
        idf: np.ndarray,
        *,
        analyzer: str = "word+char",
        numbers: np.ndarray | None = None,
    ) -> None:
        """Of terms that were counted; without ``numbers`` they are numbered as they stand."""
        self.hashes, self.idf, self.analyzer = hashes, idf, analyzer
        self.numbers = np.arange(len(hashes), dtype=np.int32) if numbers is None else numbers

    @classmethod
    def of(cls, *collections: Iterable[str], analyzer: str = "word+char") -> Vocabulary:
        """Count the terms of all texts.

        Raises:
          ValueError: unknown analyzer.
        """
        if analyzer not in ANALYZERS:
            raise ValueError(f"analyzer: found {analyzer!r}, expected one of {ANALYZERS}")
        hashes, counts = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        waiting, size, num_texts = [(hashes, counts)], 0, 0
        for texts in collections:
            for some, terms in _counted(texts, analyzer):
                waiting.append((terms, np.bincount(some.indices, minlength=len(terms))))
                size, num_texts = size + len(terms), num_texts + some.shape[0]
                if size > max(_MERGED, len(waiting[0][0])):
                    waiting, size = [_merged(waiting)], 0
        hashes, counts = _merged(waiting)
        return cls(hashes, 1.0 + np.log((1 + num_texts) / (1 + counts)), analyzer=analyzer)

    def __len__(self) -> int:
        return len(self.idf)

    def vectors(self, texts: Iterable[str]) -> csr_matrix:
        """Rows of length 1, ``[n, V]`` float32, columns ascending; unknown terms do not count."""
        parts: list[tuple[np.ndarray, ...]] = []
        for some, terms in _counted(texts, self.analyzer):
            column = self._columns(terms)[some.indices]
            known = column >= 0
            row = np.repeat(np.arange(some.shape[0]), np.diff(some.indptr))[known]
            column = column[known]
            weight = (1.0 + np.log(some.data[known].astype(np.float64))) * self.idf[column]
            lengths = np.sqrt(np.bincount(row, weight**2, some.shape[0]))
            values = (weight / np.maximum(lengths, 1e-12)[row]).astype(np.float32)
            parts.append((values, column, np.bincount(row, minlength=some.shape[0])))
        if not parts:
            return csr_matrix((0, len(self)), dtype=np.float32)
        values, column, sizes = (np.concatenate(of) for of in zip(*parts))
        indptr = np.concatenate([[0], np.cumsum(sizes)])
        vectors = csr_matrix((values, column, indptr), (len(sizes), len(self)))
        vectors.sort_indices()
        return vectors

    def extended(self, texts: Iterable[str]) -> Vocabulary:
        """With the terms that these texts bring, as rare as the rarest; columns stay."""
        seen = [terms for _, terms in _counted(texts, self.analyzer)]
        new = np.unique(np.concatenate([np.zeros(0, np.uint64), *seen]))
        new = new[self._columns(new) < 0]
        hashes = np.concatenate([self.hashes, new])
        numbers = np.concatenate([self.numbers, len(self) + np.arange(len(new), dtype=np.int32)])
        order = np.argsort(hashes)
        idf = np.concatenate([self.idf, np.full(len(new), self.idf.max(initial=1.0))])
        return Vocabulary(hashes[order], idf, analyzer=self.analyzer, numbers=numbers[order])

    def _columns(self, terms: np.ndarray) -> np.ndarray:
        """Columns of terms (hashes, ascending), -1 where unknown."""
        if not len(self):
            return np.full(len(terms), -1, np.int32)
        place = np.minimum(np.searchsorted(self.hashes, terms), len(self) - 1)
        return np.where(self.hashes[place] == terms, self.numbers[place], -1)


class _Lot(NamedTuple):
    """Some texts; their last columns are cut off where none of them has those terms.

    Attributes:
      vectors: ``[l, v]``.
      by_term: ``[v, l]``.
    """

    vectors: csr_matrix
    by_term: csr_matrix


class TextIndex:
    """Texts, of which those are found that share terms with a query."""

    def __init__(self, vocabulary: Vocabulary, *lots: _Lot) -> None:
        """As `of`, `read` and `joined` call it."""
        self.vocabulary, self._lots = vocabulary, lots
        self._postings = np.zeros(len(vocabulary), np.int64)
        for lot in lots:
            self._postings[: lot.by_term.shape[0]] += np.diff(lot.by_term.indptr)

    @classmethod
    def of(
        cls,
        texts: Sequence[str],
        further: Iterable[str] = (),
        *,
        analyzer: str = "word+char",
    ) -> TextIndex:
        """Index texts.

        Args:
          texts: L texts.
          further: texts to count terms in.
          analyzer: one of `ANALYZERS`.

        Raises:
          ValueError: unknown analyzer.
        """
        vocabulary = Vocabulary.of(texts, further, analyzer=analyzer)
        return cls(vocabulary, _lot(vocabulary.vectors(texts)))

    def __len__(self) -> int:
        return sum(lot.vectors.shape[0] for lot in self._lots)

    def joined(self, texts: Sequence[str]) -> TextIndex:
        """With some more texts, and their terms; nothing of the others is copied."""
        vocabulary = self.vocabulary.extended(texts)
        return TextIndex(vocabulary, *self._lots, _lot(vocabulary.vectors(texts)))

    def search(
        self,
        queries: csr_matrix,
        k: int,
        *,
        budget: int | None = None,
        block: int = _BLOCK_SCORES,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k texts of highest cosine.

        Args:
          queries: ``[n, V]``, of `Vocabulary.vectors` or `unpack`.
          k: texts a query.
          budget: postings of a query that are read, those of its rarest terms; the best of what
            they find are scored by all terms. None = all, which is exact.
          block: how many scores are held at once.

        Returns:
          ``([n, k] int32 ids, [n, k] float32 scores in [0, 1])``, best first, ties to the lower id;
          -1 and 0 where fewer than k texts share a term with the query.
        """
        ids = np.full((queries.shape[0], k), -1, np.int32)
        scores = np.zeros((queries.shape[0], k), np.float32)
        read = queries if budget is None else self._rarest(queries, budget)
        cut = np.diff(read.indptr) < np.diff(queries.indptr)
        for rows in _row_blocks(read, self._postings, block):
            products = self._products(read[rows])
            for row, start, stop in zip(
                range(rows.start, rows.stop), products.indptr[:-1], products.indptr[1:]
            ):
                best, score = products.indices[start:stop], products.data[start:stop]
                if cut[row]:
                    best, _ = _top(best, score, max(4 * k, 400))
                    of_row = np.zeros(len(best), np.int64)
                    score = self.scores(queries[row], of_row, best)
                best, score = _top(best, score, k)
                ids[row, : len(best)], scores[row, : len(best)] = best, score
        return ids, scores

    def nearest(self, queries: csr_matrix, k: int) -> csr_matrix:
        """Cosines of the k texts that a search of bounded work finds, ``[n, L]``, ids ascending.

        Args:
          queries: ``[n, V]``.
          k: texts a query, at most.
        """
        ids, scores = self.search(queries, k, budget=BUDGET)
        indptr = np.concatenate([[0], np.cumsum((ids >= 0).sum(axis=1))])
        cosines = csr_matrix((scores[ids >= 0], ids[ids >= 0], indptr), (len(ids), len(self)))
        cosines.sort_indices()
        return cosines

    def scores(self, queries: csr_matrix, rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Cosines of pairs ``(rows, ids)``, ``[p]`` float32; rows ascend.

        Args:
          queries: ``[n, V]``.
          rows: ``[p]`` rows of queries, ascending.
          ids: ``[p]`` texts; -1 has 0.
        """
        values = np.zeros(len(rows), np.float32)
        weights = np.zeros(len(self.vocabulary), np.float32)
        bounds = np.searchsorted(rows, np.arange(queries.shape[0] + 1))
        for row in np.flatnonzero(np.diff(bounds)).tolist():
            own = slice(queries.indptr[row], queries.indptr[row + 1])
            weights[queries.indices[own]] = queries.data[own]
            some, first = slice(bounds[row], bounds[row + 1]), 0
            for vectors, _ in self._lots:
                after = first + vectors.shape[0]
                here = np.flatnonzero((ids[some] >= first) & (ids[some] < after))
                texts = vectors[ids[some][here] - first]
                values[some][here] = texts @ weights[: vectors.shape[1]]
                first = after
            weights[queries.indices[own]] = 0
        return values

    def pack(self, queries: csr_matrix) -> np.ndarray:
        """Queries as rows of numbers, ``[n, 2 * PACKED]`` float32: columns, as bits, and weights.

        The heaviest `PACKED` terms of each are kept, of those that a text has.
        """
        row = np.repeat(np.arange(queries.shape[0]), np.diff(queries.indptr))
        useful = self._postings[queries.indices] > 0
        row, column, weight = row[useful], queries.indices[useful], queries.data[useful]
        order = np.lexsort((-weight, row))
        row, column, weight = row[order], column[order], weight[order]
        place = np.arange(len(row)) - np.searchsorted(row, row)
        kept = place < PACKED
        columns = np.zeros((queries.shape[0], PACKED), np.int32)
        weights = np.zeros(columns.shape, np.float32)
        columns[row[kept], place[kept]] = column[kept]
        weights[row[kept], place[kept]] = weight[kept]
        return np.concatenate([columns.view(np.float32), weights], axis=1)

    def unpack(self, packed: np.ndarray) -> csr_matrix:
        """Queries ``[n, V]`` of what `pack` gave, columns ascending."""
        columns = np.ascontiguousarray(packed[:, :PACKED], np.float32).view(np.int32)
        weights = packed[:, PACKED:]
        indptr = np.concatenate([[0], np.cumsum((weights > 0).sum(axis=1))])
        shape = len(packed), len(self.vocabulary)
        queries = csr_matrix((weights[weights > 0], columns[weights > 0], indptr), shape)
        queries.sort_indices()
        return queries

    def write(self, folder: Path) -> None:
        """Write the index into a folder.

        Raises:
          OSError: it cannot be written.
        """
        folder.mkdir()
        (lot,) = self._lots
        np.save(folder / "hashes.npy", self.vocabulary.hashes)
        np.save(folder / "idf.npy", self.vocabulary.idf)
        for name, matrix in zip(_Lot._fields, lot):
            for part in _CSR:
                np.save(folder / f"{name}.{part}.npy", getattr(matrix, part))

    @classmethod
    def read(cls, folder: Path) -> TextIndex:
        """The index that was written into a folder, memory-mapped."""
        read = lambda name: np.load(folder / f"{name}.npy", mmap_mode="r")
        vocabulary = Vocabulary(read("hashes"), read("idf"))
        parts = {name: [read(f"{name}.{part}") for part in _CSR] for name in _Lot._fields}
        terms, texts = len(vocabulary), len(parts["vectors"][2]) - 1
        vectors = csr_matrix(tuple(parts["vectors"]), (texts, terms))
        return cls(vocabulary, _Lot(vectors, csr_matrix(tuple(parts["by_term"]), (terms, texts))))

    def _products(self, queries: csr_matrix) -> csr_matrix:
        """Cosines with all texts that share a term, ``[n, L]``."""
        parts = [_first_columns(queries, lot.by_term.shape[0]) @ lot.by_term for lot in self._lots]
        return parts[0] if len(parts) == 1 else csr_matrix(hstack(parts, "csr"))

    def _rarest(self, queries: csr_matrix, budget: int) -> csr_matrix:
        """Queries with as many of their rarest terms as have ``budget`` postings, or one."""
        row = np.repeat(np.arange(queries.shape[0]), np.diff(queries.indptr))
        order = np.lexsort((self._postings[queries.indices], row))
        column, values = queries.indices[order], queries.data[order]
        until = np.cumsum(self._postings[column])  # of all rows before, too
        start = np.searchsorted(row, row)
        before = np.concatenate([[0], until])[start]
        kept = (until - before <= budget) | (np.arange(len(row)) == start)
        sizes = np.bincount(row[kept], minlength=queries.shape[0])
        indptr = np.concatenate([[0], np.cumsum(sizes)])
        return csr_matrix((values[kept], column[kept], indptr), queries.shape)


_CSR = ("data", "indices", "indptr")


def _lot(vectors: csr_matrix) -> _Lot:
    return _Lot(vectors, vectors.T.tocsr())


def _first_columns(matrix: csr_matrix, number: int) -> csr_matrix:
    return matrix if number == matrix.shape[1] else csr_matrix(matrix[:, :number])


def _counted(texts: Iterable[str], analyzer: str) -> Iterator[tuple[csr_matrix, np.ndarray]]:
    """Texts in blocks: how often each has each term, ``[n, U]``, and the terms, ``[U]`` hashes."""
    for words, sizes in _word_blocks(texts):
        spans = _Spans(words)
        row = np.repeat(np.arange(len(sizes)), sizes)
        rows, hashes = [row], [spans.hashes(spans.starts, spans.lengths, tag=0)]
        for size in _PIECES if analyzer == "word+char" else ():
            number = np.maximum(spans.lengths + 3 - size, 0)  # of a word between its boundaries
            after = np.cumsum(number)
            starts = np.repeat(spans.starts - 1 - (after - number), number)
            starts += np.arange(len(starts))
            rows.append(np.repeat(row, number))
            hashes.append(spans.hashes(starts, size, tag=1))
        terms, which = np.unique(np.concatenate(hashes), return_inverse=True)
        ones = np.ones(len(which), np.float32)
        yield csr_matrix((ones, (np.concatenate(rows), which)), (len(sizes), len(terms))), terms


def _word_blocks(texts: Iterable[str]) -> Iterator[tuple[list[str], list[int]]]:
    """Words of some texts, and how many each text has."""
    words: list[str] = []
    sizes: list[int] = []
    characters = 0
    for text in texts:
        of_text = _WORD.findall(text.lower())
        words += [word[:_LONGEST] for word in of_text]
        sizes.append(len(of_text))
        characters += len(text)
        if len(sizes) == _BLOCK_TEXTS or characters >= _BLOCK_CHARACTERS:
            yield words, sizes
            words, sizes, characters = [], [], 0
    if sizes:
        yield words, sizes


class _Spans:
    """Words with a blank between them, whose parts are hashed: sums of characters times powers.

    Attributes:
      starts: ``[w]`` where each word begins.
      lengths: ``[w]`` of each word.
    """

    def __init__(self, words: list[str]) -> None:
        """Add up."""
        self.lengths = np.fromiter(map(len, words), np.int64, len(words))
        self.starts = 1 + np.cumsum(self.lengths + 1) - (self.lengths + 1)
        text = f" {' '.join(words)} ".encode("utf-32-le", "surrogatepass")
        codes = _mix(np.frombuffer(text, np.uint32).astype(np.uint64))
        powers = lambda base: np.cumprod(np.full(len(codes), base, np.uint64))
        self._sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(codes * powers(_BASE))])
        self._shift = powers(_INVERSE)

    def hashes(self, starts: np.ndarray, lengths: np.ndarray | int, *, tag: int) -> np.ndarray:
        """One a part; equal parts of the same ``tag`` have the same."""
        sums = (self._sums[starts + lengths] - self._sums[starts]) * self._shift[starts]
        return _mix(sums + np.uint64(tag))


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def _merged(counted: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Counts of terms added up: hashes, ascending, and counts."""
    hashes, counts = (np.concatenate(part) for part in zip(*counted))
    terms, which = np.unique(hashes, return_inverse=True)
    return terms, np.bincount(which, counts, len(terms)).astype(np.int64)


def _row_blocks(vectors: csr_matrix, postings: np.ndarray, block: int) -> Iterator[slice]:
    """Yields row slices whose products have at most ``block`` entries, or one row."""
    cost = np.concatenate([[0], np.cumsum(postings[vectors.indices], dtype=np.int64)])
    until = cost[vectors.indptr]  # [n + 1]: products of all rows before
    start = 0
    while start < vectors.shape[0]:
        stop = int(np.searchsorted(until, until[start] + block, side="right")) - 1
        stop = min(max(stop, start + 1), vectors.shape[0])
        yield slice(start, stop)
        start = stop


def _top(ids: np.ndarray, scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    if len(ids) > k:
        keep = scores >= np.partition(scores, len(scores) - k)[len(scores) - k]
        ids, scores = ids[keep], scores[keep]
    order = np.lexsort((ids, -scores))[:k]
    return ids[order], scores[order]
