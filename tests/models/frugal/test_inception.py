"""InceptionXML's encoders against NumPy loops in float64."""

from __future__ import annotations

import functools

import _oracles
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _filling import fill, fill_moving
from _packing import one_a_row, pack, random_texts

from xmc_jax.models.frugal.inception import (
    InceptionQueries,
    circular_convolutions,
    pooling_matrix,
    strided_convolution,
    word_vectors,
)

V, LENGTH = 30, 6
ENCODERS = {
    experts: InceptionQueries(V, dim=80, length=LENGTH, experts=experts)
    for experts in (False, True)
}
both = pytest.mark.parametrize("experts", [False, True])


def texts_with_a_gap():
    texts = random_texts(0, 9, V, LENGTH)
    texts[4] = texts[4][:0]
    return texts


@functools.cache
def setting(experts):
    """Encoder, parameters, moving values, table."""
    encoder = ENCODERS[experts]
    params, moving = jax.eval_shape(encoder.init, jax.random.key(0))
    table = 0.4 * np.random.default_rng(0).normal(size=(V, 80)).astype(np.float32)
    return encoder, fill(params, 1), fill_moving(moving, 2), table


apply = jax.jit(InceptionQueries.apply, static_argnames=("self", "train"))


def assert_close(found, expected, atol):
    flat, tree = jax.tree.flatten(found)
    other, same = jax.tree.flatten(expected)
    assert tree == same
    for a, b in zip(flat, other):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol * max(1, np.abs(b).max()))


@both
def test_equals_plain_loops(experts):
    encoder, params, moving, table = setting(experts)
    texts = texts_with_a_gap()
    trees = map(_oracles.float64, (params, moving, table))
    expected, _ = _oracles.inception(*trees, texts, length=LENGTH, experts=experts)
    for batch in (pack(texts, 16, padding=7), one_a_row_with_gaps(texts)):
        (meta, extreme), kept = apply(encoder, params, table, None, batch, moving)
        assert meta.shape == extreme.shape == (9, 80) and meta.dtype == jnp.float32
        assert_close([meta, extreme], expected, 2e-5)
        assert (meta[4] == 0).all() and (extreme[4] == 0).all()
        assert_close(kept, moving, 0)


def one_a_row_with_gaps(texts):
    """One text a row, the rows in another order than the texts."""
    order = np.random.default_rng(1).permutation([i for i, t in enumerate(texts) if len(t)])
    rows = one_a_row([texts[i] for i in order], LENGTH + 2)
    text_row, text_segment = np.zeros(len(texts), np.int32), np.zeros(len(texts), np.uint8)
    text_row[order], text_segment[order] = np.arange(len(order)), 1
    return rows._replace(text_row=text_row, text_segment=text_segment)


@both
def test_in_training_equals_plain_loops_and_renews_what_moves(experts):
    encoder, params, moving, table = setting(experts)
    encoder = InceptionQueries(V, 80, LENGTH, dropout=0.0, experts=experts)
    texts = texts_with_a_gap()
    trees = map(_oracles.float64, (params, moving, table))
    expected = _oracles.inception(*trees, texts, length=LENGTH, experts=experts, train=True)
    options = {"key": jax.random.key(0), "train": True}
    features, kept = apply(encoder, params, table, None, pack(texts, 16), moving, **options)
    assert_close(list(features), expected[0], 2e-4)
    assert_close(kept, expected[1], 1e-5)
    other = pack(texts[::-1], 16)
    reverse, _ = apply(encoder, params, table, None, other, moving, **options)
    assert_close([x[::-1] for x in reverse], list(features), 2e-5)


@both
def test_gradients_equal_finite_differences(experts):
    encoder, params, moving, table = setting(experts)
    batch = pack(texts_with_a_gap(), 16)
    rng = np.random.default_rng(2)
    weights = rng.normal(size=(2, 9, 80))
    state = jax.tree.map(np.float64, {**params, "table": table})
    moving = jax.tree.map(np.float64, moving)
    with jax.enable_x64(True):

        @jax.jit
        def loss(state):
            features, _ = encoder.apply(state, state["table"], None, batch, moving)
            return jnp.sum(jnp.stack(features) * weights)

        gradient = jax.device_get(jax.jit(jax.grad(loss))(state))
        for name, part in gradient.items():
            step = jax.tree.map(lambda x: rng.normal(size=x.shape), part)
            move = lambda h, n=name, d=step: {
                **state,
                n: jax.tree.map(lambda a, b: a + h * b, state[n], d),
            }
            expected = float(loss(move(1e-6)) - loss(move(-1e-6))) / 2e-6
            found = sum(jax.tree.leaves(jax.tree.map(lambda g, d: np.sum(g * d), part, step)))
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5, err_msg=name)


