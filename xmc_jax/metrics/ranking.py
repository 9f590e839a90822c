"""Ranking metrics of extreme classification: P, nDCG, R, coverage, PSP, PSnDCG.

``M`` test rows, ``L`` labels, ``T_i`` the true labels of row ``i``, ``w_l`` inverse propensities.
NumPy and SciPy only; rows are worked off in blocks, so temporary memory does not grow with ``M``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import scipy.sparse as sp

from xmc_jax.metrics.propensity import label_frequency
from xmc_jax.metrics.ranked_lists import (
    among_pairs,
    blocks,
    check_ids,
    check_inputs,
    check_pairs,
    check_unique,
    cut_off,
    hits_by_block,
    pair_keys,
    positives,
    rank,
    remove_filtered,
    truth_keys,
    warn_if_shallow,
)

__all__ = [
    "evaluate",
    "evaluate_bins",
    "frequency_bins",
    "precision_recall_thresholds",
    "rank",
    "remove_filtered",
]


def evaluate(
    predictions: np.ndarray,
    truth: sp.csr_matrix,
    *,
    inverse_propensity: np.ndarray | None = None,
    filter_pairs: np.ndarray | None = None,
    filter_truth: bool = True,
    ks: Sequence[int] = (1, 3, 5),
) -> dict[str, float]:
    """Returns P, nDCG, R and C (coverage) at each k, and PSP and PSnDCG if weights are given.

    With ``h_ij`` = 1 if the prediction at rank ``j`` of row ``i`` is in ``T_i`` and
    ``D_i(k) = sum_{j <= min(k, |T_i|)} 1 / log2(j + 1)``::

      P@k      = mean_i sum_{j <= k} h_ij / k
      nDCG@k   = mean_i [sum_{j <= k} h_ij / log2(j + 1)] / D_i(k)
      R@k      = mean_i sum_{j <= k} h_ij / |T_i|
      C@k      = |labels hit in some row's top k| / |labels with a test positive|
      PSP@k    = mean_i [sum_{j <= k} w h_ij / k] / the same of the best ranking (T_i by w)
      PSnDCG@k = the same ratio of means for [sum_{j <= k} w h_ij / log2(j + 1)] / D_i(k)

    PSP and PSnDCG are ratios of data-set means (Jain et al., KDD 2016). A row without true labels
    counts and adds 0; a row with fewer than k predictions is still divided by k.

    Args:
      predictions: ``[M, K]`` label ids, best first; -1 = none (those after it move up).
      truth: ``[M, L]`` CSR; an entry greater than 0 is a true label.
      inverse_propensity: ``[L]`` weights from the training matrix (``xmc_jax.metrics.propensity``).
      filter_pairs: ``[F, 2]`` (row, label) pairs that leave the predictions before the top k is
        cut. K should be at least max(ks) + the longest row of pairs, else a warning is given.
      filter_truth: the pairs leave the truth too; False is what most published code does.
      ks: cut-offs.

    Returns:
      ``{"P@1": ..., ...}`` in percent.

    Raises:
      ValueError: shapes that do not fit, a label id of L or more, a label twice in a row.

    Example:
      >>> truth = sp.csr_matrix(np.array([[1, 0, 0, 1], [0, 1, 0, 0]]))
      >>> evaluate(np.array([[3, 1], [2, 1]]), truth, ks=(1, 2))["P@2"]
      50.0
    """
    if not isinstance(ks, Iterable) or isinstance(ks, str):
        raise ValueError(f"ks: found {ks!r}; expected cut-offs, such as (1, 3, 5).")
    ks = sorted({cut_off(k) for k in ks})
    check_inputs(predictions, truth, ks)
    pairs = check_pairs(filter_pairs, truth.shape)
    warn_if_shallow(predictions, pairs, max(ks), truth.shape[1])
    truth = positives(truth, pairs if filter_truth else None)
    num_rows, num_labels = truth.shape
    weights = None if inverse_propensity is None else np.asarray(inverse_propensity, np.float64)
    if weights is not None and weights.shape != (num_labels,):
        raise ValueError(f"inverse_propensity: found {weights.shape}, expected {(num_labels,)}")
    depth, at = max(ks), np.array(ks)
    discount = 1.0 / np.log2(np.arange(2, depth + 2))  # [depth]
    divisor = np.concatenate([discount[:1], np.cumsum(discount)])  # D(0) is 1: never divide by 0
    sums = dict.fromkeys(("P", "nDCG", "R", "PSP", "PSnDCG"), 0.0)
    best = dict.fromkeys(("PSP", "PSnDCG"), 0.0)
    hit_labels = np.zeros((len(ks), num_labels), bool)

    for rows, top, hits in hits_by_block(predictions, truth, pairs, depth):
        counts = np.diff(truth.indptr[rows.start : rows.stop + 1])[:, None]  # [m, 1]
        d = divisor[np.minimum(counts, at)]  # [m, ks]
        gain, dcg = _cumulate(hits, discount, at)  # [m, ks] each
        sums["P"] += (gain / at).sum(axis=0)
        sums["nDCG"] += (dcg / d).sum(axis=0)
        sums["R"] += (gain / np.maximum(counts, 1)).sum(axis=0)
        for row, k in zip(hit_labels, ks):
            row[top[:, :k][hits[:, :k]]] = True
        if weights is not None:
            gains = np.where(hits, weights[top], 0.0)  # [m, depth]
            ideal = _ideal_gains(truth, rows, weights, depth)  # [m, depth]
            for total, some_gains in ((sums, gains), (best, ideal)):
                gain, dcg = _cumulate(some_gains, discount, at)
                total["PSP"] += (gain / at).sum(axis=0)
                total["PSnDCG"] += (dcg / d).sum(axis=0)

    num_true_labels = max(int((label_frequency(truth) > 0).sum()), 1)
    values = {name: sums[name] / num_rows for name in ("P", "nDCG")}
    if weights is not None:
        values |= {name: sums[name] / np.where(best[name] > 0, best[name], 1.0) for name in best}
    values |= {"R": sums["R"] / num_rows, "C": hit_labels.sum(axis=1) / num_true_labels}
    return {f"{name}@{k}": 100.0 * float(v) for name in values for k, v in zip(ks, values[name])}


def _cumulate(
    gains: np.ndarray, discount: np.ndarray, at: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sums of the gains and of the discounted gains down to each of the cut-offs."""
    return gains.cumsum(axis=1)[:, at - 1], (gains * discount).cumsum(axis=1)[:, at - 1]


