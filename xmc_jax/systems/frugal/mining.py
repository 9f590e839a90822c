"""A refresh of the frugal family: hard negatives from the best clusters of every training point.

    refresh/<epoch>/label_clusters.npy     [L] int32, those of the phase
    refresh/<epoch>/hard_negatives.npy     [N, eta * refresh_epochs] int32, -1 = none
    refresh/<epoch>/synonyms.npy           [V, k] int32, where texts are augmented by them

The meta-classifier is trained together with the other one, so its best clusters, and with them the
negatives, harden from refresh to refresh.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from xmc_jax.contracts import Points, Weights
from xmc_jax.data.batching.pools import row_entries
from xmc_jax.data.search.exact_search import host_product
from xmc_jax.systems.frugal import text_mixing
from xmc_jax.systems.frugal.embedder import FrugalEmbedder
from xmc_jax.systems.frugal.options import FrugalOptions
from xmc_jax.training.refresh import lap, write_blocks

BLOCK_ROWS = 1 << 15  # training rows embedded at once
BLOCK_NUMBERS = 1 << 23  # scores of clusters, or drawn numbers, held at once


def write(
    folder: Path,
    epoch: int,
    options: FrugalOptions,
    data: Points,
    embedder: FrugalEmbedder,
    weights: Weights,
) -> dict[str, Any]:
    """Write a refresh into a folder; returns what took how long."""
    started = time.perf_counter()
    clusters = np.asarray(weights.model_state["phase"]["label_clusters"])
    np.save(folder / "label_clusters.npy", clusters)
    # Batches are random; the files are those of every refresh.
    np.save(folder / "order.npy", np.arange(len(data.rows)))
    np.save(folder / "offsets.npy", np.array([0, len(data.rows)]))
    shape = (data.labels.shape[0], options.eta * options.refresh_epochs)
    blocks = _shortlists(epoch, options, data, embedder, weights, clusters, shape)
    write_blocks(folder / "hard_negatives.npy", blocks, shape)
    # A table drawn at random knows no synonyms before it has been trained.
    known = epoch or options.encoder.embeddings
    if text_mixing.variant(options.gandalf) == "synonyms" and known:
        occurs = np.asarray(weights.model_state["moving"]["idf"]) > 0
        table = np.asarray(weights.params["tokens"]["embedding"])
        np.save(folder / "synonyms.npy", text_mixing.synonyms(table, occurs))
    return {"shortlist": lap(started)}


def _shortlists(
    epoch: int,
    options: FrugalOptions,
    data: Points,
    embedder: FrugalEmbedder,
    weights: Weights,
    clusters: np.ndarray,
    shape: tuple[int, int],
) -> Iterator[np.ndarray]:
    rows = data.rows
    members = cluster_members(clusters, embedder.model.num_clusters)
    kernel, bias = (np.asarray(weights.params["meta"][name]) for name in ("kernel", "bias"))
    vectors, product = np.ascontiguousarray(kernel.T), host_product()
    top = min(options.clusters.top, len(bias))
    step = max(1, BLOCK_NUMBERS // max(len(bias), top * members.shape[1]))
    for first in range(0, shape[0], BLOCK_ROWS):
        size = min(BLOCK_ROWS, shape[0] - first)
        begin, end = np.searchsorted(rows, [first, first + size])
        block = np.full((size, shape[1]), -1, np.int32)
        meta, _ = embedder.both(weights, data.train_tokens, rows[begin:end])
        for start in range(0, end - begin, step):
            part = rows[begin + start : min(begin + start + step, end)]
            scores = product(meta[start : start + step], vectors) + bias
            place, label = row_entries(data.labels, part)
            best = best_clusters(scores, place, clusters[label], top)
            rng = np.random.default_rng([options.seed, epoch, int(part[0])])
            block[part - first] = draw_labels(rng, members[best], shape[1])
        yield block


def cluster_members(clusters: np.ndarray, num_clusters: int) -> np.ndarray:
    """``[C, size]`` int32 labels of each cluster, ascending, -1 = none."""
    sizes = np.bincount(clusters, minlength=num_clusters)
    order = np.argsort(clusters, kind="stable")
    members = np.full((num_clusters, int(sizes.max(initial=0))), -1, np.int32)
    members[np.arange(members.shape[1]) < sizes[:, None]] = order
    return members


def best_clusters(scores: np.ndarray, place: np.ndarray, own: np.ndarray, top: int) -> np.ndarray:
    """The ``top`` clusters of each query: of its own at most half, then others, all by score.

    The papers' shortlist is the K best clusters, gold ones included. Where a query has dozens of
    these, they would leave no room for those that the meta-classifier mistakes for right ones.

    Args:
      scores: ``[n, C]``; changed.
      place: ``[E]`` query of each of its own clusters.
      own: ``[E]`` that cluster; may repeat.
      top: K, at most C.

    Returns:
      ``[n, K]``, in no particular order.
    """
    place, own = np.divmod(np.unique(place * scores.shape[1] + own), scores.shape[1])
    order = np.lexsort((-scores[place, own], place))
    place, own = place[order], own[order]
    rank = np.arange(place.size) - np.searchsorted(place, place)
    scores[place, own] = np.where(rank < -(-top // 2), np.inf, -np.inf)
    return np.argpartition(-scores, top - 1, axis=1)[:, :top]


def draw_labels(rng: np.random.Generator, members: np.ndarray, width: int) -> np.ndarray:
    """Labels drawn evenly, without replacement, from the clusters of each query.

    Args:
      rng: the source of randomness.
      members: ``[n, K, size]`` labels, -1 = none.
      width: W, labels a query.

    Returns:
      ``[n, W]``, -1 where the clusters hold fewer.
    """
    candidates = members.reshape(len(members), -1)
    if candidates.shape[1] <= width:
        padded = np.full((len(members), width), -1, np.int32)
        padded[:, : candidates.shape[1]] = candidates
        return padded
    draws = np.where(candidates >= 0, rng.random(candidates.shape, np.float32), 2)
    chosen = np.argpartition(draws, width - 1, axis=1)[:, :width]
    return np.take_along_axis(candidates, chosen, axis=1)
