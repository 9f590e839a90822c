"""Exact ranking by the product of probabilities, against a dense plain computation."""

from __future__ import annotations

import numpy as np
import pytest

from xmc_jax.contracts import Weights
from xmc_jax.data.search import exact_search
from xmc_jax.systems.frugal import ranking
from xmc_jax.systems.frugal.ranking import FrugalRanker

LABELS, CLUSTERS, DIM, QUERIES = 60, 8, 5, 9


class LookUp:
    """Vectors that are given, not computed."""

    def __init__(self, labels: np.ndarray, meta: np.ndarray, extreme: np.ndarray) -> None:
        self.labels, self.meta, self.extreme = labels, meta, extreme

    def label_vectors(self, weights, store, graph):
        return self.labels

    def both(self, weights, store, rows):
        rows = slice(None) if rows is None else rows
        return self.meta[rows], self.extreme[rows]


@pytest.fixture
def setting():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    embedder = LookUp(draw(LABELS, DIM), draw(QUERIES, DIM), draw(QUERIES, DIM))
    clusters = rng.permutation(np.arange(LABELS) % CLUSTERS).astype(np.int32)
    params = {
        "meta": {"kernel": draw(DIM, CLUSTERS), "bias": draw(CLUSTERS)},
        "offset": np.float32(-2),
    }
    phase = {"label_clusters": clusters, "free_weights": True}
    return embedder, Weights(params, {"phase": phase}, {})


def probabilities(embedder: LookUp, weights: Weights, gamma: float = 1) -> np.ndarray:
    sigmoid = lambda x: 1 / (1 + np.exp(-x.astype(np.float64)))
    of_clusters = weights.params["meta"]
    meta = sigmoid(embedder.meta @ of_clusters["kernel"] + of_clusters["bias"])
    labels = sigmoid(embedder.extreme @ embedder.labels.T - 2)
    return labels * meta[:, weights.model_state["phase"]["label_clusters"]] ** gamma


@pytest.mark.parametrize("width", [7, 16, 8192])
@pytest.mark.parametrize(("k", "gamma"), [(1, 1), (5, 0.3), (100, 1), (100, 0)])
def test_equals_a_dense_product(setting, width, k, gamma, monkeypatch):
    monkeypatch.setattr(exact_search, "_LABELS", width)
    embedder, weights = setting
    ranker = FrugalRanker(embedder, weights, range(LABELS), None, cluster_weight=gamma)
    queries = ranker.query_vectors(None, None, "clf")
    assert ranker.heads == ("clf",) and queries.shape == (QUERIES, 2 * DIM)
    scores, ids = ranker.search(queries, "clf", k)
    expected = probabilities(embedder, weights, gamma)
    order = np.argsort(-expected, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(scores, np.take_along_axis(expected, order, axis=1), rtol=1e-5)
    np.testing.assert_array_equal(ranker.label_vectors("clf"), embedder.labels)


def test_a_bonus_is_a_factor_of_the_probability(setting):
    embedder, weights = setting
    bonus = np.random.default_rng(1).normal(size=LABELS).astype(np.float32)
    ranker = FrugalRanker(embedder, weights, range(LABELS), None, bonus=bonus)
    scores, ids = ranker.search(ranker.query_vectors(None, None, "clf"), "clf", LABELS)
    expected = probabilities(embedder, weights) * np.exp(bonus)
    order = np.argsort(-expected, axis=1, kind="stable")
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(scores, np.take_along_axis(expected, order, axis=1), rtol=1e-5)


@pytest.mark.parametrize("block", [1, 700, ranking.SCORED_NUMBERS])
@pytest.mark.parametrize("gamma", [0, 0.3, 1])
@pytest.mark.parametrize("rare", [False, True])
def test_scores_of_chosen_labels(setting, rare, gamma, block, monkeypatch):
    """Of any ids: the product of probabilities; of those that a search finds: its scores."""
    monkeypatch.setattr(ranking, "SCORED_NUMBERS", block)
    embedder, weights = setting
    rng = np.random.default_rng(2)
    bonus = rng.normal(size=LABELS).astype(np.float32) if rare else None
    ranker = FrugalRanker(embedder, weights, range(LABELS), None, bonus=bonus, cluster_weight=gamma)
    queries = ranker.query_vectors(None, None, "clf")
    found, ids = ranker.search(queries, "clf", 7)
    np.testing.assert_allclose(ranker.score(queries, "clf", ids), found, rtol=1e-6)
    dense = probabilities(embedder, weights, gamma) * (np.exp(bonus) if rare else 1)
    ids = rng.integers(0, LABELS, (QUERIES, 12)).astype(np.int32)
    ids[::2, 3], ids[1, 4] = -1, LABELS - 1
    scores = ranker.score(queries, "clf", ids)
    expected = np.where(ids < 0, -np.inf, np.take_along_axis(dense, ids, axis=1))
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    assert scores.dtype == np.float32
    assert ranker.score(queries, "clf", ids[:, :0]).shape == (QUERIES, 0)
    assert ranker.score(queries[:0], "clf", ids[:0]).shape == (0, 12)


def test_equal_scores_are_in_the_order_of_ids(setting):
    embedder, weights = setting
    embedder.labels[:] = embedder.labels[0]
    weights.params["meta"]["kernel"][:] = 0
    weights.params["meta"]["bias"][:] = 0
    ranker = FrugalRanker(embedder, weights, range(LABELS), None)
    _, ids = ranker.search(ranker.query_vectors(None, None, "clf"), "clf", LABELS)
    np.testing.assert_array_equal(ids, np.broadcast_to(np.arange(LABELS), ids.shape))


def test_probabilities_near_one_are_told_apart(setting):
    """In 32 bits sigmoid(20) = sigmoid(30) = 1."""
    embedder, weights = setting
    embedder.extreme[:] = embedder.labels[:] = 0
    embedder.extreme[:, 0], embedder.labels[:, 0] = 1, np.linspace(22, 32, LABELS)
    weights.params["meta"]["kernel"][:] = 0
    weights.params["meta"]["bias"] = np.full(CLUSTERS, 30.0)
    ranker = FrugalRanker(embedder, weights, range(LABELS), None)
    _, ids = ranker.search(ranker.query_vectors(None, None, "clf"), "clf", 3)
    assert (ids == [LABELS - 1, LABELS - 2, LABELS - 3]).all()


def test_refusals(setting):
    with pytest.raises(ValueError, match=r"index 'hnsw': a frugal classifier is ranked exactly"):
        FrugalRanker(*setting, range(LABELS), None, kind="hnsw")
    with pytest.raises(ValueError, match=r"61 labels for a classifier of 60"):
        FrugalRanker(*setting, range(LABELS + 1), None)
