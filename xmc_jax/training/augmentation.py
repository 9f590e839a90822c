"""Gandalf: label texts join the training points, with soft targets (thesis, chapter 1)."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
from absl import logging
from scipy.sparse import csr_matrix, vstack

from xmc_jax import metrics
from xmc_jax.data import splits
from xmc_jax.data.graph import gandalf
from xmc_jax.training.options import TrainingOptions
from xmc_jax.training.training_data import TrainingData, only_rows

POINTS = ("all", "labels", "sample")
ORDERS = ("random", "tail")


def augment(options: TrainingOptions, data: TrainingData) -> TrainingData:
    """Training data whose points are ``D union Z``, as ``options.gandalf`` says.

    Row ``N + j`` is label j's text, taken from the label store. Targets come from training labels
    alone: held-out rows are empty there. Filter pairs of a text are the labels that share it and
    are no targets of it. What evaluation reads stays as it was.

    Args:
      options: of the run.
      data: of the points alone.

    Raises:
      ValueError: no point is left.
    """
    settings = options.gandalf
    if not settings.enabled:
        return data
    started = time.perf_counter()
    rng = np.random.default_rng([options.seed, 1])
    train_codes, label_codes, (empty,) = splits.text_codes(
        data.dataset.train.texts, data.dataset.label_texts, [""]
    )
    taken = np.array([empty])
    if settings.skip_labels_that_are_points:
        taken = np.append(train_codes[data.rows], taken)
    joining = np.flatnonzero(~np.isin(label_codes, taken))
    joining = _share(rng, joining, data.labels, settings.share, settings.order)
    points, texts = _points(rng, data.rows, joining, settings.points)
    targets = gandalf.targets(
        data.labels, settings.variant, delta=settings.delta, seed=options.seed
    )
    targets = only_rows(targets, texts)
    labels = vstack([only_rows(data.labels, points), targets], "csr", np.float32)
    if not labels.nnz:
        raise ValueError(
            "config.gandalf leaves no training point: of the label texts that may join, "
            f"{len(joining):,} are left. Set gandalf.points=all, or raise gandalf.share."
        )
    logging.info(
        "gandalf: %d label texts join %d points, with %.1f targets each (%.1f s)",
        len(texts),
        len(points),
        targets.nnz / max(1, len(texts)),
        time.perf_counter() - started,
    )
    return dataclasses.replace(
        data,
        train_tokens=data.joined_tokens(),
        labels=labels,
        filters=_filters(data, label_codes, targets) if options.mask_filter_pairs else None,
        first_text_row=data.labels.shape[0],
    )


def _share(
    rng: np.random.Generator, joining: np.ndarray, labels: csr_matrix, share: float, order: str
) -> np.ndarray:
    """A share of the labels (thesis, section 1.5 and figure 1.4).

    ``tail`` is our reading: bins of equal volume join one after the other, the rarest labels first;
    within a bin the order is random.
    """
    wanted = round(share * len(joining))
    key = rng.random(len(joining))
    if order == "tail":
        key -= metrics.frequency_bins(labels)[joining]
    return np.sort(joining[np.argsort(key)[:wanted]])


def _points(
    rng: np.random.Generator, rows: np.ndarray, joining: np.ndarray, points: str
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of D and labels of Z that take part (thesis, table 1.2: G, Z, or U(G, |D|))."""
    if points == "labels":
        return rows[:0], joining
    if points == "sample":
        drawn = np.sort(rng.choice(len(rows) + len(joining), len(rows), replace=False))
        border = np.searchsorted(drawn, len(rows))
        return rows[drawn[:border]], joining[drawn[border:] - len(rows)]
    return rows, joining


def _filters(data: TrainingData, label_codes: np.ndarray, targets: csr_matrix) -> csr_matrix | None:
    """Filter pairs of all points, ``[N + L, L]`` bool; a text's are labels that share it."""
    num_points, num_labels = data.labels.shape
    bearers = csr_matrix(
        (np.ones(num_labels, bool), label_codes, np.arange(num_labels + 1)),
        (num_labels, int(label_codes.max(initial=0)) + 1),
    )
    shared = only_rows(bearers, np.flatnonzero(np.diff(targets.indptr))) @ bearers.T
    shared = (shared > targets.astype(bool)).tocsr()
    if data.filters is None and not shared.nnz:
        return None
    of_points = data.filters
    if of_points is None:
        of_points = csr_matrix((num_points, num_labels), dtype=bool)
    return vstack([of_points, shared], "csr")
