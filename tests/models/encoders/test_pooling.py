"""Pooling of packed rows against plain loops."""

from __future__ import annotations

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _packing import pack, random_texts

from xmc_jax.contracts import TokenBatch
from xmc_jax.models.encoders import pooling

BOTH = pytest.mark.parametrize("pool", [pooling.mean_pool, pooling.cls_pool])


def batch_and_hidden():
    texts = random_texts(0, 11, 50, 6)
    texts[4] = texts[4][:0]  # no text there
    tokens = pack(texts, 13)
    hidden = np.random.default_rng(1).normal(size=(*tokens.ids.shape, 5))
    return tokens, jnp.asarray(hidden, jnp.float32)


def loop(pool, tokens, hidden):
    vectors = []
    for row, segment in zip(tokens.text_row, tokens.text_segment):
        mine = np.asarray(hidden)[row][tokens.segment_ids[row] == segment]
        if segment == 0:
            vectors.append(np.zeros(hidden.shape[-1]))
        else:
            vectors.append(mine.mean(0) if pool is pooling.mean_pool else mine[0])
    return np.stack(vectors)


@BOTH
def test_equals_a_loop(pool):
    tokens, hidden = batch_and_hidden()
    vectors = pool(hidden, tokens, 13)
    assert vectors.dtype == jnp.float32
    np.testing.assert_allclose(vectors, loop(pool, tokens, hidden), atol=1e-6)
    np.testing.assert_array_equal(vectors[4], np.zeros(5))


@BOTH
def test_jit_and_order_of_texts(pool):
    tokens, hidden = batch_and_hidden()
    order = np.random.default_rng(2).permutation(11)
    shuffled = tokens._replace(
        text_row=tokens.text_row[order], text_segment=tokens.text_segment[order]
    )
    jitted = jax.jit(pool, static_argnums=2)(hidden, shuffled, 13)
    np.testing.assert_allclose(jitted, pool(hidden, tokens, 13)[order], atol=1e-6)


@BOTH
def test_empty_slots_and_padding_have_no_gradient(pool):
    tokens, hidden = batch_and_hidden()
    gradient = jax.grad(lambda h: jnp.sum(jnp.square(pool(h, tokens, 13))))(hidden)
    assert np.isfinite(gradient).all()
    assert (np.asarray(gradient)[tokens.segment_ids == 0] == 0).all()
    empty = tokens._replace(text_segment=np.zeros(11, np.uint8))
    gradient = jax.grad(lambda h: jnp.sum(jnp.square(pool(h, empty, 13))))(hidden)
    np.testing.assert_array_equal(gradient, np.zeros_like(hidden))


@BOTH
def test_a_segment_that_is_not_in_its_row_is_zeros_and_one_past_the_limit_nan(pool):
    tokens = TokenBatch(None, np.array([[1, 1, 3]]), None, np.zeros(3, int), np.array([2, 3, 1]))
    vectors = np.asarray(pool(jnp.ones((1, 3, 2)), tokens, 2))
    np.testing.assert_array_equal(vectors, [[0, 0], [np.nan, np.nan], [1, 1]])


@BOTH
def test_sixteen_bits_are_summed_in_thirty_two(pool):
    tokens = TokenBatch(None, np.ones((1, 600), int), None, np.zeros(1, int), np.ones(1, int))
    vectors = pool(jnp.full((1, 600, 2), 1.0078125, jnp.bfloat16), tokens, 1)
    assert vectors.dtype == jnp.float32
    np.testing.assert_allclose(vectors, 1.0078125, rtol=1e-6)


def test_example_in_the_docstring():
    assert doctest.testmod(pooling).failed == 0
