"""Hierarchical balanced 2-means: clusters of similar queries that become batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

Run = Callable[..., Iterable[Any]]  # `map`, or that of a pool of threads
Tile = tuple[int | slice, int]  # a cluster or several, and the first of the columns
_TILE = 4096  # rows worked on together: 4 MB at d = 256, which stays in a core's share of the cache


def balanced_clusters(
    x: np.ndarray,
    num_levels: int,
    *,
    seed: int,
    tolerance: float = 1e-4,
    max_iterations: int = 50,
    num_threads: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Halves a set of vectors ``num_levels`` times into ``2^num_levels`` clusters of equal size.

    A level splits every cluster (NGAME's balanced 2-means, on rows of unit length): two distinct
    random rows are the first centres ``c0, c1``; rows are cut at the median of ``x.c1 - x.c0``; the
    new centres are the normalised means of the halves; this ends when the mean similarity of a row
    to its centre grows by less than ``tolerance``. Equal differences are cut by row number, so
    identical rows split too. All clusters of a level are worked on together, in tiles of rows.
    The result depends on the seed alone, not on the number of threads.

    Args:
      x: ``[N, d]`` float32, of any row lengths; may be memory-mapped. One copy is made.
      num_levels: 0 or more; at most ``log2(N)``.
      seed: of the first centres.
      tolerance: see above.
      max_iterations: bound on the iterations of a level.
      num_threads: all cores by default.

    Returns:
      ``order [N]`` int64, the rows cluster by cluster (ascending within a cluster), and
      ``offsets [2^num_levels + 1]`` int64, where each cluster starts. Sizes differ by at most one.
      Every ``2^j`` neighbours are one cluster of j levels above.

    Raises:
      ValueError: for more clusters than rows, or a value in ``x`` that is not finite.
    """
    num_rows, dim = x.shape
    if num_levels < 0 or 2**num_levels > num_rows:
        raise ValueError(
            f"2^{num_levels} clusters were asked of {num_rows} rows; expected 0 to"
            f" {max(0, num_rows.bit_length() - 1)} levels, so that no cluster is empty."
        )
    order, offsets = np.arange(num_rows), np.array([0, num_rows])
    scale = _inverse_lengths(x)
    copy = np.empty((num_rows + 2**num_levels) * dim if num_levels else 0, np.float32)
    threads = num_threads or os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        for level in range(num_levels):
            sizes = np.diff(offsets)
            column = np.arange(sizes.max())
            real = column < sizes[:, None]  # [C, s]
            rows = order[offsets[:-1, None] + np.where(real, column, 0)]
            z = copy[: rows.size * dim].reshape(*rows.shape, dim)  # [C, s, d]
            rng = np.random.default_rng([seed, level])
            first = rng.integers(0, sizes)
            second = rng.integers(0, sizes - 1)
            second += second >= first
            problem = _Level(x, rows, z, np.where(real, scale[rows], 0), sizes, first, second)
            upper = problem.split(pool.map, tolerance, max_iterations)
            order, offsets = _regroup(rows, real, upper, offsets)
    return order, offsets


