"""TF-IDF sums, residual blocks and the attention over parts, against NumPy."""

from __future__ import annotations

import _oracles
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _packing import one_a_row, pack, random_texts

from xmc_jax.models.frugal import label_parts

V, D = 12, 6


def table_and_idf():
    rng = np.random.default_rng(0)
    idf = rng.uniform(0.5, 4, V).astype(np.float32)
    idf[3] = 0
    return rng.normal(size=(V, D)).astype(np.float32), idf


def texts_with_repeats():
    texts = random_texts(1, 11, V, 9)  # of 12 tokens: most long texts hold one twice
    texts[2], texts[7] = texts[2][:0], np.array([3, 3])  # no token; none with a weight
    return texts


def test_tfidf_sums_are_rows_of_the_matrix_times_the_table():
    table, idf = table_and_idf()
    texts = texts_with_repeats()
    expected = _oracles.tfidf(texts, np.float64(idf)) @ table
    for batch in (pack(texts, 20), pack(texts, 20, padding=5), pack(texts, 64)):
        z = label_parts.tfidf_sums(table, idf, batch)
        assert z.shape == (11, D) and z.dtype == jnp.float32
        np.testing.assert_allclose(z, expected, atol=1e-5)
    assert (np.asarray(z)[[2, 7]] == 0).all()


def test_gradient_of_tfidf_sums_is_the_matrix_transposed():
    table, idf = table_and_idf()
    texts = random_texts(1, 11, V, 9)
    weight = np.random.default_rng(2).normal(size=(11, D)).astype(np.float32)
    expected = _oracles.tfidf(texts, np.float64(idf)).T @ weight
    for batch in (pack(texts, 20), one_a_row(texts, 9)):
        loss = lambda table, idf, b=batch: jnp.sum(weight * label_parts.tfidf_sums(table, idf, b))
        of_table, of_idf = jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.asarray(table), idf)
        np.testing.assert_allclose(of_table, expected, atol=1e-5)
        np.testing.assert_array_equal(of_idf, np.zeros(V))


def test_weighted_sums_and_their_gradient():
    table, _ = table_and_idf()
    rng = np.random.default_rng(3)
    ids, weights = rng.integers(0, V, (7, 5)), rng.normal(size=(7, 5)).astype(np.float32)
    weights[:, 4], weights[2, 1:], weights[4], weights[5, 1] = 0, 0, 0, 0  # ends, all, a hole
    factor = rng.normal(size=(7, D)).astype(np.float32)
    dense = np.zeros((7, V))
    for p, t in np.ndindex(7, 5):
        dense[p, ids[p, t]] += weights[p, t]
    for number in (np.int32, np.uint16):
        narrow = ids.astype(number)
        loss = lambda t, i=narrow: jnp.sum(factor * label_parts.weighted_sums(t, i, weights))
        z = label_parts.weighted_sums(table, narrow, weights)
        np.testing.assert_allclose(z, dense @ table, atol=1e-5)
        gradient = jax.grad(loss)(jnp.asarray(table))
        np.testing.assert_allclose(gradient, dense.T @ factor, atol=1e-5)


def test_no_array_of_all_weighted_rows_is_made():
    """Temporaries: 512 labels of 32 tokens at dim 64 would be 4 MB."""
    ids, weights = jnp.zeros((512, 32), jnp.int32), jnp.ones((512, 32))
    loss = lambda table: jnp.sum(label_parts.weighted_sums(table, ids, weights) ** 2)
    memory = jax.jit(jax.grad(loss)).lower(jnp.ones((100, 64))).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.5 * ids.size * 64 * 4


def test_residual_block_equals_numpy_and_starts_as_a_half_of_each():
    params, direction = label_parts.init_block(jax.random.key(0), D)
    x = np.random.default_rng(4).normal(size=(5, D)).astype(np.float32)
    y, _ = label_parts.residual_block(params, direction, x, 0.0, None)
    np.testing.assert_allclose(y, 0.5 * _oracles.gelu(x) + 0.5 * x, atol=1e-6)
    draw = lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape)
    params = jax.tree.map(draw, params)
    for train in (False, True):
        y, kept = label_parts.residual_block(params, direction, x, 0.3, None, train=train)
        expected = _oracles.block(*map(_oracles.float64, (params, direction, x)), train)
        np.testing.assert_allclose(y, expected[0], atol=1e-5)
        np.testing.assert_allclose(kept, expected[1], atol=1e-5)
    dropped, _ = label_parts.residual_block(params, direction, x, 0.3, jax.random.key(1))
    assert not np.allclose(dropped, y)


@pytest.mark.parametrize("absent", [None, 0, 2])
def test_attention_equals_numpy(absent):
    params, moving = label_parts.init_attention(jax.random.key(0), D, 3)
    params["mix"]["bias"] = jax.random.normal(jax.random.key(1), (D,))
    rng = np.random.default_rng(5)
    parts = [rng.normal(size=(4, D)).astype(np.float32) for _ in range(3)]
    if absent is not None:
        parts[absent] = None
    for train in (False, True):
        w, kept = label_parts.attend(params, moving, parts, 0.3, None, train=train)
        expected = _oracles.attend(
            *map(_oracles.float64, (params, moving)),
            [None if u is None else np.float64(u) for u in parts],
            train,
        )
        np.testing.assert_allclose(w, expected[0], atol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), kept, expected[1])


def test_attention_is_a_convex_combination():
    params, moving = label_parts.init_attention(jax.random.key(0), D, 3)
    u = np.random.default_rng(6).normal(size=(4, D)).astype(np.float32)
    w, _ = label_parts.attend(params, moving, [u, u, u], 0.0, None)
    np.testing.assert_allclose(w, u, atol=1e-6)
    w, _ = label_parts.attend(params, moving, [None, u, None], 0.5, jax.random.key(2), train=True)
    np.testing.assert_allclose(w, u, atol=1e-6)


def test_attention_without_a_part_has_finite_gradients():
    params, moving = label_parts.init_attention(jax.random.key(0), D, 2)

    def loss(params, u):
        return jnp.sum(label_parts.attend(params, moving, [u, None], 0.0, None, train=True)[0] ** 2)

    gradients = jax.grad(loss, argnums=(0, 1))(params, jnp.zeros((3, D)))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
