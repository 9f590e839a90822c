"""Balanced 2-means against a plain-loop twin with the same first centres."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmc_jax.data.search import clustering
from xmc_jax.data.search.clustering import balanced_clusters


def grouped(num_rows, dim, seed, num_groups=8, spread=0.6):
    """Vectors around random centres, of unequal lengths."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((num_groups, dim))
    x = centres[rng.integers(0, num_groups, num_rows)]
    x = x + spread * rng.standard_normal((num_rows, dim))
    return (x * rng.uniform(0.5, 2, (num_rows, 1))).astype(np.float32)


def unit(vector):
    length = np.sqrt((vector**2).sum())
    return vector / length if length > 0 else vector * 0


def plain_split(rows, x, first, second, tolerance=1e-4, max_iterations=50):
    """One cluster in two, in float64; rows ascending."""
    centres = [x[rows[first]], x[rows[second]]]
    before = -2.0
    for _ in range(max_iterations):
        difference = [float(x[row] @ centres[1] - x[row] @ centres[0]) for row in rows]
        ranked = sorted(range(len(rows)), key=lambda i: (difference[i], i))
        middle = len(rows) // 2
        halves = [sorted(rows[i] for i in part) for part in (ranked[:middle], ranked[middle:])]
        centres = [unit(np.mean([x[row] for row in half], axis=0)) for half in halves]
        similarity = np.mean([x[row] @ centres[k] for k in (0, 1) for row in halves[k]])
        if similarity - before < tolerance:
            break
        before = similarity
    return halves


def plain_clusters(x, num_levels, seed):
    x = np.stack([unit(row) for row in x.astype(np.float64)])
    clusters = [list(range(len(x)))]
    for level in range(num_levels):
        sizes = np.array([len(cluster) for cluster in clusters])
        rng = np.random.default_rng([seed, level])
        first, second = rng.integers(0, sizes), rng.integers(0, sizes - 1)
        second += second >= first
        clusters = [
            half
            for rows, one, two in zip(clusters, first, second)
            for half in plain_split(rows, x, one, two)
        ]
    return clusters


def as_lists(order, offsets):
    return [order[a:b].tolist() for a, b in itertools.pairwise(offsets)]


@pytest.mark.parametrize(
    ("num_rows", "num_levels"), [(64, 3), (101, 4), (37, 5), (200, 2), (500, 0), (7, 2), (3, 1)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_the_plain_twin(num_rows, num_levels, seed):
    x = grouped(num_rows, 12, seed)
    fast = as_lists(*balanced_clusters(x, num_levels, seed=seed))
    assert fast == plain_clusters(x, num_levels, seed)


def test_tiles_smaller_than_a_cluster_change_nothing(monkeypatch):
    x = grouped(403, 16, 3)
    whole = balanced_clusters(x, 5, seed=4)
    monkeypatch.setattr(clustering, "_TILE", 32)
    for num_threads in (1, 3):
        tiled = balanced_clusters(x, 5, seed=4, num_threads=num_threads)
        np.testing.assert_array_equal(tiled[0], whole[0])
        np.testing.assert_array_equal(tiled[1], whole[1])
    assert as_lists(*tiled) == plain_clusters(x, 5, 4)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(num_rows=st.integers(1, 300), levels=st.integers(0, 8), seed=st.integers(0, 100))
def test_sizes_and_order(num_rows, levels, seed):
    levels = min(levels, num_rows.bit_length() - 1)
    x = grouped(num_rows, 4, seed)
    order, offsets = balanced_clusters(x, levels, seed=seed)
    np.testing.assert_array_equal(np.sort(order), np.arange(num_rows))
    sizes = np.diff(offsets)
    assert len(sizes) == 2**levels and sizes.min() >= 1 and sizes.max() - sizes.min() <= 1
    assert all(rows == sorted(rows) for rows in as_lists(order, offsets))
    coarser = balanced_clusters(x, max(0, levels - 1), seed=seed)[1]
    if levels:
        np.testing.assert_array_equal(offsets[::2], coarser)


def test_deterministic_and_seeded():
    x = grouped(300, 8, 0)
    one, two = balanced_clusters(x, 4, seed=0), balanced_clusters(x, 4, seed=0)
    np.testing.assert_array_equal(one[0], two[0])
    assert (one[0] != balanced_clusters(x, 4, seed=1)[0]).any()
    lengths = np.random.default_rng(0).choice([0.25, 1.0, 4.0], (300, 1)).astype(np.float32)
    np.testing.assert_array_equal(one[0], balanced_clusters(x * lengths, 4, seed=0)[0])


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_identical_rows_terminate_and_split_by_row(value):
    x = np.full((21, 5), value, np.float32)
    order, offsets = balanced_clusters(x, 4, seed=0)
    np.testing.assert_array_equal(order, np.arange(21))
    assert set(np.diff(offsets)) == {1, 2}


def test_some_identical_rows():
    x = np.repeat(grouped(20, 6, 1), 8, axis=0)
    order, offsets = balanced_clusters(x, 3, seed=2)
    assert as_lists(order, offsets) == as_lists(*balanced_clusters(x, 3, seed=2))
    np.testing.assert_array_equal(np.sort(order), np.arange(160))


def mean_similarity(x, order, offsets):
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    return sum(np.linalg.norm(x[rows].sum(0)) for rows in as_lists(order, offsets)) / len(x)


def test_clusters_are_far_better_than_random_ones():
    rng = np.random.default_rng(0)
    groups = np.repeat(rng.standard_normal((64, 32)), 63, axis=0)
    x = (groups + 0.6 * rng.standard_normal(groups.shape)).astype(np.float32)
    shuffled = rng.permutation(len(x))
    order, offsets = balanced_clusters(x[shuffled], 6, seed=0)
    found = mean_similarity(x[shuffled], order, offsets)
    chance = mean_similarity(x[shuffled], np.arange(len(x)), offsets)
    truth = mean_similarity(x, np.arange(len(x)), offsets)  # the groups the rows were made from
    assert found > 3 * chance and found > 0.7 * truth


def test_large_cluster_counts_without_a_loop_over_clusters():
    """2^16 clusters of one or two rows of 100,000: a loop over clusters would take minutes."""
    x = grouped(100_000, 8, 0)
    order, offsets = balanced_clusters(x, 16, seed=0)
    assert set(np.diff(offsets)) == {1, 2}
    np.testing.assert_array_equal(np.sort(order), np.arange(100_000))


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match=r"2\^4 clusters were asked of 15 rows; expected 0 to 3"):
        balanced_clusters(np.ones((15, 2), np.float32), 4, seed=0)
    with pytest.raises(ValueError, match="expected 0 to 0 levels"):
        balanced_clusters(np.ones((0, 2), np.float32), 0, seed=0)
    x = np.ones((15, 2), np.float32)
    x[7, 1] = np.nan
    with pytest.raises(ValueError, match="row 7 of the vectors"):
        balanced_clusters(x, 1, seed=0)