@both
def test_dropout_only_in_training_and_by_key(experts):
    encoder, params, moving, table = setting(experts)
    batch = pack(texts_with_a_gap(), 16)
    run = lambda key: apply(encoder, params, table, None, batch, moving, key=key, train=True)
    first, kept = run(jax.random.key(1))
    assert_close(run(jax.random.key(1)), (first, kept), 0)
    assert (np.asarray(run(jax.random.key(2))[0][1]) != first[1]).mean() > 0.5
    assert (np.asarray(first[0][4]) == 0).all()
    with pytest.raises(ValueError, match="train=True needs key"):
        encoder.apply(params, table, None, batch, moving, train=True)


def test_published_sizes():
    for experts in (False, True):
        encoder = InceptionQueries(1000, experts=experts)
        assert encoder.num_features == 480
        params, moving = jax.eval_shape(encoder.init, jax.random.key(0))
        shapes = jax.tree.map(lambda x: x.shape, params)
        assert shapes["first"]["kernel"] == (32, 32)
        assert [shapes[f"kernel{k}"]["kernel"] for k in (4, 8, 16)] == [
            (k, 32, 32) for k in (4, 8, 16)
        ]
        assert shapes["meta_head"]["kernel"] == shapes["extreme_head"]["kernel"] == (480, 300)
        seconds = ("meta_second", "extreme_second") if experts else ("shared_second",)
        assert {k for k in shapes if k.endswith("second")} == set(seconds)
        for name in seconds:
            assert shapes[name]["kernel"] == (16, 32 if experts else 96, 32)
        assert ("router" in shapes) == experts
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((params, moving)))


def test_starts_without_attention_and_with_xavier_kernels():
    key = jax.random.key(0, impl="rbg")  # compiles several times faster
    params, _ = jax.jit(InceptionQueries(10).init)(key)
    assert params["words"]["gain"] == params["dimensions"]["gain"] == 0
    limit = np.sqrt(6 / (16 * 32 + 16 * 32))
    assert 0.9 * limit < np.abs(params["kernel16"]["kernel"]).max() <= limit
    assert abs(float(params["dimensions"]["kernel"].std()) - np.sqrt(1 / 300)) < 1e-3


@pytest.mark.parametrize("size", [4, 8, 16])
def test_convolution_equals_a_loop_and_turns_with_its_input(size):
    rng = np.random.default_rng(size)
    params = {"kernel": rng.normal(size=(size, 3, 5)), "bias": rng.normal(size=5)}
    x = rng.normal(size=(2, 24, 3))
    other = {"kernel": rng.normal(size=(8, 3, 5)), "bias": rng.normal(size=5)}
    circular = jax.jit(lambda x: circular_convolutions([other, params], x)[1])
    y = circular(x)
    np.testing.assert_allclose(y, _oracles.convolution(params, x, circular=True), atol=1e-4)
    np.testing.assert_allclose(circular(np.roll(x, 4, axis=1)), np.roll(y, 1, axis=1), atol=1e-4)
    for width in (size, size + 3, 23):  # what does not fill a stride is left out
        expected = _oracles.convolution(params, x[:, :width], circular=False)
        found = jax.jit(strided_convolution)(params, x[:, :width])
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(("inputs", "outputs"), [(480, 300), (32, 80), (64, 16), (7, 7)])
def test_pooling_matrix_is_the_adaptive_average_pool(inputs, outputs):
    x = np.random.default_rng(0).normal(size=(2, inputs))
    expected = _oracles.adaptive_pool(x, outputs)
    np.testing.assert_allclose(x @ pooling_matrix(inputs, outputs), expected, atol=1e-12)


def test_long_texts_are_cut_and_padding_has_no_gradient():
    table = np.random.default_rng(0).normal(size=(V, 4)).astype(np.float32)
    texts = [np.arange(9), np.array([5]), np.arange(0)]
    take = jax.jit(lambda table: word_vectors(table, pack(texts, 12, padding=2), LENGTH))
    words, count = take(table)
    np.testing.assert_array_equal(count, [LENGTH, 1, 0])
    np.testing.assert_array_equal(words[0], table[:LENGTH])
    np.testing.assert_array_equal(words[1], np.concatenate([table[5:6], np.zeros((5, 4))]))
    np.testing.assert_array_equal(words[2], np.zeros((LENGTH, 4)))
    sums = jax.grad(lambda table: jnp.sum(take(table)[0]))(table)
    np.testing.assert_array_equal(sums[:, 0], [1, 1, 1, 1, 1, 2] + [0] * (V - 6))


@pytest.mark.parametrize("dim", [60, 66])
def test_dim_must_suit_the_convolutions(dim):
    with pytest.raises(ValueError, match=f"dim={dim}.*multiple of 4, at least 64"):
        InceptionQueries(V, dim)
