"""Dropout, layer normalisation and the rest of what models share."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xmc_jax.models import layers


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("shape", [(400, 96), (30, 20, 50), (3001,)])
def test_dropout_keeps_the_mean_and_drops_the_rate(rate, shape):
    y = np.asarray(layers.dropout(jnp.ones(shape), rate, jax.random.key(3)))
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / (1 - rate))}
    error = 4 * math.sqrt(rate * (1 - rate) / y.size)
    assert abs((y == 0).mean() - rate) < error
    # Neighbours in a row or a column are independent of each other, and so are two keys.
    other = np.asarray(layers.dropout(jnp.ones(shape), rate, jax.random.key(4)))
    assert abs(((y == 0) & (other == 0)).mean() - rate**2) < error
    if len(shape) == 2:
        zero = (y == 0) - (y == 0).mean()
        assert abs((zero[:, :-1] * zero[:, 1:]).mean()) < error
        assert abs((zero[:-1] * zero[1:]).mean()) < error


def test_dropout_without_key_or_rate_is_the_identity():
    x = jnp.arange(6.0)
    assert layers.dropout(x, 0.5, None) is x
    assert layers.dropout(x, 0.0, jax.random.key(0)) is x


def test_dropout_keeps_the_type_and_its_gradient_is_the_mask():
    x = jnp.full((5, 8), 2.0, jnp.bfloat16)
    assert layers.dropout(x, 0.25, jax.random.key(0)).dtype == jnp.bfloat16
    x, key = jnp.full((5, 8), 2.0), jax.random.key(1)
    gradient = jax.grad(lambda x: layers.dropout(x, 0.25, key).sum())(x)
    np.testing.assert_allclose(gradient * x, layers.dropout(x, 0.25, key))


def test_masks_of_many_keys_look_like_coins():
    """Chi square of the counts that 4,000 masks of 64 entries give each entry and each pair."""
    keys = jax.random.split(jax.random.key(0), 4000)
    masks = jax.vmap(lambda key: layers.dropout(jnp.ones(64), 0.25, key) == 0)(keys)
    masks = np.asarray(masks, np.float64)
    scaled = (masks - 0.25) / math.sqrt(0.25 * 0.75)
    assert np.abs(scaled.mean(0)).max() * math.sqrt(4000) < 4
    correlation = (scaled.T @ scaled / math.sqrt(4000))[np.triu_indices(64, 1)]  # N(0, 1) each
    assert abs(np.mean(correlation**2) - 1) < 5 * math.sqrt(2 / len(correlation))
    assert np.abs(correlation).max() < 5


def test_gelu_is_exact():
    x = np.linspace(-4, 4, 33)
    expected = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x]
    np.testing.assert_allclose(layers.gelu(jnp.asarray(x, jnp.float32)), expected, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-6)])
def test_gelu_and_linear_equal_their_plain_twins_gradients_too(dtype, tolerance):
    rng = np.random.default_rng(1)

    def loss(gelu, linear):
        def value(params, x):
            return jnp.sum(jnp.sin(gelu(linear(params, x))))

        return jax.value_and_grad(value, argnums=(0, 1))

    with jax.enable_x64(dtype == "float64"):
        draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
        params, x = {"kernel": draw(6, 5), "bias": draw(5)}, 2 * draw(4, 3, 6)
        found = loss(layers.gelu, layers.linear)(params, x)
        plain = loss(
            lambda x: jax.nn.gelu(x, approximate=False), lambda p, x: x @ p["kernel"] + p["bias"]
        )(params, x)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
            assert a.dtype == dtype
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))


def test_layer_norm_computes_in_32_bits():
    rng = np.random.default_rng(0)
    x, scale, bias = rng.normal(3, 2, (4, 16)), rng.normal(size=16), rng.normal(size=16)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    y = layers.layer_norm(*(jnp.asarray(v, jnp.float32) for v in (x, scale, bias)), 1e-6)
    np.testing.assert_allclose(y, expected * scale + bias, atol=2e-6)
    assert layers.layer_norm(jnp.ones(4, jnp.bfloat16), jnp.ones(4), jnp.ones(4), 1e-6).dtype == (
        jnp.float32
    )


def test_linear_starts_with_xavier_uniform_and_no_bias():
    params = layers.init_linear(jax.random.key(0), 40, 60)
    limit = math.sqrt(6 / (40 + 60))
    assert params["kernel"].shape == (40, 60)
    assert 0.9 * limit < np.abs(params["kernel"]).max() <= limit
    np.testing.assert_array_equal(params["bias"], np.zeros(60))
    params["bias"] = params["bias"] + 2.0
    np.testing.assert_allclose(
        layers.linear(params, jnp.ones((3, 40)))[0], params["kernel"].sum(0) + 2, rtol=1e-5
    )


def test_training_needs_a_key():
    key = jax.random.key(0)
    assert layers.require_key(True, key) is key
    assert layers.require_key(False, key) is None
    with pytest.raises(ValueError, match="train=True needs key"):
        layers.require_key(True, None)
