"""Shortlists: a query's best clusters, its own among them, and labels drawn from them."""

from __future__ import annotations

import numpy as np

from xmc_jax import frugal_mining


def test_members_of_clusters():
    found = frugal_mining.cluster_members(np.array([1, 0, 1, 3]), 4)
    assert found.tolist() == [[1, -1], [0, 2], [-1, -1], [3, -1]]


def test_own_clusters_come_first_then_the_best():
    scores = np.array([[0.1, 0.9, 0.5, 0.3], [4.0, 3.0, 2.0, 1.0]], np.float32)
    place, own = np.array([0, 0, 1]), np.array([0, 0, 3])
    found = frugal_mining.best_clusters(scores, place, own, 2)
    assert [set(row) for row in found.tolist()] == [{0, 1}, {3, 0}]


def test_draws_are_distinct_labels_of_the_clusters():
    members = np.arange(24, dtype=np.int32).reshape(6, 4)
    members[:, 3] = -1
    chosen = members[np.array([[0, 1, 2], [3, 4, 5]])]  # [2, 3, 4]
    seen = np.zeros(24)
    for seed in range(200):
        found = frugal_mining.draw_labels(np.random.default_rng(seed), chosen, 5)
        assert found.shape == (2, 5)
        for row, clusters in zip(found, chosen):
            assert len(set(row)) == 5 and np.isin(row, clusters[clusters >= 0]).all()
        seen[found] += 1
    inside = members[:, :3].ravel()
    assert seen[inside].min() > 70 and seen[inside].max() < 150  # 200 * 5 / 9 = 111 each


def test_few_labels_are_all_taken():
    members = np.array([[[4, -1], [2, 0]]], np.int32)
    found = frugal_mining.draw_labels(np.random.default_rng(0), members, 6)
    assert found.tolist() == [[4, -1, 2, 0, -1, -1]]
    # With fewer labels than places, but not fewer places than are asked for, the rest is -1.
    found = frugal_mining.draw_labels(np.random.default_rng(0), members, 3)
    assert sorted(found[0].tolist()) == [0, 2, 4]
