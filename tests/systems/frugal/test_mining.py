"""Shortlists: a query's best clusters, its own among them, and labels drawn from them."""

from __future__ import annotations

import numpy as np

from xmc_jax.systems.frugal import mining


def test_members_of_clusters():
    found = mining.cluster_members(np.array([1, 0, 1, 3]), 4)
    assert found.tolist() == [[1, -1], [0, 2], [-1, -1], [3, -1]]


def test_own_clusters_come_first_then_the_best():
    scores = np.array([[0.1, 0.9, 0.5, 0.3], [4.0, 3.0, 2.0, 1.0]], np.float32)
    place, own = np.array([0, 0, 1]), np.array([0, 0, 3])
    found = mining.best_clusters(scores, place, own, 2)
    assert [set(row) for row in found.tolist()] == [{0, 1}, {3, 0}]


def test_own_clusters_leave_room_for_others():
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((50, 30)).astype(np.float32)
    mine = rng.random((50, 30)) < rng.random((50, 1))  # few own clusters to nearly all
    place, own = np.repeat(np.nonzero(mine), 2, axis=1)  # as two labels of a cluster give it
    found = mining.best_clusters(scores.copy(), place, own, 7)
    for row, score, of_row in zip(found, scores, mine):
        ranked = np.argsort(-score)
        first = [c for c in ranked if of_row[c]][:4]
        others = [c for c in ranked if not of_row[c]][: 7 - len(first)]
        assert set(first) | set(others) <= set(row.tolist()) and len(set(row.tolist())) == 7


def test_draws_are_distinct_labels_of_the_clusters():
    members = np.arange(24, dtype=np.int32).reshape(6, 4)
    members[:, 3] = -1
    chosen = members[np.array([[0, 1, 2], [3, 4, 5]])]  # [2, 3, 4]
    seen = np.zeros(24)
    for seed in range(200):
        found = mining.draw_labels(np.random.default_rng(seed), chosen, 5)
        assert found.shape == (2, 5)
        for row, clusters in zip(found, chosen):
            assert len(set(row)) == 5 and np.isin(row, clusters[clusters >= 0]).all()
        seen[found] += 1
    inside = members[:, :3].ravel()
    assert seen[inside].min() > 70 and seen[inside].max() < 150  # 200 * 5 / 9 = 111 each


def test_few_labels_are_all_taken():
    members = np.array([[[4, -1], [2, 0]]], np.int32)
    found = mining.draw_labels(np.random.default_rng(0), members, 6)
    assert found.tolist() == [[4, -1, 2, 0, -1, -1]]
    # With fewer labels than places, but not fewer places than are asked for, the rest is -1.
    found = mining.draw_labels(np.random.default_rng(0), members, 3)
    assert sorted(found[0].tolist()) == [0, 2, 4]
