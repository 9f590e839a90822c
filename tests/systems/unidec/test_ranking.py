"""The ranker of UniDEC and DePSL: exact scores of chosen labels are those of a search."""

from __future__ import annotations

import numpy as np
import pytest

from xmc_jax.systems.unidec import ranking
from xmc_jax.systems.unidec.ranking import DualRanker, unit_rows

LABELS, QUERIES, DIM = 70, 9, 6


class LookUp:
    """Vectors that are given, not computed: a tower a side."""

    def __init__(self, rng: np.random.Generator) -> None:
        draw = lambda rows: rng.normal(size=(rows, DIM)).astype(np.float32)
        self.vectors = {"query": unit_rows(draw(QUERIES)), "label": unit_rows(draw(LABELS))}
        self.features = draw(QUERIES)

    def de(self, params, store, rows=None, *, side="query"):
        return self.vectors[side][slice(None) if rows is None else rows]

    def both(self, params, store, rows=None):
        rows = slice(None) if rows is None else rows
        return self.vectors["query"][rows], self.features[rows]


def ranker_of(seed: int = 0, *, table: bool = True, **options) -> DualRanker:
    rng = np.random.default_rng(seed)
    embedder, rows = LookUp(rng), rng.normal(size=(LABELS, DIM)).astype(np.float32)
    return DualRanker(embedder, {}, rows if table else None, range(LABELS), **options)


def bonus_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=LABELS).astype(np.float32)


@pytest.mark.parametrize("block", [1, 1000, ranking.SCORED_NUMBERS])
@pytest.mark.parametrize("bonus", [None, bonus_of(1)], ids=["plain", "bonus"])
@pytest.mark.parametrize("table", [True, False], ids=["unidec", "depsl"])
def test_scores_of_chosen_labels(table, bonus, block, monkeypatch):
    """Of any ids: the plain product and the bonus; of those that a search finds: its scores."""
    monkeypatch.setattr(ranking, "SCORED_NUMBERS", block)
    ranker = ranker_of(table=table, bonus=bonus)
    assert ranker.heads == (("concat", "de", "clf") if table else ("de",))
    rng = np.random.default_rng(2)
    for head in ranker.heads:
        queries = ranker.query_vectors(None, None, head)
        dense = queries.astype(np.float64) @ ranker.label_vectors(head).T
        dense += 0 if bonus is None else bonus
        found, ids = ranker.search(queries, head, 7)
        np.testing.assert_allclose(ranker.score(queries, head, ids), found, atol=1e-6)
        ids = rng.integers(0, LABELS, (QUERIES, 12)).astype(np.int32)
        ids[::2, 3], ids[1, 4] = -1, LABELS - 1
        scores = ranker.score(queries, head, ids)
        expected = np.where(ids < 0, -np.inf, np.take_along_axis(dense, ids, axis=1))
        np.testing.assert_allclose(scores, expected, atol=1e-6)
        assert scores.dtype == np.float32
        some = ranker.query_vectors(None, np.array([4, 1]), head)
        np.testing.assert_allclose(ranker.score(some, head, ids[[4, 1]]), scores[[4, 1]], atol=1e-6)
        assert ranker.score(queries, head, ids[:, :0]).shape == (QUERIES, 0)
        assert ranker.score(queries[:0], head, ids[:0]).shape == (0, 12)


def test_heads_are_known_before_labels_are_embedded(monkeypatch):
    """So a head that is not there is refused at once."""
    monkeypatch.setattr(LookUp, "de", lambda *_, **__: pytest.fail("labels were embedded"))
    assert ranker_of().heads == ("concat", "de", "clf") and ranker_of().num_labels == LABELS


def test_labels_without_points_are_ranked_by_their_texts():
    """Their vector of the classifier is c N(CLF(z_l)); all others are as they were."""
    plain, unseen = ranker_of(), np.array([2, 5])
    ranker = ranker_of(unseen=unseen, unseen_weight=0.4)
    clf = plain.label_vectors("clf").copy()
    clf[unseen] = 0.4 * unit_rows(ranker._embedder.features[unseen])
    np.testing.assert_array_equal(ranker.label_vectors("clf"), clf)
    np.testing.assert_array_equal(ranker.label_vectors("de"), plain.label_vectors("de"))
    joined = ranker.label_vectors("concat")
    np.testing.assert_array_equal(joined, np.concatenate([plain.label_vectors("de"), clf], axis=1))


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_other_indexes_give_the_same_scores(kind):
    ranker = ranker_of(kind=kind, keep_indexes=True)
    for head in ranker.heads:
        queries = ranker.query_vectors(None, None, head)
        found, ids = ranker.search(queries, head, 5)
        assert (ids >= 0).all()
        np.testing.assert_allclose(ranker.score(queries, head, ids), found, atol=1e-6)


def test_why_there_is_no_other_head():
    assert ranker_of(table=False).why_not("clf") == "the run has no classifier"
    ranker = ranker_of(table=False, why_not="new labels have no classifier row")
    assert ranker.why_not("concat") == "new labels have no classifier row"
    with pytest.raises(ValueError, match=r"head 'clf': this run has no classifier"):
        ranker.label_vectors("clf")
    with pytest.raises(ValueError, match=r"index 'ivf': with a tail weight, .* exactly"):
        ranker_of(kind="ivf", bonus=bonus_of(0))
