"""Ranked lists of label ids: the best of some candidates, filter pairs removed, hits found.

Rows are worked off in blocks, so memory beyond inputs and results does not grow with them.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

_BLOCK_ENTRIES = 4_000_000  # predictions in one block: about 200 MB of temporaries


def cut_off(k: Any) -> int:
    """Returns k as an int; a ValueError if it is no whole number of at least 1."""
    if isinstance(k, bool) or not isinstance(k, numbers.Integral) or k < 1:
        raise ValueError(f"k: found {k!r}; expected a whole number, 1 or more.")
    return int(k)


def rank(scores: np.ndarray, ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the k best candidates of each row, best first; equal scores: the lower id first.

    Args:
      scores: ``[M, m]`` of any sign. What stands beside an id of -1 is never read.
      ids: ``[M, m]`` label ids, -1 = none; none comes after every real candidate, one with a score
        of -inf too.
      k: columns of the result; where a row has fewer candidates the rest is -inf and -1.

    Returns:
      ``([M, k] scores, [M, k] ids)`` in the types given.

    Raises:
      ValueError: shapes that differ, a NaN beside a real id, or k below 1.

    Example:
      >>> rank(np.array([[0.5, 0.9, 0.5]]), np.array([[7, 2, 3]]), 2)[1].tolist()
      [[2, 3]]
    """
    if scores.shape != ids.shape or scores.ndim != 2:
        raise ValueError(
            f"rank: found scores {scores.shape}, ids {ids.shape}, expected both [M, m]"
        )
    k = cut_off(k)
    out_scores = np.full((len(ids), k), -np.inf, scores.dtype)
    out_ids = np.full((len(ids), k), -1, ids.dtype)
    width = min(k, ids.shape[1])
    for rows in blocks(len(ids), ids.shape[1]):
        s = np.where(ids[rows] < 0, -np.inf, scores[rows])
        if np.isnan(s).any():
            row = rows.start + int(np.isnan(s).any(axis=1).argmax())
            raise ValueError(f"rank: NaN among the scores of row {row}; the model has diverged")
        i = np.where(ids[rows] < 0, np.iinfo(np.int64).max, ids[rows].astype(np.int64))
        order = np.lexsort((i, -s), axis=-1)[:, :width]
        out_scores[rows, :width] = np.take_along_axis(s, order, axis=1)
        out_ids[rows, :width] = np.take_along_axis(ids[rows], order, axis=1)
    return out_scores, np.maximum(out_ids, -1)


def remove_filtered(
    predictions: np.ndarray, filter_pairs: np.ndarray | None, num_labels: int
) -> np.ndarray:
    """Returns the predictions without the filter pairs: the others move up, -1 fills the end.

    Args:
      predictions: ``[M, K]`` label ids, -1 = none.
      filter_pairs: ``[F, 2]`` (row, label), or None.
      num_labels: L.

    Raises:
      ValueError: a pair outside ``[M, L]``, or a label id of L or more.
    """
    pairs = check_pairs(filter_pairs, (len(predictions), num_labels))
    keys = pair_keys(pairs, num_labels)
    out = np.empty(predictions.shape, predictions.dtype)
    for rows in blocks(*predictions.shape):
        check_ids(predictions[rows], rows.start, num_labels)
        out[rows] = _remove(predictions[rows], keys, rows.start, num_labels)
    return out


