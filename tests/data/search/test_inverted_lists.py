"""Search of inverted lists against a plain loop over the lists that each query visits."""

from __future__ import annotations

import numpy as np
import pytest

from xmc_jax.data.search import inverted_lists
from xmc_jax.data.search.exact_search import exact_search
from xmc_jax.data.search.inverted_lists import InvertedLists


def unit(rng, rows, dim):
    x = rng.standard_normal((rows, dim)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def plain(lists, vectors, queries, k, nprobe):
    """Scores of every vector of the lists visited, in float64."""
    owner = np.argmax(vectors @ lists.centroids.T, axis=1)
    scores = np.full((len(queries), k), -np.inf)
    ids = np.full((len(queries), k), -1)
    for row, query in enumerate(queries):
        visited = np.argsort(-(lists.centroids @ query), kind="stable")[:nprobe]
        members = np.flatnonzero(np.isin(owner, visited))
        found = vectors[members].astype(np.float64) @ query.astype(np.float64)
        best = np.argsort(-found, kind="stable")[:k]
        scores[row, : len(best)], ids[row, : len(best)] = found[best], members[best]
    return scores, ids


def made(rng, number=700, dim=12, lists=20):
    vectors = unit(rng, number, dim)
    return InvertedLists.build(vectors, vectors, lists, seed=0), vectors


@pytest.mark.parametrize(("k", "nprobe"), [(1, 1), (5, 3), (60, 2), (60, 9), (300, 4), (10, 50)])
def test_equals_a_plain_loop(k, nprobe):
    rng = np.random.default_rng(k)
    lists, vectors = made(rng)
    queries = unit(rng, 150, 12)
    found, wanted = lists.search(queries, k, nprobe), plain(lists, vectors, queries, k, nprobe)
    np.testing.assert_array_equal(found[1], wanted[1])
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-6)
    assert found[0].dtype == np.float32 and found[1].dtype == np.int32


def test_blocks_tiles_and_chunks_change_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    lists, _ = made(rng)
    queries = unit(rng, 150, 12)
    wanted = lists.search(queries, 30, 7)
    monkeypatch.setattr(inverted_lists, "BLOCK", 64)
    monkeypatch.setattr(inverted_lists, "_TILE", 16)
    monkeypatch.setattr(inverted_lists, "_QUERIES", 8)
    monkeypatch.setattr(inverted_lists, "_CHUNK", 10)
    found = lists.search(queries, 30, 7)
    np.testing.assert_array_equal(found[1], wanted[1])
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-6)


def test_all_lists_are_exact_search():
    rng = np.random.default_rng(1)
    lists, vectors = made(rng, number=3000, dim=16, lists=40)
    queries = unit(rng, 200, 16)
    found, wanted = lists.search(queries, 25, 40), exact_search(queries, vectors, 25)
    np.testing.assert_array_equal(found[1], wanted[1])
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-6)


def test_empty_lists():
    rng = np.random.default_rng(2)
    vectors = unit(rng, 50, 4)
    far = np.concatenate([vectors[:1], -vectors.mean(axis=0, keepdims=True), vectors[:1]])
    lists = InvertedLists(far.astype(np.float32), np.repeat(vectors[:1], 30, axis=0))
    assert lists.starts.tolist() == [0, 30, 30, 30]  # equal centroids: the first gets all
    scores, ids = lists.search(far[1:2].astype(np.float32), 3, 1)
    assert np.isneginf(scores).all() and (ids == -1).all()
    assert lists.search(np.zeros((0, 4), np.float32), 3, 1)[1].shape == (0, 3)
    np.testing.assert_array_equal(lists.search(vectors[:1], 3, 3)[1], [[0, 1, 2]])


def test_the_same_seed_gives_the_same_lists():
    one, two = (made(np.random.default_rng(3))[0] for _ in range(2))
    np.testing.assert_array_equal(one.ids, two.ids)
    np.testing.assert_array_equal(one.centroids, two.centroids)
    assert np.diff(one.starts).sum() == 700
