"""From a ranker and a split to metrics: by head, filtered and unfiltered, and by frequency."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from xmc_jax import metrics
from xmc_jax.contracts import Ranker
from xmc_jax.training.training_data import EvaluationSplit


def predict_split(
    ranker: Ranker, split: EvaluationSplit, head: str, *, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Top ``k`` labels of a split's rows: ids ``[n, k]`` (-1 = none) and scores."""
    queries = ranker.query_vectors(split.tokens, split.rows, head)
    scores, ids = ranker.search(queries, head, k)
    return ids, scores


def depth(split: EvaluationSplit, ks: tuple[int, ...]) -> int:
    """How many predictions a row needs so that filtering leaves max(ks)."""
    pairs = split.filter_pairs
    longest = int(np.bincount(pairs[:, 0]).max()) if len(pairs) else 0
    return max(ks) + longest


def measure(
    ids: np.ndarray,
    split: EvaluationSplit,
    inverse_propensity: np.ndarray,
    ks: tuple[int, ...],
) -> dict[str, dict[str, float]]:
    """Metrics in percent, with filter pairs left out and without that."""
    run = functools.partial(
        metrics.evaluate, ids, split.truth, inverse_propensity=inverse_propensity, ks=ks
    )
    return {"filtered": run(filter_pairs=split.filter_pairs), "unfiltered": run()}


def evaluate(
    ranker: Ranker,
    split: EvaluationSplit,
    train_labels: csr_matrix,
    inverse_propensity: np.ndarray,
    *,
    heads: tuple[str, ...] | None = None,
    ks: tuple[int, ...] = (1, 3, 5),
    keep: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Evaluate a model on a split.

    Args:
      ranker: of the model.
      split: what is evaluated.
      train_labels: original training matrix, for the bins.
      inverse_propensity: ``[L]``.
      heads: which; default all there are.
      ks: cut-offs.
      keep: if given, gets ``{head: (ids, scores)}``.

    Returns:
      ``{"heads": {head: {"filtered": {...}, "unfiltered": {...}}}, "bins": {head: [...]}}``.
    """
    bins = metrics.frequency_bins(train_labels)
    frequency = np.asarray(train_labels.sum(axis=0)).ravel()
    result: dict[str, Any] = {"heads": {}, "bins": {}}
    for head in heads or ranker.heads:
        deep = max(depth(split, (*ks, 5)), 100 if keep is not None else 0)  # bins look at 5
        ids, scores = predict_split(ranker, split, head, k=deep)
        result["heads"][head] = measure(ids, split, inverse_propensity, ks)
        result["bins"][head] = metrics.evaluate_bins(
            ids, split.truth, bins, frequency=frequency, filter_pairs=split.filter_pairs
        )
        if keep is not None:
            keep[head] = (ids, scores)
    return result
