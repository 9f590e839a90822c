"""Inverse propensities against the printed reference values and the golden files."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from xmc_jax.metrics import propensity

FAMILIES = {"other": (0.55, 1.5), "amazon": (0.6, 2.6), "wiki": (0.5, 0.4)}

# Inverse propensities that pyxclib's own code gave for labels seen 0, 1, 2, 10 and 100 times.
REFERENCE = [
    (1_000, "other", [8.82419, 6.90776, 5.90967, 3.55215, 1.77043]),
    (1_000, "amazon", [8.18158, 6.90776, 6.09975, 3.78600, 1.79162]),
    (1_000, "wiki", [12.0524, 6.90776, 5.51212, 3.16755, 1.69762]),
    (294_805, "other", [16.3551, 12.59407, 10.63531, 6.00863, 2.51198]),
    (294_805, "amazon", [15.09397, 12.59407, 11.00835, 6.46758, 2.55356]),
    (294_805, "wiki", [22.69052, 12.59407, 9.85512, 5.25386, 2.36909]),
]


def labels_seen(counts: list[int], num_rows: int) -> sp.csr_matrix:
    """A matrix in which label l stands in the first counts[l] rows."""
    rows = np.concatenate([np.arange(c) for c in counts])
    columns = np.repeat(np.arange(len(counts)), counts)
    return sp.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(num_rows, len(counts)))


@pytest.mark.parametrize(("num_rows", "family", "expected"), REFERENCE)
def test_reference_table(num_rows: int, family: str, expected: list[float]) -> None:
    a, b = FAMILIES[family]
    weights = propensity.inverse_propensity(labels_seen([0, 1, 2, 10, 100], num_rows), a=a, b=b)
    np.testing.assert_allclose(weights, expected, rtol=5e-6)  # printed to 5 digits
    assert weights.dtype == np.float64


@pytest.mark.parametrize("name", ["plain", "amazon_filtered", "wiki_short_empty"])
def test_golden(golden, name: str) -> None:
    with np.load(golden / f"metrics_{name}.npz") as z:
        train = sp.csr_matrix(
            (z["tr_data"], z["tr_indices"], z["tr_indptr"]), shape=tuple(z["tr_shape"])
        )
        weights = propensity.inverse_propensity(train, a=float(z["A"]), b=float(z["B"]))
        np.testing.assert_allclose(weights, z["inv_prop"], rtol=1e-12)


def test_seen_once_weighs_ln_n() -> None:
    for a, b in FAMILIES.values():
        weights = propensity.inverse_propensity(labels_seen([1], 777), a=a, b=b)
        np.testing.assert_allclose(weights, [np.log(777)], rtol=1e-12)


def test_frequency_counts_positives_once() -> None:
    # Row 0 stores label 2 twice and an explicit zero for label 1.
    labels = sp.csr_matrix((np.array([1.0, 0.0, 1.0, 1.0]), [2, 1, 2, 0], [0, 3, 4]), shape=(2, 4))
    before = labels.indices.copy()
    np.testing.assert_array_equal(propensity.label_frequency(labels), [1, 0, 1, 0])
    np.testing.assert_array_equal(labels.indices, before)  # the caller's matrix is as it was


def test_tiny_data_have_equal_weights() -> None:
    weights = propensity.inverse_propensity(labels_seen([0, 1, 2], 2), a=0.55, b=1.5)
    np.testing.assert_array_equal(weights, 1.0)


def test_errors() -> None:
    with pytest.raises(ValueError, match="training rows"):
        propensity.inverse_propensity(sp.csr_matrix((0, 3)), a=0.55, b=1.5)
    with pytest.raises(ValueError, match="b=0"):
        propensity.inverse_propensity(labels_seen([1], 5), a=0.55, b=0)
