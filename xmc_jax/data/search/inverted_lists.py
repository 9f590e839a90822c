"""Inverted lists of vectors, searched list by list for many queries at once.

FAISS scans the lists of one query after the other: every list comes from memory anew for each
query, at a tenth of a core's speed. Here all queries of a block that visit a list are scored
against it in one matrix product, nearest lists first, and only scores above a query's k-th best so
far are looked at. Where queries visit few lists, FAISS is as fast (``experiments/README.md``).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from xmc_jax.data.search.exact_search import exact_search, host_product, merge

Run = Callable[..., Iterable[Any]]  # `map`, or that of a pool of threads
Product = Callable[[np.ndarray, np.ndarray], np.ndarray]  # a @ b.T
Results = tuple[np.ndarray, np.ndarray, np.ndarray]  # rows, scores, ids

BLOCK = 1 << 17  # queries that are worth searching at once: about thirty a list and visit
_ROWS = 1024  # vectors whose nearest centroids are looked for together
_TILE = 512  # vectors of a list in one product
_QUERIES = 2048  # queries in one product
_ROUND = (1, 3, 8)  # lists visited before a query's k-th best score is looked up again
_CHUNK = 1024  # queries whose results are merged together


class InvertedLists:
    """Vectors in lists, each list around a centroid; made by `build`.

    Attributes:
      centroids: ``[C, d]`` float32, unit rows.
      held: ``[L + 511, d]``, vectors list by list; the last rows are room for whole tiles.
      ids: ``[L]`` int32, numbers of those vectors, ascending within a list.
      starts: ``[C + 1]`` int64, where each list starts.
    """

    def __init__(self, centroids: np.ndarray, vectors: np.ndarray):
        """Puts every vector into the list of the centroid of highest inner product."""
        assigned = nearest(vectors, centroids)
        self.centroids = centroids
        self.ids = np.argsort(assigned, kind="stable").astype(np.int32)
        counts = np.bincount(assigned, minlength=len(centroids))
        self.starts = _ends(counts)
        self.held = np.zeros((len(vectors) + _TILE - 1, vectors.shape[1]), vectors.dtype)
        np.take(vectors, self.ids, axis=0, out=self.held[: len(vectors)])

    @classmethod
    def build(
        cls, vectors: np.ndarray, sample: np.ndarray, number: int, *, seed: int
    ) -> InvertedLists:
        """Lists around the centroids of spherical k-means of a sample of the vectors."""
        return cls(spherical_means(sample, number, seed=seed), vectors)

    def search(self, queries: np.ndarray, k: int, nprobe: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best vectors of the ``nprobe`` lists whose centroids are nearest.

        Memory beside the arguments: about ``40 k`` bytes a query. The result does not depend on
        the number of threads.

        Args:
          queries: ``[n, d]`` float32.
          k: results a query.
          nprobe: lists that a query visits.

        Returns:
          scores ``[n, k]`` float32, descending, and ids ``[n, k]`` int32; -inf and -1 where those
          lists hold fewer than k vectors.
        """
        scores = np.full((len(queries), k), -np.inf, np.float32)
        ids = np.full((len(queries), k), -1, np.int32)
        nprobe = min(nprobe, len(self.centroids))
        product = host_product()
        with ThreadPoolExecutor(os.cpu_count() or 1) as workers:
            for start in range(0, len(queries), BLOCK):
                part = slice(start, start + BLOCK)
                block = np.ascontiguousarray(queries[part], np.float32)
                probes = exact_search(block, self.centroids, nprobe)[1]  # [b, nprobe]
                edges = [0, *(edge for edge in _ROUND if edge < nprobe), nprobe]
                for first, last in itertools.pairwise(edges):
                    visits = probes[:, first:last]
                    self._visit(workers.map, product, block, visits, scores[part], ids[part])
        return scores, ids

    def _visit(
        self,
        run: Run,
        product: Product,
        queries: np.ndarray,
        probes: np.ndarray,
        scores: np.ndarray,
        ids: np.ndarray,
    ) -> None:
        """Improves ``scores, ids [b, k]`` by the lists ``probes [b, visits]`` of each query."""
        visits = probes.reshape(-1)
        order = np.argsort(visits, kind="stable")
        edges = np.searchsorted(visits[order], np.arange(len(self.centroids) + 1))
        visitors = (order // probes.shape[1]).astype(np.int32)  # ascending within a list

        def scan(number: int) -> list[Results]:
            rows = visitors[edges[number] : edges[number + 1]]
            return self._scan(product, queries, rows, number, scores)

        better = [part for parts in run(scan, np.flatnonzero(np.diff(edges))) for part in parts]
        if not better:  # those lists are empty
            return
        row, score, label = (np.concatenate(parts) for parts in zip(*better))
        order = np.argsort(row, kind="stable")
        bounds = np.searchsorted(row[order], np.arange(0, len(queries) + _CHUNK, _CHUNK))

        def improve(chunk: int) -> None:
            at, first = order[bounds[chunk] : bounds[chunk + 1]], chunk * _CHUNK
            part = slice(first, first + _CHUNK)
            merge(scores[part], ids[part], row[at] - first, score[at], label[at])

        list(run(improve, range(len(bounds) - 1)))

    def _scan(
        self,
        product: Product,
        queries: np.ndarray,
        rows: np.ndarray,
        number: int,
        scores: np.ndarray,
    ) -> list[Results]:
        """(rows, scores, ids) of what in list ``number`` is above the k-th best of its visitors."""
        k = scores.shape[1]
        better: list[Results] = []
        start, stop = self.starts[number], self.starts[number + 1]
        for first in range(start, stop, _TILE):
            width = min(_TILE, stop - first)
            labels = self.held[first : first + -(-width // 64) * 64]
            for place in range(0, len(rows), _QUERIES):
                part = rows[place : place + _QUERIES]
                size = max(32, 1 << (len(part) - 1).bit_length())  # few sizes, few compilations
                block = np.zeros((size, queries.shape[1]), np.float32)
                np.take(queries, part, axis=0, out=block[: len(part)])
                s = product(block, labels)[: len(part), :width]
                limit = scores[part, -1:]
                if width > k and np.isneginf(limit).any():  # k of these are enough
                    limit = np.maximum(limit, np.partition(s, -k, axis=1)[:, -k, None])
                above = (s >= limit) & (s > -np.inf)
                at, column = np.divmod(np.flatnonzero(above), width)
                ids = self.ids[first + column]
                better.append((part[at], s[at, column], ids))
        return better


def nearest(vectors: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """``[n]`` int32: the centroid of highest inner product of each vector; ties: the lower one."""
    closest = np.zeros(len(vectors), np.int32)
    product = host_product()

    def job(start: int) -> None:
        part = vectors[start : start + _ROWS]
        block = np.zeros((_ROWS, vectors.shape[1]), np.float32)  # one size, one compilation
        block[: len(part)] = part
        closest[start : start + _ROWS] = product(block, centroids)[: len(part)].argmax(axis=1)

    with ThreadPoolExecutor(os.cpu_count() or 1) as workers:
        list(workers.map(job, range(0, len(vectors), _ROWS)))
    return closest


def spherical_means(x: np.ndarray, number: int, *, seed: int, rounds: int = 10) -> np.ndarray:
    """``[number, d]`` unit rows: k-means by inner product.

    A centroid is the normalised sum of the rows nearest to it. One that is nearest to none starts
    anew as a copy, slightly moved, of the centroid of most rows.

    Args:
      x: ``[n, d]`` float32, at least ``number`` rows.
      number: of centroids.
      seed: of the rows they start from.
      rounds: of assignment and averaging.
    """
    rng = np.random.default_rng(seed)
    centroids = _unit(x[np.sort(rng.permutation(len(x))[:number])])
    for _ in range(rounds):
        assigned = nearest(x, centroids)
        counts = np.bincount(assigned, minlength=number)
        members = csr_matrix(
            (np.ones(len(x), np.float32), np.argsort(assigned, kind="stable"), _ends(counts)),
            shape=(number, len(x)),
        )
        centroids = _unit(members @ x)
        empty = np.flatnonzero(counts == 0)
        full = np.argsort(-counts, kind="stable")[: empty.size]
        noise = rng.standard_normal((empty.size, x.shape[1]), np.float32)
        centroids[empty] = _unit(centroids[full] + noise / (16 * np.sqrt(x.shape[1])))
    return centroids


def _ends(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)])


def _unit(x: np.ndarray) -> np.ndarray:
    """Rows of unit length; rows of zeros stay."""
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    return np.divide(x, lengths, out=np.zeros_like(x, np.float32), where=lengths > 0)