class _Level:
    """All clusters of a level, or a range of them, as arrays padded to the largest size ``s``.

    ``rows [C, s]`` of x; ``z [C, s, d]`` room for their values, which are as long as in x;
    ``scale [C, s]`` inverse lengths, 0 in pads; ``sizes``, ``first`` and ``second [C]``.
    """

    def __init__(
        self,
        x: np.ndarray,
        rows: np.ndarray,
        z: np.ndarray,
        scale: np.ndarray,
        sizes: np.ndarray,
        first: np.ndarray,
        second: np.ndarray,
    ) -> None:
        self.x, self.rows, self.z, self.scale = x, rows, z, scale.astype(np.float32)
        self.sizes, self.first, self.second = sizes, first, second

    def split(self, run: Run, tolerance: float, max_iterations: int) -> np.ndarray:
        """``[C, s]`` bool: which rows go to the upper half of their cluster."""
        count, size = self.rows.shape
        upper = np.zeros(self.rows.shape, bool)
        if size > _TILE:  # a cluster is many tiles: a pass over a tile is a job
            tiles = [(c, a) for c in range(count) for a in range(0, size, _TILE)]
            upper[:] = self._iterate(run, tiles, tolerance, max_iterations)
            return upper
        step = _TILE // size  # a tile is many clusters: all iterations over a tile are a job

        def job(start: int) -> None:
            part = slice(start, start + step)
            arrays = (self.rows, self.z, self.scale, self.sizes, self.first, self.second)
            tile = _Level(self.x, *(array[part] for array in arrays))
            upper[part] = tile._iterate(map, [(slice(None), 0)], tolerance, max_iterations)

        list(run(job, range(0, count, step)))
        return upper

    def _iterate(
        self, run: Run, tiles: Sequence[Tile], tolerance: float, max_iterations: int
    ) -> np.ndarray:
        """2-means over tiles (cluster or slice of clusters, first column) with the map ``run``."""
        count, size, dim = self.z.shape
        scores = np.zeros((count, size), np.float32)

        def cut(
            array: np.ndarray, tile: Tile
        ) -> np.ndarray:  # a view [clusters of the tile, its columns, ...]
            cluster, start = tile
            part = slice(cluster, cluster + 1) if isinstance(cluster, int) else cluster
            return array[part, start : start + _TILE]

        def load(tile: Tile) -> None:
            np.take(self.x, cut(self.rows, tile), axis=0, out=cut(self.z, tile), mode="clip")

        def score(tile: Tile) -> None:
            values = np.einsum("csd,cd->cs", cut(self.z, tile), cut(centre, (tile[0], 0))[:, 0])
            np.multiply(values, cut(self.scale, tile), out=cut(scores, tile))

        def add(tile: Tile) -> np.ndarray:
            return np.einsum("cs,csd->cd", cut(weights, tile), cut(self.z, tile))

        def total() -> np.ndarray:  # in float64 and in the order of the tiles: one result always
            result = np.zeros((count, dim))
            for tile, part in zip(todo, run(add, todo)):
                result[tile[0]] += part if isinstance(tile[0], slice) else part[0]
            return result

        todo, weights = list(tiles), self.scale
        list(run(load, tiles))
        everything = total()
        each = np.arange(count)
        ends = [self.z[each, at] * self.scale[each, at, None] for at in (self.first, self.second)]
        centre = (ends[1] - ends[0])[:, None]  # [C, 1, d]: c1 - c0
        upper = np.zeros((count, size), bool)
        similarity, active = np.full(count, -2.0), np.ones(count, bool)
        for _ in range(max_iterations):
            list(run(score, todo))
            upper[active] = _upper_half(scores[active], self.sizes[active])
            weights = np.where(upper, self.scale, 0)
            high = total()
            low = everything - high
            lengths = np.linalg.norm(low, axis=1), np.linalg.norm(high, axis=1)
            unit = [s / np.maximum(n, 1e-30)[:, None] for s, n in zip((low, high), lengths)]
            centre = (unit[1] - unit[0]).astype(np.float32)[:, None]
            grown = (lengths[0] + lengths[1]) / self.sizes
            active &= grown - similarity >= tolerance
            similarity = grown
            todo = [tile for tile in tiles if active[tile[0]].any()]
            if not todo:
                break
        return upper


def _inverse_lengths(x: np.ndarray) -> np.ndarray:
    """``[N]`` float32, 0 for a row of zeros."""
    lengths = np.empty(len(x), np.float32)
    for start in range(0, len(x), _TILE):
        part = np.asarray(x[start : start + _TILE])
        lengths[start : start + _TILE] = np.sqrt(np.einsum("nd,nd->n", part, part))
    if not np.isfinite(lengths).all():
        row = int(np.flatnonzero(~np.isfinite(lengths))[0])
        raise ValueError(
            f"row {row} of the vectors holds a value that is not finite (or too large to square):"
            " the encoder that made them has diverged; go back to a checkpoint before it did."
        )
    return np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0)


def _upper_half(scores: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """``[C, s]`` bool: all but the ``sizes // 2`` lowest scores of the first ``sizes`` columns."""
    # One integer holds a score and its column: distinct, so that equal scores are cut by row.
    bits = (scores + 0.0).view(np.int32)  # + 0: minus zero becomes zero
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64) << 32
    column = np.arange(scores.shape[1])
    keys |= column
    real = column < sizes[:, None]
    keys[~real] = np.iinfo(np.int64).max
    middle = sizes // 2
    ranked = np.partition(keys, np.unique(middle), axis=1)
    return real & (keys >= ranked[np.arange(len(sizes)), middle][:, None])


def _regroup(
    rows: np.ndarray, real: np.ndarray, upper: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Order and offsets of the next level: the lower half of each cluster, then the upper."""
    middles = offsets[:-1] + np.diff(offsets) // 2
    order = np.empty(offsets[-1], np.int64)
    for half, start in ((real & ~upper, offsets[:-1]), (upper, middles)):
        rank = np.cumsum(half, axis=1) - 1
        order[(start[:, None] + rank)[half]] = rows[half]
    return order, np.append(np.stack([offsets[:-1], middles], axis=1).reshape(-1), offsets[-1])
