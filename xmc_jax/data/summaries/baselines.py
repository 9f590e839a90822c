"""Predictions to beat without a model: frequent labels, TF-IDF nearest label texts, neighbours.

SciPy only. The products of queries and labels are made in blocks of bounded size, so memory is that
of the texts' own sparse matrices however many queries and labels there are.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import scipy.sparse as sp

from xmc_jax.data import splits
from xmc_jax.data.graph import label_graph
from xmc_jax.metrics.propensity import label_frequency

ANALYZERS = ("word", "word+char")
_WORD = re.compile(r"\w+")
_CHARS = (3, 5)  # shortest and longest piece of a word, its two boundaries included
_LONGEST = 100  # characters of a word that are cut into pieces


def popularity(train_labels: sp.csr_matrix, num_rows: int, k: int) -> np.ndarray:
    """Returns the k most frequent training labels for every row; ties go to the lower id.

    Args:
      train_labels: ``[N, L]`` CSR of the training rows.
      num_rows: rows to predict for.
      k: labels a row; at most L are given, the rest is -1.

    Returns:
      ``[num_rows, k]`` int32, a read-only view of one row.
    """
    order = np.argsort(-label_frequency(train_labels), kind="stable")[:k]
    top = np.full(k, -1, np.int32)
    top[: len(order)] = order
    return np.broadcast_to(top, (num_rows, k))


def tfidf_nearest_label(
    queries: Sequence[str],
    labels: Sequence[str],
    k: int,
    *,
    training_texts: Iterable[str] = (),
    analyzer: str = "word",
    block: int = 20_000_000,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the k labels whose texts are nearest to each query by the cosine of TF-IDF vectors.

    A term weighs ``(1 + ln tf) * (1 + ln((1 + n) / (1 + df)))``; ``n`` and ``df`` are counted over
    the label and training texts (the measured numbers of our own data sets were made so). Terms are
    lower-cased words of one or more characters; for "word+char" also the pieces of 3 to 5
    characters of each word, its boundaries included.

    Args:
      queries: N texts. The work is the number of (query, label, shared term) triples: for millions
        of queries and labels pass a sample.
      labels: L texts.
      k: labels a query.
      training_texts: further texts to count words in.
      analyzer: "word", or "word+char" for data of one or two words a text.
      block: how many scores are held at once (12 bytes each, more only if one query has more).

    Returns:
      ``([N, k] int32 ids, [N, k] float32 scores in [0, 1])``, best first, ties to the lower id; -1
      and 0 where fewer than k labels share a term with the query.

    Raises:
      ValueError: unknown analyzer.
    """
    if analyzer not in ANALYZERS:
        raise ValueError(f"analyzer: found {analyzer!r}, expected one of {ANALYZERS}")
    vocabulary, idf = _count(labels, training_texts, analyzer)
    by_term = _vectors(labels, vocabulary, idf, analyzer).T.tocsr()  # [V, L]
    vectors = _vectors(queries, vocabulary, idf, analyzer)  # [N, V]
    ids = np.full((len(queries), k), -1, np.int32)
    scores = np.zeros((len(queries), k), np.float32)
    for rows in _row_blocks(vectors, np.diff(by_term.indptr), block):
        product = vectors[rows] @ by_term  # [m, L], sparse
        for row, start, stop in zip(
            range(rows.start, rows.stop), product.indptr[:-1], product.indptr[1:]
        ):
            best, score = _top(product.indices[start:stop], product.data[start:stop], k)
            ids[row, : len(best)] = best
            scores[row, : len(best)] = score
    return ids, scores


def label_of_the_same_text(
    queries: Sequence[str], labels: Sequence[str], train_labels: sp.csr_matrix, k: int
) -> np.ndarray:
    """Returns the label whose text a query is, then the labels it occurs with most often.

    That is Gandalf's target of the label's text (thesis 1.6), looked up instead of learned: where
    many test texts are label texts, a model trained with Gandalf has seen their answers.

    Args:
      queries: N texts.
      labels: L texts; of labels of one text the lowest id counts.
      train_labels: ``[N', L]`` CSR of the training rows, every stored value 1.
      k: labels a query.

    Returns:
      ``[N, k]`` int32, -1 where there is no such label or it has fewer neighbours.
    """
    ids = np.full((len(queries), k), -1, np.int32)
    codes, label_codes = splits.text_codes(queries, labels)
    texts, first = np.unique(label_codes, return_index=True)
    rows = np.flatnonzero(np.isin(codes, texts))
    if rows.size == 0:
        return ids
    ids[rows, 0] = own = first[np.searchsorted(texts, codes[rows])]
    chosen, place = np.unique(own, return_inverse=True)
    neighbours, _ = label_graph.strongest(
        label_graph.conditionals(train_labels, chosen), max(1, k - 1)
    )
    ids[rows, 1:] = neighbours[place, : k - 1]
    return ids


def _terms(text: str, analyzer: str) -> Iterator[str]:
    for word in _WORD.findall(text.lower()):
        yield word
        if analyzer == "word+char":
            padded = f" {word[:_LONGEST]} "
            for size in range(_CHARS[0], min(_CHARS[1], len(padded)) + 1):
                for start in range(len(padded) - size + 1):
                    yield "#" + padded[start : start + size]  # "#" keeps pieces apart from words


def _count(
    labels: Sequence[str], training_texts: Iterable[str], analyzer: str
) -> tuple[dict[str, int], np.ndarray]:
    """Returns the number of each term, by first appearance, and inverse document frequencies."""
    vocabulary: dict[str, int] = {}
    counts = array("q")
    num_texts = 0
    for texts in (labels, training_texts):
        for text in texts:
            num_texts += 1
            for term in dict.fromkeys(_terms(text, analyzer)):
                place = vocabulary.setdefault(term, len(counts))
                if place == len(counts):
                    counts.append(0)
                counts[place] += 1
    frequency = np.frombuffer(counts, np.int64) if counts else np.zeros(0, np.int64)
    return vocabulary, 1.0 + np.log((1 + num_texts) / (1 + frequency))


def _vectors(
    texts: Sequence[str], vocabulary: dict[str, int], idf: np.ndarray, analyzer: str
) -> sp.csr_matrix:
    """Returns the TF-IDF rows of the texts, each of length 1; unknown terms do not count."""
    places, counts, ends = array("i"), array("f"), array("q", [0])
    for text in texts:
        for term, count in Counter(_terms(text, analyzer)).items():
            place = vocabulary.get(term)
            if place is not None:
                places.append(place)
                counts.append(count)
        ends.append(len(places))
    columns, indptr = np.array(places, np.int32), np.array(ends, np.int64)
    data = ((1.0 + np.log(np.array(counts, np.float64))) * idf[columns]).astype(np.float32)
    matrix = sp.csr_matrix((data, columns, indptr), shape=(len(texts), len(vocabulary)))
    lengths = np.sqrt(np.asarray(matrix.multiply(matrix).sum(axis=1)).ravel())
    matrix.data /= np.repeat(np.maximum(lengths, 1e-12), np.diff(indptr)).astype(np.float32)
    return matrix


def _row_blocks(vectors: sp.csr_matrix, labels_of: np.ndarray, block: int) -> Iterator[slice]:
    """Yields row slices whose products have at most ``block`` entries, or one row."""
    cost = np.concatenate([[0], np.cumsum(labels_of[vectors.indices], dtype=np.int64)])
    until = cost[vectors.indptr]  # [N + 1]: products of all rows before
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
