"""Which labels stand together: co-occurrence counts, exact or by random walks, never held whole.

Both are made block by block of label rows, in threads. A rule turns the counts of a block into
weights, and what it gives weight 0 is dropped before the next block begins.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from scipy.sparse import csr_matrix, identity, vstack

BLOCK_PRODUCTS = 1 << 22  # pairs of labels that one block of the exact graph multiplies out
BLOCK_WALKS = 1 << 13  # labels of one block of random walks
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_LOW = np.uint64(0xFFFFFFFF)

Rule = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def cooccurrence(
    labels: csr_matrix, rule: Rule, *, depth: int | None = None, num_threads: int | None = None
) -> csr_matrix:
    """Weights of the co-occurrence graph ``G = Y^T Y`` (thesis, section 1.3).

    A label without points counts as one that has a point of its own, so ``G_jj`` is at least 1.

    Args:
      labels: ``Y [N, L]``, every stored value 1.
      rule: ``rule(G_ij, G_jj, G_ii) -> weights`` of the entries of some rows j, elementwise.
      depth: at most so many of a row's weights, the heaviest; None = all.
      num_threads: None = all cores.

    Returns:
      ``[L, L]`` float32: row j holds the weights above 0 of label j's neighbours i.

    Raises:
      ValueError: a stored value is not 1.
    """
    _check_binary(labels)
    points = np.bincount(labels.indices, minlength=labels.shape[1])
    labels = _with_own_points(labels, points == 0)
    points = np.maximum(points, 1)
    by_label = labels.tocsc().T  # [L, N] CSR
    sizes = np.diff(labels.indptr)
    products = np.bincount(labels.indices, np.repeat(sizes, sizes), labels.shape[1])
    wanted = np.arange(BLOCK_PRODUCTS, products.sum(), BLOCK_PRODUCTS)
    cuts = np.searchsorted(np.cumsum(products), wanted) + 1

    def block(begin: int, end: int) -> csr_matrix:
        counts = by_label[begin:end] @ labels
        of_row = np.repeat(points[begin:end], np.diff(counts.indptr))
        weights = rule(counts.data.astype(np.float64), of_row, points[counts.indices])
        weighed = _weighed(counts, weights)
        return weighed if depth is None else _cut(weighed, depth)

    return _in_blocks(block, cuts, labels.shape[1], num_threads)


def random_walks(
    labels: csr_matrix,
    rule: Rule,
    *,
    steps: int = 400,
    restart: float = 0.8,
    hub_points: int = 500,
    depth: int | None = None,
    seed: int = 0,
    num_threads: int | None = None,
) -> csr_matrix:
    """Weights of the graph of random walks (thesis, table 1.7; ECLARE's walk).

    From each label: a step goes to a random point of the current label, then to a random label of
    that point, which is visited; before each step but the first the walk returns to its source with
    probability ``restart``. Labels with more than ``hub_points`` points are cut from the data
    first: they, and labels without points, visit themselves alone. Draws are a hash of seed, label
    and step, so neither blocks nor threads change them.

    Args:
      labels: ``Y [N, L]``, every stored value 1.
      rule: ``rule(visits V_ij, V_jj, V_jj) -> weights``, elementwise; ``V_jj`` is 1 at least.
      steps: of each walk.
      restart: probability to return.
      hub_points: 0 = no label is cut.
      depth: so many weights of a row are kept, the heaviest (ties: the lower id); None = all.
      seed: of all walks.
      num_threads: None = all cores.

    Returns:
      ``[L, L]`` float32: row j holds the weights above 0 of the labels that j's walk visited.

    Raises:
      ValueError: a stored value is not 1, no step, or a probability that is none.
    """
    _check_binary(labels)
    if steps < 1 or not 0 <= restart <= 1:
        raise ValueError(
            f"steps = {steps}, restart = {restart}: expected a step at least and a probability."
        )
    points = np.bincount(labels.indices, minlength=labels.shape[1])
    cut = points > hub_points if hub_points else np.zeros(len(points), bool)
    if cut.any():
        labels = _without_columns(labels, cut)
    labels = _with_own_points(labels, cut | (points == 0))
    by_label = labels.tocsc().T
    cuts = np.arange(BLOCK_WALKS, labels.shape[1], BLOCK_WALKS)

    def block(begin: int, end: int) -> csr_matrix:
        sources = np.arange(begin, end)
        visited = _walk(sources, by_label, labels, steps, restart, seed)
        counts = _count(visited, labels.shape[1])
        row_sizes = np.diff(counts.indptr)
        own = counts.indices == np.repeat(sources, row_sizes)
        counts.data[own] = np.maximum(counts.data[own] - 1, 1)  # without the start, but some
        of_row = np.repeat(counts.data[own], row_sizes).astype(np.float64)
        weighed = _weighed(counts, rule(counts.data.astype(np.float64), of_row, of_row))
        return weighed if depth is None else _cut(weighed, depth)

    return _in_blocks(block, cuts, labels.shape[1], num_threads)


def strongest(weights: csr_matrix, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``depth`` heaviest entries of each row, ties to the lower id.

    Args:
      weights: ``[n, L]``, canonical, values above 0.
      depth: k, at least 1.

    Returns:
      ids int32 ``[n, k]``, -1 = none, and their weights ``[n, k]``, 0 where there is none.
    """
    row = np.repeat(np.arange(weights.shape[0]), np.diff(weights.indptr))
    order = np.lexsort((weights.indices, -weights.data, row))
    rank = np.arange(row.size) - weights.indptr[row]
    kept = rank < depth
    ids = np.full((weights.shape[0], depth), -1, np.int32)
    values = np.zeros(ids.shape, weights.dtype)
    ids[row[kept], rank[kept]] = weights.indices[order][kept]
    values[row[kept], rank[kept]] = weights.data[order][kept]
    return ids, values


def _cut(weights: csr_matrix, depth: int) -> csr_matrix:
    """The `strongest` entries of each row, columns ascending."""
    ids, values = strongest(weights, depth)
    real = ids >= 0
    indptr = np.concatenate([[0], np.cumsum(real.sum(axis=1))])
    kept = csr_matrix((values[real], ids[real], indptr), weights.shape)
    kept.sort_indices()
    return kept


def conditionals(labels: csr_matrix, chosen: np.ndarray) -> csr_matrix:
    """``P[Y_i = 1 | Y_j = 1]`` for some labels j and all i but j itself (thesis 1.5).

    Args:
      labels: ``Y [N, L]``, every stored value 1.
      chosen: ``[n]`` label ids j.

    Returns:
      ``[n, L]`` float64, canonical.
    """
    counts = csr_matrix(labels.tocsc()[:, chosen].T @ labels, dtype=np.float64)
    return conditional_rows(counts, chosen)


def conditional_rows(counts: csr_matrix, chosen: np.ndarray) -> csr_matrix:
    """Rows ``G_j`` of chosen labels divided by ``G_jj``, without the diagonal and zeros."""
    row = np.repeat(np.arange(len(chosen)), np.diff(counts.indptr))
    own = counts.indices == chosen[row]
    points = np.bincount(row[own], counts.data[own], len(chosen))
    values = np.where(own, 0, counts.data) / np.maximum(points, 1)[row]
    divided = csr_matrix((values, counts.indices, counts.indptr), counts.shape)
    divided.eliminate_zeros()
    divided.sort_indices()
    return divided


def _check_binary(labels: csr_matrix) -> None:
    if labels.nnz and not (labels.data.min() == labels.data.max() == 1):
        raise ValueError(
            f"label matrix with values from {labels.data.min()} to {labels.data.max()}: the label "
            "graph counts points, so every stored value must be 1. Set labels.data[:] = 1."
        )


def _with_own_points(labels: csr_matrix, chosen: np.ndarray) -> csr_matrix:
    """The matrix with one more row for each chosen label, which that label has to itself."""
    if not chosen.any():
        return labels
    own = identity(labels.shape[1], labels.dtype, "csr")[np.flatnonzero(chosen)]
    return vstack([labels, own], "csr")


def _without_columns(labels: csr_matrix, cut: np.ndarray) -> csr_matrix:
    """The matrix with the entries of some columns removed."""
    kept = ~cut[labels.indices]
    indptr = np.concatenate([[0], np.cumsum(kept)])[labels.indptr]
    return csr_matrix((labels.data[kept], labels.indices[kept], indptr), labels.shape)


def _weighed(counts: csr_matrix, weights: np.ndarray) -> csr_matrix:
    """Those weights of a block that are above 0, columns ascending."""
    kept = weights > 0
    indptr = np.concatenate([[0], np.cumsum(kept)])[counts.indptr]
    weighed = csr_matrix(
        (weights[kept].astype(np.float32), counts.indices[kept], indptr), counts.shape
    )
    weighed.sort_indices()
    return weighed


def _in_blocks(
    block: Callable[[int, int], csr_matrix],
    cuts: np.ndarray,
    num_labels: int,
    num_threads: int | None,
) -> csr_matrix:
    """The rows of all blocks as one matrix; a block's memory is free once it was copied."""
    bounds = np.unique(np.concatenate([[0], cuts, [num_labels]]))
    with ThreadPoolExecutor(num_threads or os.cpu_count()) as pool:
        blocks = list(pool.map(block, bounds[:-1], bounds[1:]))
    sizes = np.concatenate([[0], *(np.diff(part.indptr) for part in blocks)])
    indptr = np.cumsum(sizes, dtype=np.int64)
    indices, data = np.empty(indptr[-1], np.int32), np.empty(indptr[-1], np.float32)
    for number, begin in enumerate(indptr[bounds[:-1]]):
        part, blocks[number] = blocks[number], None
        indices[begin : begin + part.nnz], data[begin : begin + part.nnz] = part.indices, part.data
    whole = csr_matrix((data, indices, indptr), (num_labels, num_labels))
    whole.has_canonical_format = True
    return whole


def _walk(
    sources: np.ndarray,
    by_label: csr_matrix,
    labels: csr_matrix,
    steps: int,
    restart: float,
    seed: int,
) -> np.ndarray:
    """Labels visited, ``[steps + 1, sources]`` int32; the last row is the sources themselves."""
    visited = np.empty((steps + 1, len(sources)), np.int32)
    visited[steps] = sources
    streams = _mix(sources.astype(np.uint64) + np.uint64(seed * _GOLDEN % 2**64))
    returns = np.uint64(restart * 2**32)
    current = sources
    for step in range(steps):
        draws = _mix(streams + np.uint64((step + 1) * _GOLDEN % 2**64))
        if step:
            back = _mix(~draws) >> np.uint64(32) < returns
            current = np.where(back, sources, current)
        point = _random_entry(by_label, current, draws >> np.uint64(32))
        current = _random_entry(labels, point, draws & _LOW)
        visited[step] = current
    return visited


def _random_entry(matrix: csr_matrix, rows: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """An entry of each row; ``draws`` are below 2^32."""
    starts = matrix.indptr[rows]
    sizes = (matrix.indptr[rows + 1] - starts).astype(np.uint64)
    return matrix.indices[starts + (draws * sizes >> np.uint64(32)).astype(np.int64)]


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: a hash of 64-bit integers."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def _count(visited: np.ndarray, num_labels: int) -> csr_matrix:
    """How often each source visited each label, ``[sources, L]``."""
    number = visited.shape[1]
    keys = np.sort((np.arange(number) << 32 | visited.astype(np.int64)).ravel())
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    counts = np.diff(np.append(starts, keys.size)).astype(np.float32)
    row, label = keys[starts] >> 32, keys[starts] & int(_LOW)
    indptr = np.searchsorted(row, np.arange(number + 1))
    return csr_matrix((counts, label.astype(np.int32), indptr), (number, num_labels))
