"""Rows of a table by padded ids, and the 16-bit storage."""

from __future__ import annotations

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xmc_jax.tables import label_pool

L, D = 6, 3
IDS = np.array([4, 0, 3, L, L + 1, L + 7, 2**31 - 1], np.int32)
REAL = 3


def make_table(dtype: str) -> tuple[jax.Array, np.ndarray]:
    """A table as stored, and the float32 values it holds."""
    values = np.random.default_rng(0).normal(size=(L, D)).astype(np.float32)
    table = label_pool.to_storage(values, dtype)
    return table, np.asarray(label_pool.from_storage(table))


every_dtype = pytest.mark.parametrize("dtype", label_pool.STORAGE_DTYPES)


def test_pool_mask():
    expected = [True, True, True, False, False, False, False]
    np.testing.assert_array_equal(label_pool.pool_mask(IDS, L), expected)
    np.testing.assert_array_equal(label_pool.pool_mask(np.array([-1, 0]), L), [False, True])


@every_dtype
def test_gather(dtype):
    table, values = make_table(dtype)
    rows = jax.jit(label_pool.gather_rows)(table, IDS)
    assert rows.dtype == jnp.float32
    np.testing.assert_array_equal(rows[:REAL], values[IDS[:REAL]])
    np.testing.assert_array_equal(rows[REAL:], 0)


@every_dtype
def test_a_negative_id_is_no_label(dtype):
    table, values = make_table(dtype)
    np.testing.assert_array_equal(label_pool.gather_rows(table, np.array([-1])), np.zeros((1, D)))
    kept = label_pool.scatter_rows(table, np.array([-1]), np.ones((1, D), np.float32))
    np.testing.assert_array_equal(label_pool.from_storage(kept), values)


@every_dtype
def test_scatter(dtype):
    table, values = make_table(dtype)
    rows = np.random.default_rng(1).integers(-4, 4, (len(IDS), D)).astype(np.float32)
    new = jax.jit(label_pool.scatter_rows)(table, IDS, rows)
    assert new.dtype == table.dtype
    expected = values.copy()
    expected[IDS[:REAL]] = rows[:REAL]
    np.testing.assert_array_equal(label_pool.from_storage(new), expected)


@every_dtype
def test_writing_back_what_was_read_changes_no_bit(dtype):
    table, _ = make_table(dtype)
    same = label_pool.scatter_rows(table, IDS, label_pool.gather_rows(table, IDS))
    np.testing.assert_array_equal(same, table)


def test_bfloat16_storage_rounds_to_nearest_even():
    values = np.array([1.0, -2.5, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9, np.inf, 0.0], np.float32)
    stored = label_pool.to_storage(values, "bfloat16")
    assert stored.dtype == jnp.uint16
    expected = [1.0, -2.5, 1.0, 1 + 2**-6, 1.0, np.inf, 0.0]
    np.testing.assert_array_equal(label_pool.from_storage(stored), np.array(expected, np.float32))


def test_storage_of_float32_is_the_identity():
    values = np.random.default_rng(0).normal(size=5).astype(np.float32)
    np.testing.assert_array_equal(label_pool.to_storage(values, "float32"), values)
    np.testing.assert_array_equal(label_pool.from_storage(values), values)


def test_gradient_with_respect_to_the_table():
    table, _ = make_table("float32")
    gradient = jax.grad(lambda t: jnp.sum(label_pool.gather_rows(t, IDS)))(table)
    expected = np.zeros((L, D))
    expected[IDS[:REAL]] = 1
    np.testing.assert_array_equal(gradient, expected)


def test_wrong_types():
    with pytest.raises(ValueError, match="float16"):
        label_pool.to_storage(np.zeros(2, np.float32), "float16")
    with pytest.raises(ValueError, match="int32"):
        label_pool.gather_rows(jnp.zeros((2, 2), jnp.int32), np.array([0]))


def test_examples_run():
    result = doctest.testmod(label_pool)
    assert result.attempted > 0
    assert result.failed == 0
