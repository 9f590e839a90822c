"""Gandalf: soft targets of label texts that are posed as training points (thesis, chapter 1)."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_matrix, diags_array, identity

from xmc_jax.data.batching.pools import contains, row_entries
from xmc_jax.data.graph import label_graph

VARIANTS = ("graph", "self", "walk", "symmetric", "glas")


def targets(labels: csr_matrix, variant: str, *, delta: float = 0.1, seed: int = 0) -> csr_matrix:
    """Soft targets by the name of their variant.

    Args:
      labels: ``Y [N, L]``, every stored value 1; rows that are held out are empty.
      variant: ``graph`` (`gandalf_targets`), ``self`` (`self_targets`), ``walk`` (`walk_targets`),
        ``symmetric`` (`symmetric_targets`) or ``glas`` (`glas_targets`).
      delta: threshold; ``self`` and ``glas`` have none.
      seed: of the walks.

    Returns:
      ``[L, L]`` float32; row j belongs to the text of label j.

    Raises:
      ValueError: unknown variant, a threshold out of range, or values other than 1.
    """
    if variant == "graph":
        return gandalf_targets(labels, delta=delta)
    if variant == "self":
        return self_targets(labels)
    if variant == "walk":
        return walk_targets(labels, delta=delta, seed=seed)
    if variant == "symmetric":
        return symmetric_targets(labels, delta=delta)
    if variant == "glas":
        return glas_targets(labels)
    raise ValueError(f"variant {variant!r}: expected one of {', '.join(VARIANTS)}.")


def gandalf_targets(
    labels: csr_matrix,
    *,
    delta: float = 0.1,
    depth: int | None = None,
    num_threads: int | None = None,
) -> csr_matrix:
    """Soft targets of label texts, ``y_ji = G_ij / G_jj`` where that is above delta (thesis 1.6).

    ``G = Y^T Y``, so that y_ji estimates ``P[Y_i = 1 | Y_j = 1]``. A label without points keeps
    its own target alone.

    Args:
      labels: ``Y [N, L]``, every stored value 1.
      delta: conditionals at or below it are dropped.
      depth: at most so many targets a row, the largest; None = all.
      num_threads: None = all cores.

    Returns:
      ``[L, L]`` float32, values in (delta, 1], 1 on the diagonal.

    Raises:
      ValueError: delta out of range, or a stored value that is not 1.

    Example:
      >>> from scipy.sparse import csr_matrix
      >>> gandalf_targets(csr_matrix([[1, 1, 0], [1, 0, 0]]), delta=0.1).toarray()
      array([[1. , 0.5, 0. ],
             [1. , 1. , 0. ],
             [0. , 0. , 1. ]], dtype=float32)
    """
    _check(delta)
    rule = lambda together, row, column: _above(together / row, delta)
    return label_graph.cooccurrence(labels, rule, depth=depth, num_threads=num_threads)


def symmetric_targets(
    labels: csr_matrix, *, delta: float = 0.1, num_threads: int | None = None
) -> csr_matrix:
    """Symmetrised conditionals ``S_ij`` (thesis 1.9) where they are above delta.

    ``S_ij = (P[Y_i = 1 | Y_j = 1] + P[Y_j = 1 | Y_i = 1]) / 2``; the threshold is that of 1.6.
    Arguments, result and errors are those of `gandalf_targets`.
    """
    _check(delta)
    rule = lambda together, row, column: _above(_symmetric(together, row, column), delta)
    return label_graph.cooccurrence(labels, rule, num_threads=num_threads)


def glas_targets(labels: csr_matrix, *, num_threads: int | None = None) -> csr_matrix:
    """Targets that suit the GLaS regularizer: ``sigmoid(S_ij)`` where S_ij > 0 (thesis, 1.3.2).

    Without a threshold all of the graph is kept, at values from 0.5 to 0.73: it is for label sets
    whose graph fits in memory. Arguments, result and errors otherwise as `gandalf_targets`.
    """
    rule = lambda together, row, column: 1 / (1 + np.exp(-_symmetric(together, row, column)))
    return label_graph.cooccurrence(labels, rule, num_threads=num_threads)


def walk_targets(
    labels: csr_matrix, *, delta: float = 0.1, seed: int = 0, num_threads: int | None = None
) -> csr_matrix:
    """Soft targets whose ``G_ij`` and ``G_jj`` are visits of j's random walk (thesis, table 1.7).

    The walk is ECLARE's: 400 steps, restart 0.8, labels above 500 points cut. A neighbour that was
    visited more often than the label itself gets 1, our reading. Otherwise as `gandalf_targets`.
    """
    _check(delta)
    rule = lambda visits, own, _: _above(np.minimum(visits / own, 1), delta)
    return label_graph.random_walks(labels, rule, seed=seed, num_threads=num_threads)


def self_targets(labels: csr_matrix) -> csr_matrix:
    """Self-annotation, the thesis' Z': the only target of a label's text is that label."""
    return identity(labels.shape[1], np.float32, "csr")


def neighbours_held(
    labels: csr_matrix, rows: np.ndarray, label_ids: np.ndarray, *, depth: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    """Looks at postulate 1.3.1, ``P[Y_i = 1 | X = z_j] = P[Y_i = 1 | Y_j = 1]``, where z_j is seen.

    A point that holds the label itself is left out of that label's counts.

    Args:
      labels: ``Y [N, L]``, every stored value 1.
      rows: ``[n]`` points whose text is a label's.
      label_ids: ``[n]`` those labels j.
      depth: k, strongest neighbours i of each label that are looked for.

    Returns:
      whether the point holds each neighbour, bool ``[n, k]``, and the neighbour's conditional
      ``[n, k]``, 0 where a label has fewer.
    """
    points = labels[rows].astype(np.float64)  # [n, L]
    place, label = row_entries(points, np.arange(len(rows)))
    keys = place * labels.shape[1] + label
    own = np.arange(len(rows)) * labels.shape[1]
    counts = labels.tocsc()[:, label_ids].T @ labels
    holds = contains(keys, own + label_ids).astype(np.float64)
    counts = csr_matrix(counts - diags_array(holds) @ points)
    conditionals = label_graph.conditional_rows(counts, label_ids)
    ids, promised = label_graph.strongest(conditionals, depth)
    return contains(keys, own[:, None] + ids) & (ids >= 0), promised


def _check(delta: float) -> None:
    if not 0 <= delta < 1:
        raise ValueError(f"delta: found {delta}; expected 0 <= delta < 1.")


def _above(values: np.ndarray, delta: float) -> np.ndarray:
    return np.where(values > delta, values, 0)


def _symmetric(together: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    return 0.5 * (together / row + together / column)