def blocks(num_rows: int, width: int) -> Iterator[slice]:
    """Yields slices that cover the rows, each with about as many entries of ``[rows, width]``."""
    step = max(_BLOCK_ENTRIES // max(width, 1), 1)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def hits_by_block(
    predictions: np.ndarray, truth: sp.csr_matrix, pairs: np.ndarray, depth: int
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Yields rows, top ids ``[m, depth]`` and hits ``[m, depth]`` of the filtered predictions."""
    num_labels = truth.shape[1]
    of_truth, of_pairs = truth_keys(truth), pair_keys(pairs, num_labels)
    for rows in blocks(truth.shape[0], predictions.shape[1]):
        ids = np.asarray(predictions[rows])
        check_ids(ids, rows.start, num_labels)
        check_unique(ids, rows.start)
        ids = _remove(ids, of_pairs, rows.start, num_labels)[:, :depth]
        top = np.full((len(ids), depth), -1, np.int64)
        top[:, : ids.shape[1]] = ids
        yield rows, top, among_pairs(of_truth, top, rows.start, num_labels)


def _remove(ids: np.ndarray, keys: np.ndarray, first_row: int, num_labels: int) -> np.ndarray:
    gone = ids < 0
    if len(keys):
        gone |= among_pairs(keys, ids, first_row, num_labels)
    if not gone.any():
        return ids.copy()
    out = np.where(gone, -1, ids)
    moved = np.flatnonzero((gone[:, :-1] & ~gone[:, 1:]).any(axis=1))  # a gap before a prediction
    order = np.argsort(gone[moved], axis=1, kind="stable")
    out[moved] = np.take_along_axis(out[moved], order, axis=1)
    return out


def positives(truth: sp.csr_matrix, pairs: np.ndarray | None) -> sp.csr_matrix:
    """Returns the true labels as a canonical CSR of ones, without the pairs."""
    truth = sp.csr_matrix((truth.data > 0, truth.indices, truth.indptr), truth.shape, copy=True)
    truth.sum_duplicates()
    truth.eliminate_zeros()
    if pairs is None or not len(pairs):
        return truth
    keep = ~np.isin(truth_keys(truth), pair_keys(pairs, truth.shape[1]))
    row = np.repeat(np.arange(truth.shape[0]), np.diff(truth.indptr))[keep]
    counts = np.bincount(row, minlength=truth.shape[0])
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(truth.indptr.dtype)
    return sp.csr_matrix((truth.data[keep], truth.indices[keep], indptr), truth.shape)


def truth_keys(truth: sp.csr_matrix) -> np.ndarray:
    """Returns ``row * L + label`` of each stored entry, ascending where the CSR is canonical."""
    row = np.repeat(np.arange(truth.shape[0], dtype=np.int64), np.diff(truth.indptr))
    return row * truth.shape[1] + truth.indices


def pair_keys(pairs: np.ndarray, num_labels: int) -> np.ndarray:
    """Returns ``row * L + label`` of each pair, ascending, each once."""
    return np.unique(pairs[:, 0] * num_labels + pairs[:, 1])


def among_pairs(keys: np.ndarray, ids: np.ndarray, first_row: int, num_labels: int) -> np.ndarray:
    """Returns whether (row, id) is among the sorted keys ``row * L + id``; -1 never is."""
    if not len(keys):
        return np.zeros(ids.shape, bool)
    row = np.arange(first_row, first_row + len(ids), dtype=np.int64)[:, None]
    wanted = row * num_labels + ids
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return (keys[place] == wanted) & (ids >= 0)


def check_inputs(predictions: np.ndarray, truth: sp.csr_matrix, ks: Sequence[int]) -> None:
    """Raises a ValueError unless predictions are ``[M, K]`` signed ids beside an ``[M, L]`` CSR."""
    if not sp.issparse(truth) or truth.format != "csr":
        raise ValueError(f"truth: found {type(truth).__name__}, expected a SciPy CSR matrix")
    shape = np.shape(predictions)
    if len(shape) != 2 or shape[0] != truth.shape[0] or not shape[0]:
        raise ValueError(
            f"predictions: found shape {shape}, expected [{truth.shape[0]}, K] as truth has "
            f"{truth.shape[0]} rows (at least 1)"
        )
    if not np.issubdtype(predictions.dtype, np.signedinteger):
        raise ValueError(f"predictions: found {predictions.dtype}, expected signed label ids")
    if not ks:
        raise ValueError("ks: found none, expected cut-offs of at least 1")
    for k in ks:
        cut_off(k)


def check_pairs(pairs: np.ndarray | None, shape: tuple[int, int]) -> np.ndarray:
    """Returns the pairs as int64 ``[F, 2]`` (F = 0 for None); a ValueError if one is outside."""
    pairs = np.empty((0, 2), np.int64) if pairs is None else np.asarray(pairs, np.int64)
    if pairs.size == 0:
        return pairs.reshape(0, 2)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"filter_pairs: found shape {pairs.shape}, expected [F, 2] (row, label)")
    bad = ((pairs < 0) | (pairs >= np.array(shape))).any(axis=1)
    if bad.any():
        where = int(bad.argmax())
        raise ValueError(
            f"filter_pairs[{where}]: found {pairs[where].tolist()}, expected a row below "
            f"{shape[0]} and a label below {shape[1]}"
        )
    return pairs


def check_ids(ids: np.ndarray, first_row: int, num_labels: int) -> None:
    """Raises a ValueError that names the place of an id of L or more."""
    if ids.size and ids.max() >= num_labels:
        row, column = np.argwhere(ids >= num_labels)[0].tolist()
        raise ValueError(
            f"predictions[{first_row + row}, {column}]: found label {ids[row, column]}, expected "
            f"below {num_labels}, the number of labels of truth"
        )


def check_unique(ids: np.ndarray, first_row: int) -> None:
    """Raises a ValueError that names a row in which a label occurs twice."""
    ordered = np.sort(ids, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
    if twice.any():
        row = int(twice.argmax())
        raise ValueError(
            f"predictions[{first_row + row}]: found a label twice ({ids[row].tolist()[:10]} ...), "
            "expected each at most once; merge the candidates before ranking"
        )


def warn_if_shallow(predictions: np.ndarray, pairs: np.ndarray, k: int, num_labels: int) -> None:
    """Warns where filter pairs may leave a row with fewer than k predictions."""
    longest = int(np.bincount(pairs[:, 0]).max(initial=0)) if len(pairs) else 0
    wanted = min(k + longest, num_labels)
    if predictions.shape[1] < wanted:
        warnings.warn(
            f"predictions are {predictions.shape[1]} deep, expected {wanted} (k = {k} and up to "
            f"{longest} filter pairs a row): ranks lost to filter pairs count as misses",
            stacklevel=3,
        )
