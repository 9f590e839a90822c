"""What Gandalf is compared with (thesis, table 1.6): MixUp, Label-MixUp, synonym replacement.

They change the batches, not the set of points. The thesis prints neither rates nor where texts are
mixed; both are ours. For the frugal family, whose loss takes soft targets.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xmc_jax.data.search.exact_search import exact_search
from xmc_jax.training.options import GandalfOptions

MIXED = ("mixup", "label_mixup")
VARIANTS = (*MIXED, "synonyms")  # of config.gandalf.variant, beside Gandalf's own
ALPHA = 0.2  # a query's own share is Beta(ALPHA, ALPHA) [MixUp's authors]
REPLACED = 0.1  # share of tokens that are replaced [ours]
NEIGHBOURS = 5  # a token is replaced by one of so many [ours]


def variant(options: GandalfOptions) -> str | None:
    """Which of them a configuration asks for."""
    return options.variant if options.enabled and options.variant in VARIANTS else None


class Mix(NamedTuple):
    """How the features of a batch's texts are mixed, and their targets, mixed already.

    Attributes:
      partners: ``[Q]`` int32 places among the texts of the batch.
      shares: ``[Q]`` float32 lambda: ``x_i = lambda_i x_i + (1 - lambda_i) x_partner``.
      targets: ``[Q, P]`` float32.
      where: ``[Q, P]`` bool.
      cluster_targets: ``[Q, C]`` float32.
    """

    partners: np.ndarray
    shares: np.ndarray
    targets: np.ndarray
    where: np.ndarray
    cluster_targets: np.ndarray


def mixup(
    rng: np.random.Generator,
    queries: np.ndarray,
    targets: np.ndarray,
    where: np.ndarray,
    cluster_targets: np.ndarray,
) -> Mix:
    """MixUp: each query with another one of the batch, drawn as a permutation.

    ``y_i = lambda_i y_i + (1 - lambda_i) y_partner``, over the labels that are masked for neither.

    Args:
      rng: the only source of randomness.
      queries: ``[Q]`` rows, -1 = no query, which is its own partner.
      targets: ``[Q, P]``.
      where: ``[Q, P]``, False = masked.
      cluster_targets: ``[Q, C]``.
    """
    slots = np.flatnonzero(queries >= 0)
    partners = np.arange(len(queries), dtype=np.int32)
    partners[slots] = rng.permutation(slots)
    shares = _shares(rng, len(queries))
    return Mix(
        partners,
        shares,
        _mixed(shares, targets, targets[partners]),
        where & where[partners],
        _mixed(shares, cluster_targets, cluster_targets[partners]),
    )


def label_mixup(
    rng: np.random.Generator,
    targets: np.ndarray,
    where: np.ndarray,
    cluster_targets: np.ndarray,
    column_clusters: np.ndarray,
) -> tuple[Mix, np.ndarray]:
    """Label-MixUp: each query with the text of one of its labels, whose only target is that label.

    ``y_i = lambda_i y_i + (1 - lambda_i) e_l``, l drawn evenly among i's positives in the pool:
    our reading of "combines the feature of a label feature and input datapoint". The texts of the
    labels stand after the Q queries in the batch.

    Args:
      rng: the only source of randomness.
      targets: ``[Q, P]``.
      where: ``[Q, P]``, False = masked.
      cluster_targets: ``[Q, C]``.
      column_clusters: ``[P]`` cluster of each label of the pool.

    Returns:
      the mix, and ``[Q]`` the column of each query's label, -1 where it has none.
    """
    number = len(targets)
    draws = np.where(targets, rng.random(targets.shape), -1)
    columns = draws.argmax(axis=1)
    columns[~targets.any(axis=1)] = -1
    slots = np.flatnonzero(columns >= 0)
    shares = _shares(rng, number)
    own, clusters = np.zeros(targets.shape, np.float32), np.zeros(cluster_targets.shape, np.float32)
    own[slots, columns[slots]] = 1
    clusters[slots, column_clusters[columns[slots]]] = 1
    mix = Mix(
        np.arange(number, 2 * number, dtype=np.int32),
        shares,
        _mixed(shares, targets, own),
        where,
        _mixed(shares, cluster_targets, clusters),
    )
    return mix, columns


def synonyms(table: np.ndarray, occurs: np.ndarray) -> np.ndarray:
    """The nearest tokens of every token by the cosine of their vectors.

    The thesis takes similarity from BERT; this is the encoder's own token table.

    Args:
      table: ``[V, D]`` float32.
      occurs: ``[V]`` bool, tokens that occur; others are nobody's neighbours and have none.

    Returns:
      ``[V, NEIGHBOURS]`` int32; the token itself where it has fewer.
    """
    known = np.flatnonzero(occurs)
    vectors = table[known]
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    _, nearest = exact_search(vectors, vectors, NEIGHBOURS + 1)
    itself = nearest == np.arange(len(known))[:, None]
    last = ~itself.any(axis=1)  # many equal vectors
    itself[last, -1] = True
    others = nearest[~itself].reshape(len(known), NEIGHBOURS)
    near = np.repeat(np.arange(len(table), dtype=np.int32)[:, None], NEIGHBOURS, axis=1)
    near[known] = np.where(others >= 0, known[others], near[known])
    return near


def replace(rng: np.random.Generator, ids: np.ndarray, near: np.ndarray) -> np.ndarray:
    """Tokens of texts, a share ``REPLACED`` of them replaced by one of their neighbours.

    Args:
      rng: the only source of randomness.
      ids: ``[n]`` tokens.
      near: of `synonyms`.
    """
    chosen = rng.integers(near.shape[1], size=len(ids))
    return np.where(rng.random(len(ids)) < REPLACED, near[ids, chosen], ids).astype(ids.dtype)


def _shares(rng: np.random.Generator, number: int) -> np.ndarray:
    return rng.beta(ALPHA, ALPHA, number).astype(np.float32)


def _mixed(shares: np.ndarray, own: np.ndarray, other: np.ndarray) -> np.ndarray:
    share = shares[:, None]
    return share * own.astype(np.float32) + (1 - share) * other.astype(np.float32)
