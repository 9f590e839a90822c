"""InceptionXML's encoders against NumPy loops in float64."""

from __future__ import annotations

import _oracles
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _packing import one_a_row, pack, random_texts

from xmc_jax.models.inception import (
    InceptionQueries,
    circular_pad,
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


def setting(experts):
    """Encoder, parameters in which nothing is 0 or 1 by birth, moving values, table."""
    encoder = ENCODERS[experts]
    params, moving = encoder.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    change = lambda x: jnp.asarray(x + 0.1 * rng.normal(size=x.shape), jnp.float32)
    params = jax.tree.map(change, params)
    for name in moving:
        if name.endswith("norm"):
            moving[name] = jax.tree.map(lambda x: jnp.abs(change(x)), moving[name])
    table = jnp.asarray(0.4 * rng.normal(size=(V, 80)), jnp.float32)
    return encoder, params, moving, table


def apply(encoder, params, moving, table, batch, **options):
    run = jax.jit(lambda p, m, t, b: encoder.apply(p, t, jnp.ones(V), b, m, **options))
    return run(params, moving, table, batch)


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
        (meta, extreme), kept = apply(encoder, params, moving, table, batch)
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
    features, kept = apply(encoder, params, moving, table, pack(texts, 16), **options)
    assert_close(list(features), expected[0], 2e-4)
    assert_close(kept, expected[1], 1e-5)
    shuffled, _ = apply(encoder, params, moving, table, one_a_row_with_gaps(texts), **options)
    assert_close(shuffled, features, 2e-5)


@both
def test_gradients_equal_finite_differences(experts):
    encoder, params, moving, table = setting(experts)
    batch = pack(texts_with_a_gap(), 16)
    rng = np.random.default_rng(2)
    weights = rng.normal(size=(2, 9, 80))
    with jax.enable_x64(True):
        params, moving, table = (
            jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tree)
            for tree in (params, moving, table)
        )

        @jax.jit
        def loss(params, table):
            features, _ = encoder.apply(params, table, jnp.ones(V), batch, moving)
            return jnp.sum(jnp.stack(features) * weights)

        gradients = jax.grad(loss, argnums=(0, 1))(params, table)
        groups = {**gradients[0], "table": gradients[1]}
        for name, gradient in groups.items():
            step = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), gradient)

            def at(h, name=name, step=step):
                move = lambda x: jax.tree.map(lambda a, d: a + h * d, x, step)
                if name == "table":
                    return loss(params, move(table))
                return loss({**params, name: move(params[name])}, table)

            expected = (at(1e-6) - at(-1e-6)) / 2e-6
            products = jax.tree.map(lambda g, d: jnp.sum(g * d), gradient, step)
            found = sum(jax.tree.leaves(products))
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5, err_msg=name)


@both
def test_dropout_only_in_training_and_by_key(experts):
    encoder, params, moving, table = setting(experts)
    batch = pack(texts_with_a_gap(), 16)
    run = jax.jit(
        lambda key: encoder.apply(params, table, None, batch, moving, key=key, train=True)
    )
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
    params, _ = InceptionQueries(10).init(jax.random.key(0))
    assert params["words"]["gain"] == params["dimensions"]["gain"] == 0
    limit = np.sqrt(6 / (16 * 32 + 16 * 32))
    assert 0.9 * limit < np.abs(params["kernel16"]["kernel"]).max() <= limit
    assert abs(float(params["dimensions"]["kernel"].std()) - np.sqrt(1 / 300)) < 1e-3


@pytest.mark.parametrize("size", [4, 8, 16])
def test_convolution_equals_a_loop_and_turns_with_its_input(size):
    rng = np.random.default_rng(size)
    params = {"kernel": rng.normal(size=(size, 3, 5)), "bias": rng.normal(size=5)}
    x = rng.normal(size=(2, 24, 3))
    y = strided_convolution(_f32(params), circular_pad(jnp.asarray(x), size))
    np.testing.assert_allclose(y, _oracles.convolution(params, x, circular=True), atol=1e-4)
    turned = strided_convolution(_f32(params), circular_pad(jnp.roll(x, 4, axis=1), size))
    np.testing.assert_allclose(turned, np.roll(y, 1, axis=1), atol=1e-4)
    for width in (size, size + 3, 23):  # what does not fill a stride is left out
        plain = _oracles.convolution(params, x[:, :width], circular=False)
        found = strided_convolution(_f32(params), jnp.asarray(x[:, :width]))
        np.testing.assert_allclose(found, plain, atol=1e-4)


def _f32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


@pytest.mark.parametrize(("inputs", "outputs"), [(480, 300), (32, 80), (64, 16), (7, 7)])
def test_pooling_matrix_is_the_adaptive_average_pool(inputs, outputs):
    x = np.random.default_rng(0).normal(size=(2, inputs))
    expected = _oracles.adaptive_pool(x, outputs)
    np.testing.assert_allclose(x @ pooling_matrix(inputs, outputs), expected, atol=1e-12)


def test_long_texts_are_cut_and_padding_has_no_gradient():
    table = jnp.asarray(np.random.default_rng(0).normal(size=(V, 4)), jnp.float32)
    texts = [np.arange(9), np.array([5]), np.arange(0)]
    words, count = word_vectors(table, pack(texts, 12, padding=2), LENGTH)
    np.testing.assert_array_equal(count, [LENGTH, 1, 0])
    np.testing.assert_array_equal(words[0], table[:LENGTH])
    np.testing.assert_array_equal(words[1], np.concatenate([table[5:6], np.zeros((5, 4))]))
    np.testing.assert_array_equal(words[2], np.zeros((LENGTH, 4)))
    sums = jax.grad(lambda t: jnp.sum(word_vectors(t, pack(texts, 12), LENGTH)[0]))(table)
    np.testing.assert_array_equal(sums[:, 0], [1, 1, 1, 1, 1, 2] + [0] * (V - 6))


@pytest.mark.parametrize("dim", [60, 66])
def test_dim_must_suit_the_convolutions(dim):
    with pytest.raises(ValueError, match=f"dim={dim}.*multiple of 4, at least 64"):
        InceptionQueries(V, dim)
