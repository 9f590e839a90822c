"""Soft targets of label texts: reference values, dense twins, and what must hold for any data."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from test_label_graph import random_labels

from xmc_jax.data.graph import gandalf

PROPERTY = settings(derandomize=True, deadline=None, max_examples=30)


@pytest.fixture(scope="module")
def reference(golden):
    with np.load(golden / "lcg.npz") as file:
        return dict(file)


@pytest.mark.parametrize("delta", [0.0, 0.1, 0.2])
def test_gandalf_reference(reference, delta):
    found = gandalf.gandalf_targets(csr_matrix(reference["Y"]), delta=delta)
    expected = reference[f"gandalf_delta{delta}"]
    np.testing.assert_allclose(found.toarray(), expected, rtol=1e-6)
    np.testing.assert_array_equal(found.toarray() > 0, expected > 0)


def test_glas_reference(reference):
    found = gandalf.glas_targets(csr_matrix(reference["Y"]))
    np.testing.assert_allclose(found.toarray(), reference["glas_targets"], rtol=1e-6)


def test_symmetric_reference(reference):
    found = gandalf.symmetric_targets(csr_matrix(reference["Y"]), delta=0.2)
    expected = np.where(reference["glas_S"] > 0.2, reference["glas_S"], 0)
    np.testing.assert_allclose(found.toarray(), expected, rtol=1e-6)


def test_doctest():
    assert doctest.testmod(gandalf).failed == 0


@PROPERTY
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.1, 0.5, 0.9]))
def test_gandalf_is_equation_1_6(seed, delta):
    labels = random_labels(seed, density=0.15)
    dense = labels.toarray().astype(np.float64)
    graph = dense.T @ dense
    expected = np.eye(len(graph))
    for j in np.flatnonzero(np.diag(graph)):
        for i in range(len(graph)):
            conditional = graph[i, j] / graph[j, j]
            expected[j, i] = conditional if conditional > delta else 0
    found = gandalf.gandalf_targets(labels, delta=delta)
    np.testing.assert_allclose(found.toarray(), expected, rtol=1e-6)


@PROPERTY
@given(st.integers(0, 10_000), st.sampled_from(gandalf.VARIANTS), st.sampled_from([0.0, 0.1, 0.4]))
def test_what_holds_for_every_variant(seed, variant, delta):
    labels = random_labels(seed)
    found = gandalf.targets(labels, variant, delta=delta, seed=seed)
    dense = found.toarray()
    assert found.dtype == np.float32 and found.has_sorted_indices and found.shape == dense.shape
    assert (found.data > 0).all() and (found.data <= 1).all()
    own = 1 / (1 + np.exp(-1)) if variant == "glas" else 1
    np.testing.assert_allclose(np.diag(dense), own, rtol=1e-6)
    if variant in ("symmetric", "glas"):
        np.testing.assert_array_equal(dense, dense.T)
    if variant not in ("self", "glas"):
        assert found.data.min() > np.float32(delta) * (1 - 1e-6)
    unseen = ~labels.toarray().any(axis=0)
    np.testing.assert_array_equal((dense > 0)[unseen], np.eye(len(dense), dtype=bool)[unseen])


def test_self_annotation():
    found = gandalf.self_targets(random_labels(0))
    np.testing.assert_array_equal(found.toarray(), np.eye(25, dtype=np.float32))


def test_walks_estimate_what_the_graph_says():
    """Where all points of a label hold as many labels, visits are in proportion to counts."""
    rng = np.random.default_rng(0)
    labels = np.zeros((400, 30), np.float32)
    for row in labels:
        row[rng.choice(30, 3, replace=False, p=np.arange(1, 31) / 465)] = 1
    labels = csr_matrix(labels)
    exact = gandalf.gandalf_targets(labels, delta=0.0).toarray()
    walked = gandalf.walk_targets(labels, delta=0.0).toarray()
    there = exact > 0.02
    assert np.corrcoef(exact[there], walked[there])[0, 1] > 0.9


def test_no_points_at_all():
    labels = csr_matrix((5, 3), dtype=np.float32)
    for variant in gandalf.VARIANTS:
        found = gandalf.targets(labels, variant).toarray()
        np.testing.assert_array_equal(found > 0, np.eye(3, dtype=bool))


def test_neighbours_held_is_a_loop_over_points():
    labels = random_labels(4, num_rows=40, num_labels=12, density=0.3)
    dense = labels.toarray().astype(np.float64)
    rows, label_ids = np.array([3, 8, 8, 20, 31]), np.array([1, 0, 7, 11, 5])
    held, promised = gandalf.neighbours_held(labels, rows, label_ids, depth=4)
    for place, (row, label) in enumerate(zip(rows, label_ids)):
        others = dense[dense[:, label] > 0] if not dense[row, label] else None
        if others is None:  # the point itself bears no witness
            others = np.delete(dense, row, axis=0)
            others = others[others[:, label] > 0]
        graph = others.sum(axis=0)
        share = np.delete(np.stack([graph / graph[label], np.arange(12)], axis=1), label, axis=0)
        best = sorted((-value, int(i)) for value, i in share if value > 0)[:4]
        np.testing.assert_allclose(promised[place, : len(best)], [-value for value, _ in best])
        assert not promised[place, len(best) :].any() and not held[place, len(best) :].any()
        found = [dense[row, i] > 0 for _, i in best]
        np.testing.assert_array_equal(held[place, : len(best)], found)


def test_refusals():
    labels = random_labels(0)
    with pytest.raises(ValueError, match=r"'gandalf': expected one of graph, self"):
        gandalf.targets(labels, "gandalf")
    for delta in (-0.1, 1.0):
        with pytest.raises(ValueError, match=rf"found {delta}; expected 0 <= delta < 1"):
            gandalf.gandalf_targets(labels, delta=delta)
