"""The graph of labels: exact counts against dense products, walks against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix, random_array

from xmc_jax.data.graph import label_graph

PROPERTY = settings(derandomize=True, deadline=None, max_examples=25)
MASK = 2**64 - 1


def counts(together, row, column):
    """A rule that keeps the counts themselves."""
    return together


def random_labels(seed, num_rows=60, num_labels=25, density=0.12) -> csr_matrix:
    rng = np.random.default_rng(seed)
    made = random_array((num_rows, num_labels), density=density, format="csr", rng=rng)
    made.data[:] = 1
    made.sort_indices()
    return csr_matrix(made, dtype=np.float32)


@PROPERTY
@given(st.integers(0, 10_000), st.sampled_from([1, 7, 100, 1 << 22]), st.integers(1, 3))
def test_cooccurrence_is_the_dense_product(seed, block, threads):
    labels = random_labels(seed)
    dense = labels.toarray().T @ labels.toarray()
    np.fill_diagonal(dense, np.maximum(np.diag(dense), 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(label_graph, "BLOCK_PRODUCTS", block)
        found = label_graph.cooccurrence(labels, counts, num_threads=threads)
        seen = label_graph.cooccurrence(labels, lambda g, row, column: row * 1000 + column)
    np.testing.assert_array_equal(found.toarray(), dense)
    assert found.has_sorted_indices and found.dtype == np.float32
    points = np.diag(dense)
    there = points[:, None] * 1000 + points
    np.testing.assert_array_equal(seen.toarray(), np.where(dense > 0, there, 0))


def test_what_the_rule_drops_is_not_stored():
    labels = random_labels(3)
    found = label_graph.cooccurrence(labels, lambda g, row, column: np.where(g > 2, g, 0))
    assert found.nnz == (found.toarray() > 2).sum() and found.data.min() == 3


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def plain_walks(labels, *, steps, restart, hub_points, seed) -> np.ndarray:
    """The same walks, one label and one step at a time."""
    labels = labels.toarray()
    hubs = labels.sum(axis=0) > hub_points
    labels[:, hubs] = 0
    num_labels, golden = labels.shape[1], label_graph._GOLDEN
    visits = np.zeros((num_labels, num_labels))
    for source in range(num_labels):
        if not labels[:, source].any():
            visits[source, source] = steps
            continue
        current, stream = source, mix(source + seed * golden & MASK)
        for step in range(steps):
            draw = mix(stream + (step + 1) * golden & MASK)
            if step and mix(~draw & MASK) / 2**64 < restart:
                current = source
            points = np.flatnonzero(labels[:, current])
            point = points[(draw >> 32) * len(points) >> 32]
            choice = np.flatnonzero(labels[point])
            current = choice[(draw & 0xFFFFFFFF) * len(choice) >> 32]
            visits[source, current] += 1
    np.fill_diagonal(visits, np.maximum(np.diag(visits), 1))
    return visits


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("hub_points", [8, 1000])
def test_walks_are_those_of_a_plain_loop(seed, hub_points):
    labels = random_labels(seed)
    settings = dict(steps=30, restart=0.6, hub_points=hub_points, seed=seed)
    found = label_graph.random_walks(labels, counts, **settings)
    np.testing.assert_array_equal(found.toarray(), plain_walks(labels, **settings))


def test_walks_are_cut_to_the_most_visited(monkeypatch):
    labels = random_labels(1, 300, 90, 0.05)
    whole = label_graph.random_walks(labels, counts, seed=4)
    monkeypatch.setattr(label_graph, "BLOCK_WALKS", 7)
    found = label_graph.random_walks(labels, counts, seed=4, depth=3)
    assert found.has_sorted_indices and np.diff(found.indptr).max() == 3
    for kept, wanted in zip(
        label_graph.strongest(found, 3), label_graph.strongest(whole, 3), strict=True
    ):
        np.testing.assert_array_equal(kept, wanted)


def test_walks_do_not_depend_on_blocks_or_threads(monkeypatch):
    labels = random_labels(1, 300, 90, 0.05)
    whole = label_graph.random_walks(labels, counts, seed=4, num_threads=1)
    monkeypatch.setattr(label_graph, "BLOCK_WALKS", 7)
    again = label_graph.random_walks(labels, counts, seed=4, num_threads=3)
    other = label_graph.random_walks(labels, counts, seed=5)
    np.testing.assert_array_equal(whole.toarray(), again.toarray())
    assert (whole != other).nnz


def test_walks_follow_their_probabilities():
    """With restart 1 a walk of one step is repeated: P(i | j) = mean over j's points of 1 / |P|."""
    labels = random_labels(2, density=0.2)
    dense, steps = labels.toarray(), 20_000
    found = label_graph.random_walks(labels, counts, steps=steps, restart=1.0, hub_points=0)
    share = dense / np.maximum(dense.sum(axis=1, keepdims=True), 1)
    expected = dense.T @ share / np.maximum(dense.sum(axis=0), 1)[:, None]
    assert abs(found.toarray() / steps - expected).max() < 4 * np.sqrt(0.25 / steps)


def test_hubs_and_unseen_labels_visit_themselves_alone():
    labels = np.zeros((12, 4), np.float32)
    labels[:, 0] = 1  # a hub of 12 points
    labels[:3, 1:3] = 1
    found = label_graph.random_walks(csr_matrix(labels), counts, steps=50, hub_points=11).toarray()
    np.testing.assert_array_equal(found[0], [50, 0, 0, 0])
    np.testing.assert_array_equal(found[3], [0, 0, 0, 50])
    assert found[1, 0] == 0 and found[1, 2] > 0 and found[1].sum() == 50


def test_refusals():
    labels = random_labels(0)
    with pytest.raises(ValueError, match=r"steps = 0, restart = 0\.8"):
        label_graph.random_walks(labels, counts, steps=0)
    labels.data[3] = 0.5
    with pytest.raises(ValueError, match=r"values from 0\.5 to 1\.0.*must be 1"):
        label_graph.cooccurrence(labels, counts)