def _ideal_gains(truth: sp.csr_matrix, rows: slice, weights: np.ndarray, depth: int) -> np.ndarray:
    """Returns ``[m, depth]``: the weights of each row's true labels, largest first, then zeros."""
    indptr = truth.indptr[rows.start : rows.stop + 1]
    counts = np.diff(indptr)
    w = weights[truth.indices[indptr[0] : indptr[-1]]]
    row = np.repeat(np.arange(len(counts)), counts)
    w = w[np.lexsort((-w, row))]
    place = np.arange(len(w)) - np.repeat(indptr[:-1] - indptr[0], counts)
    ideal = np.zeros((len(counts), depth))
    keep = place < depth
    ideal[row[keep], place[keep]] = w[keep]
    return ideal


def frequency_bins(train_labels: sp.csr_matrix, num_bins: int = 5) -> np.ndarray:
    """Returns the bin of each label, 1 = head, so that bins hold about equal sums of positives.

    Labels are sorted by training frequency, the most frequent first (ties by id), and cut where the
    running sum is nearest to a ``num_bins``-th of all positives; no bin is empty while L allows.

    Args:
      train_labels: ``[N, L]`` CSR of the training rows.
      num_bins: how many.

    Returns:
      ``[L]`` int64 in 1 .. num_bins.
    """
    if num_bins < 1:
        raise ValueError(f"num_bins: found {num_bins}, expected at least 1")
    frequency = label_frequency(train_labels)
    num_labels = len(frequency)
    order = np.argsort(-frequency, kind="stable")
    running = np.concatenate([[0], np.cumsum(frequency[order])])  # [L + 1]
    inner = np.arange(1, num_bins)
    wanted = running[-1] * inner / num_bins
    above = np.searchsorted(running, wanted)
    below = np.maximum(above - 1, 0)
    cuts = np.where(wanted - running[below] <= running[above] - wanted, below, above)
    # One very frequent label may deserve several bins; it gets one, and the others move down.
    cuts = np.maximum.accumulate(np.maximum(cuts - inner, 0)) + inner
    cuts = np.minimum(cuts, np.maximum(num_labels - num_bins + inner, inner))
    bins = np.empty(num_labels, np.int64)
    bins[order] = np.searchsorted(cuts, np.arange(num_labels), side="right") + 1
    return bins


