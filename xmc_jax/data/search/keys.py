"""Keys and what they stand for: the nearest ones of a query vote for labels."""

from __future__ import annotations

import jax
import numpy as np
from scipy.sparse import csr_matrix, vstack

from xmc_jax.data.search.index import Index, choose


class Keys:
    """Vectors, each with a row of weighted labels.

    Attributes:
      vectors: ``[n, d]``, float16 or float32; may be memory-mapped.
      labels: ``[n, L]``.
      kind: how they are searched: exact, hnsw, ivf or auto.
    """

    def __init__(
        self, vectors: np.ndarray, labels: csr_matrix, *, kind: str = "exact", seed: int = 0
    ) -> None:
        """An index is built when keys are first searched.

        Args:
          vectors: ``[n, d]``.
          labels: ``[n, L]``.
          kind: of the index.
          seed: of the index.

        Raises:
          ValueError: another number of rows.
        """
        if vectors.shape[0] != labels.shape[0]:
            raise ValueError(f"{vectors.shape[0]} keys, {labels.shape[0]} rows: expected as many.")
        self.vectors, self.labels, self.kind, self._seed = vectors, labels, kind, seed
        self._index: Index | None = None

    def __len__(self) -> int:
        return self.vectors.shape[0]

    def nearest(self, queries: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
        """The m keys of highest inner product: these ``[q, m]``, descending, and rows (-1 = none).

        Args:
          queries: ``[q, d]`` float32.
          m: keys a query.
        """
        if not len(self):
            return np.full((len(queries), m), -np.inf, np.float32), np.full((len(queries), m), -1)
        if self._index is None:
            kind = self.kind
            if kind == "auto":
                accelerator = jax.default_backend() != "cpu"
                kind, _ = choose(len(queries), *self.vectors.shape, accelerator=accelerator)
            self._index = Index.of_keys(self.vectors, kind, seed=self._seed)
        return self._index.search(queries, m)

    def votes(self, near: tuple[np.ndarray, np.ndarray], temperature: float) -> csr_matrix:
        """``sum_i a_i labels_i`` with ``a = softmax(similarity / temperature)`` over what is near.

        Args:
          near: of `nearest`, or its first columns.
          temperature: tau.

        Returns:
          ``[q, L]`` float32, columns ascending.
        """
        weights = self.weights(near[0], temperature)
        voting = near[1] >= 0
        indptr = np.concatenate([[0], np.cumsum(voting.sum(axis=1))])
        shape = len(near[1]), len(self)
        votes = csr_matrix((weights[voting], near[1][voting], indptr), shape) @ self.labels
        votes.sort_indices()
        return votes

    def joined(self, more: Keys) -> Keys:
        """These keys and then some more, which are not copied."""
        return _JoinedKeys(self, more)

    @staticmethod
    def weights(similarities: np.ndarray, temperature: float) -> np.ndarray:
        """a, ``[q, m]`` float32; rows without any key are 0."""
        highest = np.where(np.isneginf(similarities[:, :1]), 0, similarities[:, :1])
        weights = np.exp((similarities - highest) / np.float32(temperature))
        return weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-30)


class _JoinedKeys(Keys):
    """Two lots of keys, each searched by its own index."""

    def __init__(self, first: Keys, more: Keys) -> None:
        width = max(first.labels.shape[1], more.labels.shape[1])
        labels = [
            csr_matrix((x.data, x.indices, x.indptr), (len(lot), width))
            for lot in (first, more)
            for x in [lot.labels]
        ]
        self.labels, self._lots = vstack(labels, "csr"), (first, more)

    def __len__(self) -> int:
        return self.labels.shape[0]

    def nearest(self, queries: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
        parts = [lot.nearest(queries, m) for lot in self._lots]
        rows = np.where(parts[1][1] >= 0, parts[1][1] + len(self._lots[0]), -1)
        similarities = np.concatenate([parts[0][0], parts[1][0]], axis=1)
        rows = np.concatenate([parts[0][1], rows], axis=1)
        order = np.argsort(-similarities, axis=1, kind="stable")[:, :m]
        return np.take_along_axis(similarities, order, 1), np.take_along_axis(rows, order, 1)


def entries(matrix: csr_matrix, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Values at ``(rows, columns)``, 0 where nothing is stored.

    Args:
      matrix: columns of each row ascending.
      rows: ``[n]``.
      columns: ``[n]``; -1 has 0.
    """
    width = matrix.shape[1]
    stored = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr)) * width + matrix.indices
    if not len(stored):
        return np.zeros(len(rows), np.float32)
    wanted = rows.astype(np.int64) * width + columns
    place = np.minimum(np.searchsorted(stored, wanted), len(stored) - 1)
    return np.where((stored[place] == wanted) & (columns >= 0), matrix.data[place], 0)


def strongest_entries(votes: csr_matrix, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, label) of the ``most`` largest votes of each row, flat; of equal ones the lower ids.

    Args:
      votes: ``[n, L]``, columns of each row ascending, values above 0.
      most: votes of a row that are kept.
    """
    row = np.repeat(np.arange(votes.shape[0]), np.diff(votes.indptr))
    kept = np.ones(len(row), bool)
    if np.diff(votes.indptr).max(initial=0) > most:
        column = np.arange(len(row)) - votes.indptr[row]
        kept = largest(as_rows(votes.data, row, column, votes.shape[0], 0), most)[row, column]
    return row[kept], votes.indices[kept].astype(np.int64)


def as_rows(
    values: np.ndarray, row: np.ndarray, column: np.ndarray, number: int, empty: float
) -> np.ndarray:
    """Flat values as a matrix of ``number`` rows, with ``empty`` where there is none."""
    matrix = np.full((number, int(column.max(initial=-1)) + 1), empty, values.dtype)
    matrix[row, column] = values
    return matrix


def largest(matrix: np.ndarray, most: int) -> np.ndarray:
    """Where each row's ``most`` largest values are, bool; of equal ones the first."""
    surplus = matrix.shape[1] - most
    if surplus <= 0:
        return np.ones(matrix.shape, bool)
    least = np.partition(matrix, surplus, axis=1)[:, surplus, None]
    above, equal = matrix > least, matrix == least
    missing = most - above.sum(axis=1, keepdims=True)
    return above | (equal & (np.cumsum(equal, axis=1, dtype=np.int32) <= missing))
