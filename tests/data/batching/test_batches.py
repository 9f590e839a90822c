"""Batches of queries: every row once, whatever the batching; the papers' cluster counts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from xmc_jax.data.batching.batches import (
    batch_slots,
    cluster_levels,
    cluster_size,
    coarsen,
    epoch_queries,
)


def halved(num_rows, levels):
    """Offsets of balanced halving, as `balanced_clusters` makes them."""
    sizes = [num_rows]
    for _ in range(levels):
        sizes = [part for size in sizes for part in (size // 2, size - size // 2)]
    return np.concatenate([[0], np.cumsum(sizes)])


ROWS = np.arange(1000, 1103) * 3
ORDER = np.random.default_rng(5).permutation(103)
OFFSETS = halved(103, 4)


def clusters():
    return [set(ROWS[ORDER[a:b]].tolist()) for a, b in itertools.pairwise(OFFSETS)]


@pytest.mark.parametrize("batching", ["random", "clusters", "joined"])
def test_every_row_stands_in_one_batch(batching):
    batches = epoch_queries(1, 2, ROWS, 10, batching=batching, order=ORDER, offsets=OFFSETS)
    assert batches.dtype == np.int32 and batches.shape[1] == 10
    assert batches.shape[0] == (16 if batching == "clusters" else 11)
    np.testing.assert_array_equal(np.sort(batches[batches >= 0]), ROWS)
    # Empty slots stand at the end of a batch.
    there = batches >= 0
    assert (there[:, :-1] | ~there[:, 1:]).all() and there[:, 0].all()


@pytest.mark.parametrize("batching", ["random", "clusters", "joined"])
def test_pure_function_of_seed_and_epoch(batching):
    def make(seed, epoch):
        return epoch_queries(seed, epoch, ROWS, 10, batching=batching, order=ORDER, offsets=OFFSETS)

    np.testing.assert_array_equal(make(1, 2), make(1, 2))
    assert (make(1, 2) != make(1, 3)).any() and (make(1, 2) != make(2, 2)).any()


def test_one_cluster_is_one_batch_in_random_order():
    batches = epoch_queries(0, 0, ROWS, 7, batching="clusters", order=ORDER, offsets=OFFSETS)
    rows = [set(batch[batch >= 0].tolist()) for batch in batches]
    assert sorted(map(sorted, rows)) == sorted(map(sorted, clusters()))
    assert rows != clusters()


def test_joined_keeps_clusters_together_across_cuts():
    batches = epoch_queries(0, 0, ROWS, 10, batching="joined", order=ORDER, offsets=OFFSETS)
    line = batches.reshape(-1)[: ROWS.size].tolist()
    wanted = {frozenset(cluster) for cluster in clusters()}
    seen, start = set(), 0
    while start < len(line):
        size = next(s for s in (6, 7) if frozenset(line[start : start + s]) in wanted)
        seen.add(frozenset(line[start : start + size]))
        start += size
    assert seen == wanted


def test_random_and_clustered_batches_differ_in_neighbours():
    batches = epoch_queries(0, 0, ROWS, 10, batching="random")
    line = batches.reshape(-1)[: ROWS.size]
    assert (line != ROWS).any()


@pytest.mark.parametrize(
    ("num_rows", "wanted", "levels", "size"),
    [
        (294_805, 576, 9, 576),
        (693_082, 677, 10, 677),
        (1_813_391, 221, 13, 221),
        (2_248_619, 1_098, 11, 1_098),
    ],
)
def test_cluster_counts_of_the_papers(num_rows, wanted, levels, size):
    assert cluster_levels(num_rows, wanted) == levels
    assert round(num_rows / 2**levels) == size
    assert batch_slots(num_rows, levels) == -(-num_rows // 2**levels)
    assert np.diff(halved(num_rows, levels)).max() == batch_slots(num_rows, levels)


def test_cluster_levels_of_other_batchings_and_edges():
    assert cluster_levels(1000, 100, "random") == 0
    assert cluster_levels(1 << 19, 1024, "joined", cluster_size=64) == 13
    assert cluster_levels(1000, 100, "joined", cluster_size=1) == 9  # 2^10 would leave some empty
    assert cluster_levels(100, 576) == 0 and batch_slots(100, 0) == 100
    assert cluster_levels(3, 2) == 1 and cluster_levels(1, 1) == 0
    with pytest.raises(ValueError, match="random, clusters, joined"):
        cluster_levels(10, 5, "tree")
    with pytest.raises(ValueError, match="at least 1"):
        cluster_levels(10, 5, "joined", cluster_size=0)


def test_coarse_clusters_are_unions_of_fine_ones():
    for levels in range(5):
        np.testing.assert_array_equal(coarsen(OFFSETS, levels), halved(103, levels))
    with pytest.raises(ValueError, match="0 to 4"):
        coarsen(OFFSETS, 5)


def test_growing_schedule():
    schedule = ((0, 1), (10, 2), (12, 8))
    sizes = [cluster_size(epoch, schedule) for epoch in (0, 9, 10, 11, 12, 500)]
    assert sizes == [1, 1, 2, 2, 8, 8]
    for wrong in ((), ((1, 2),), ((0, 4), (3, 2)), ((0, 1), (5, 2), (5, 4))):
        with pytest.raises(ValueError, match="expected pairs"):
            cluster_size(0, wrong)
    with pytest.raises(ValueError, match="at least 1"):
        cluster_size(0, ((0, 0),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(batching="tree"), "expected one of random, clusters, joined"),
        (dict(batching="clusters", order=None), "needs order and offsets"),
        (dict(batching="joined", rows=ROWS[1:]), "belong to other data"),
        (dict(batching="clusters", batch_size=6), "a cluster holds 7 rows, a batch 6"),
        (dict(batch_size=0), "at least 1"),
    ],
)
def test_errors_say_what_to_do(change, message):
    options = dict(rows=ROWS, batch_size=10, order=ORDER, offsets=OFFSETS) | change
    with pytest.raises(ValueError, match=message):
        epoch_queries(0, 0, **options)


def test_two_million_rows_take_no_loop():
    num_rows, levels = 2_248_619, 11
    offsets = halved(num_rows, levels)
    order = np.arange(num_rows)[::-1]
    slots = batch_slots(num_rows, levels)
    for batching in ("random", "clusters", "joined"):
        batches = epoch_queries(
            0, 0, np.arange(num_rows), slots, batching=batching, order=order, offsets=offsets
        )
        assert batches.shape == (2048, 1098)
        assert (batches >= 0).sum() == num_rows