def evaluate_bins(
    predictions: np.ndarray,
    truth: sp.csr_matrix,
    bins: np.ndarray,
    *,
    frequency: np.ndarray,
    k: int = 5,
    filter_pairs: np.ndarray | None = None,
    filter_truth: bool = True,
) -> list[dict[str, float]]:
    """Returns what each bin of labels adds to P@k: ``100 * hits of the bin's labels / (k M)``.

    Args:
      predictions: as in ``evaluate``, like truth, filter_pairs and filter_truth.
      truth: ``[M, L]`` CSR.
      bins: ``[L]`` from ``frequency_bins``.
      frequency: ``[L]`` training frequencies (``xmc_jax.metrics.propensity.label_frequency``).
      k: cut-off.
      filter_pairs: ``[F, 2]``.
      filter_truth: see ``evaluate``.

    Returns:
      One ``{"bin", "labels", "mean_frequency", "value"}`` a bin; the values add up to P@k.

    Raises:
      ValueError: as ``evaluate``.
    """
    check_inputs(predictions, truth, [k])
    num_rows, num_labels = truth.shape
    if len(bins) != num_labels or len(frequency) != num_labels:
        raise ValueError(
            f"bins: found {len(bins)} and {len(frequency)} frequencies, expected {num_labels}"
        )
    pairs = check_pairs(filter_pairs, truth.shape)
    warn_if_shallow(predictions, pairs, k, num_labels)
    truth = positives(truth, pairs if filter_truth else None)
    num_bins = int(bins.max(initial=0))
    hits_of = np.zeros(num_bins + 1, np.int64)
    for _, top, hits in hits_by_block(predictions, truth, pairs, k):
        hits_of += np.bincount(bins[top[hits]], minlength=num_bins + 1)
    labels = np.bincount(bins, minlength=num_bins + 1)
    total = np.bincount(bins, weights=frequency, minlength=num_bins + 1)
    return [
        {
            "bin": b,
            "labels": int(labels[b]),
            "mean_frequency": float(total[b] / max(labels[b], 1)),
            "value": 100.0 * float(hits_of[b]) / (k * num_rows),
        }
        for b in range(1, num_bins + 1)
    ]


def precision_recall_thresholds(
    scores: np.ndarray,
    predictions: np.ndarray,
    truth: sp.csr_matrix,
    *,
    filter_pairs: np.ndarray | None = None,
    filter_truth: bool = True,
    thresholds: Sequence[float] | None = None,
) -> list[dict[str, float]]:
    """Returns precision and recall when only predictions with a score of at least t are given.

    ``precision = hits / predictions kept`` and ``recall = hits / true labels``, both over all rows
    together, in percent; recall can only count what is among the K predictions of a row.

    Args:
      scores: ``[M, K]``, beside the predictions.
      predictions: ``[M, K]`` label ids, -1 = none.
      truth: ``[M, L]`` CSR.
      filter_pairs: ``[F, 2]`` pairs that are no predictions.
      filter_truth: see ``evaluate``.
      thresholds: by default eleven, evenly spaced from the lowest score to the highest.

    Returns:
      One ``{"threshold", "precision", "recall", "predictions_per_row"}`` a threshold; where nothing
      is kept, precision is 0.

    Raises:
      ValueError: shapes that differ, a label id of L or more.
    """
    check_inputs(predictions, truth, [1])
    if scores.shape != predictions.shape:
        raise ValueError(f"scores: found {scores.shape}, expected {predictions.shape}")
    pairs = check_pairs(filter_pairs, truth.shape)
    truth = positives(truth, pairs if filter_truth else None)
    num_rows, num_labels = truth.shape
    of_truth, of_pairs = truth_keys(truth), pair_keys(pairs, num_labels)
    kept_parts, correct_parts = [], []
    for rows in blocks(num_rows, predictions.shape[1]):
        ids = predictions[rows]
        check_ids(ids, rows.start, num_labels)
        check_unique(ids, rows.start)
        real = (ids >= 0) & ~among_pairs(of_pairs, ids, rows.start, num_labels)
        kept_parts.append(scores[rows][real])
        correct_parts.append(
            scores[rows][real & among_pairs(of_truth, ids, rows.start, num_labels)]
        )
    kept, correct = (np.sort(np.concatenate(parts)) for parts in (kept_parts, correct_parts))
    even = np.linspace(kept[0], kept[-1], 11) if len(kept) else kept
    num_true = max(truth.nnz, 1)
    points = []
    for t in even if thresholds is None else thresholds:
        given = len(kept) - int(np.searchsorted(kept, t))
        hits = len(correct) - int(np.searchsorted(correct, t))
        points.append(
            {
                "threshold": float(t),
                "precision": 100.0 * hits / max(given, 1),
                "recall": 100.0 * hits / num_true,
                "predictions_per_row": given / num_rows,
            }
        )
    return points
