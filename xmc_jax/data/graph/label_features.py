"""Features of labels that no training changes: TF-IDF rows, PIFA vectors, rows of the label graph.

A TF-IDF row weighs a token ``n * idf`` (n = how often the text has it) and has length 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from scipy.sparse import csr_matrix, diags_array

from xmc_jax.contracts import Tokens
from xmc_jax.data.graph import label_graph

BLOCK_TEXTS = 1 << 14


def inverse_document_frequency(stores: Sequence[Tokens], vocab_size: int) -> np.ndarray:
    """``1 + ln((1 + n) / (1 + df))`` of every token over all texts, 0 for one that is in none.

    Args:
      stores: the texts; n in all.
      vocab_size: V.

    Returns:
      ``[V]`` float32.
    """
    frequency = np.zeros(vocab_size, np.int64)
    for store in stores:
        for block in _blocks(len(store)):
            counts = _counts(store, block, vocab_size)
            frequency += np.bincount(counts.indices, minlength=vocab_size)
    num_texts = sum(len(store) for store in stores)
    idf = 1 + np.log((1 + num_texts) / (1 + frequency))
    return np.where(frequency > 0, idf, 0).astype(np.float32)


def tfidf_rows(store: Tokens, rows: np.ndarray, idf: np.ndarray) -> csr_matrix:
    """TF-IDF rows of length 1 of some texts, ``[n, V]`` float32; a text without tokens has none."""
    matrix = _counts(store, rows, len(idf))
    matrix.data = matrix.data * idf[matrix.indices]
    return _unit_rows(matrix)


def pifa_vectors(
    train: Tokens,
    texts: Tokens,
    labels: csr_matrix,
    idf: np.ndarray,
    *,
    dim: int = 256,
    seed: int = 0,
) -> np.ndarray:
    """Dense PIFA vectors of labels: the mean of their points' TF-IDF rows, projected.

    ``normalize(R^T sum_{i: y_il = 1} x_i)`` with R ``[V, dim]`` of independent normal entries,
    which keeps angles up to about ``1 / sqrt(dim)``. A label without points has its own text's row
    in place of the sum. Points are read in blocks.

    Args:
      train: of the points.
      texts: of the labels.
      labels: ``[N, L]``; rows of ``train`` past N are not read.
      idf: ``[V]``.
      dim: of the vectors.
      seed: of R.

    Returns:
      ``[L, dim]`` float32, unit rows (zeros where there is no text either).
    """
    projection = np.random.default_rng(seed).standard_normal((len(idf), dim), np.float32)
    vectors = np.zeros((labels.shape[1], dim), np.float32)
    for rows in _blocks(labels.shape[0]):
        part = labels[rows[0] : rows[-1] + 1]
        if part.nnz:
            columns = np.unique(part.indices)  # most blocks of a large data set have few labels
            sums = part[:, columns].T @ (tfidf_rows(train, rows, idf) @ projection)
            vectors[columns] += np.asarray(sums, np.float32)
    alone = np.flatnonzero(np.bincount(labels.indices, minlength=labels.shape[1]) == 0)
    for start in range(0, len(alone), BLOCK_TEXTS):
        rows = alone[start : start + BLOCK_TEXTS]
        vectors[rows] = tfidf_rows(texts, rows, idf) @ projection
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1)


def neighbour_graph(
    labels: csr_matrix, *, neighbours: int = 10, seed: int = 0, num_threads: int | None = None
) -> csr_matrix:
    """ECLARE's label graph: visits of random walks, the strongest kept, normalised on both sides.

    ``D_r^-1/2 G D_c^-1/2`` with the row and column sums of G; ``G_lm`` = how often l's walk (400
    steps, restart 0.8, labels above 500 points cut) visits m, for the ``neighbours`` most visited.
    The diagonal is at least 1, so that no sum is 0. ECLARE also drops edges of negative cosine;
    the rows they are made of have none.

    Args:
      labels: ``Y [N, L]``, every stored value 1.
      neighbours: entries of a row, the diagonal included.
      seed: of the walks.
      num_threads: None = all cores.

    Returns:
      ``[L, L]`` float32.
    """
    visits = label_graph.random_walks(
        labels,
        lambda visits, own, _: visits,
        depth=neighbours,
        seed=seed,
        num_threads=num_threads,
    )
    ids, weights = label_graph.strongest(visits, neighbours)
    number = np.arange(len(ids))
    lacking = ~(ids == number[:, None]).any(axis=1)
    ids[lacking, -1], weights[lacking, -1] = number[lacking], 1
    real = ids >= 0
    row = np.repeat(number, real.sum(axis=1))
    graph = csr_matrix((weights[real], (row, ids[real])), shape=visits.shape)
    sums = [np.asarray(graph.sum(axis=axis), np.float64).ravel() for axis in (1, 0)]
    left, right = (diags_array(1 / np.sqrt(s)) for s in sums)
    return csr_matrix(left @ graph @ right, dtype=np.float32)


def neighbour_rows(
    graph: csr_matrix, texts: Tokens, idf: np.ndarray, *, tokens: int = 32, degree: int = 1
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The heaviest entries of the rows of ``G^degree Z``, Z the TF-IDF rows of the label texts.

    Args:
      graph: G ``[L, L]``.
      texts: of the labels.
      idf: ``[V]``.
      tokens: T, entries a label.
      degree: how often texts are handed on along the graph, at least once.

    Yields:
      For blocks of labels in order, token ids ``[n, T]`` int32 and weights ``[n, T]`` float32,
      heaviest first; id 0 and weight 0 where there are fewer.
    """
    features = _stacked([tfidf_rows(texts, rows, idf) for rows in _blocks(len(texts))], len(idf))
    for rows in _blocks(len(texts)):
        block = graph[rows[0] : rows[-1] + 1]
        for _ in range(degree - 1):
            block = block @ graph
        block = csr_matrix(block @ features)
        block.sort_indices()
        ids, weights = label_graph.strongest(block, tokens)
        yield np.maximum(ids, 0), weights.astype(np.float32)


def _blocks(number: int) -> Iterator[np.ndarray]:
    for start in range(0, number, BLOCK_TEXTS):
        yield np.arange(start, min(start + BLOCK_TEXTS, number))


def _counts(store: Tokens, rows: np.ndarray, vocab_size: int) -> csr_matrix:
    """``[n, V]`` float32: how often each text has each token."""
    flat, lengths = store.gather(rows)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    ones = np.ones(len(flat), np.float32)
    matrix = csr_matrix((ones, flat.astype(np.int32), indptr), (len(rows), vocab_size))
    matrix.sum_duplicates()
    return matrix


def _unit_rows(matrix: csr_matrix) -> csr_matrix:
    lengths = np.sqrt(np.asarray(matrix.multiply(matrix).sum(axis=1)).ravel())
    matrix.data = matrix.data / np.repeat(np.where(lengths > 0, lengths, 1), np.diff(matrix.indptr))
    matrix.data = matrix.data.astype(np.float32)
    return matrix


def _stacked(parts: list[csr_matrix], width: int) -> csr_matrix:
    sizes = np.concatenate([[0], *(np.diff(part.indptr) for part in parts)])
    return csr_matrix(
        (
            np.concatenate([np.zeros(0, np.float32), *(part.data for part in parts)]),
            np.concatenate([np.zeros(0, np.int32), *(part.indices for part in parts)]),
            np.cumsum(sizes),
        ),
        shape=(len(sizes) - 1, width),
    )
