"""Batch normalisation against NumPy."""

from __future__ import annotations

import _oracles
import jax
import jax.numpy as jnp
import numpy as np

from xmc_jax.models.frugal.batch_norm import batch_norm, init_batch_norm


def setting(dtype=np.float32):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)
    params = {"scale": draw(3), "bias": draw(3)}
    moving = {"mean": draw(3), "variance": draw(3) ** 2 + 1}
    return params, moving, 2 * draw(5, 4, 3) + 1, np.array([True, False, True, True, False])


def test_equals_numpy_and_sees_no_empty_slot():
    params, moving, x, filled = setting()
    for train in (False, True):
        y, kept = batch_norm(params, moving, x, filled, train=train)
        expected = _oracles.batch_norm(*map(_oracles.float64, (params, moving, x)), filled, train)
        np.testing.assert_allclose(y, expected[0], atol=1e-5)
        for name in moving:
            np.testing.assert_allclose(kept[name], expected[1][name], atol=1e-5)
    other = np.where(filled[:, None, None], x, 1e6)
    again, same = batch_norm(params, moving, other, filled, train=True)
    np.testing.assert_allclose(again[filled], y[filled], atol=1e-5)
    for name in moving:
        np.testing.assert_allclose(same[name], kept[name], atol=1e-5)


def test_running_statistics_come_to_the_batchs():
    params, moving = init_batch_norm(3)
    _, _, x, filled = setting()
    step = jax.jit(lambda moving: batch_norm(params, moving, x, filled, train=True))
    for _ in range(200):
        y, moving = step(moving)
    seen = x[filled].reshape(-1, 3)
    np.testing.assert_allclose(moving["mean"], seen.mean(0), rtol=1e-4)
    np.testing.assert_allclose(moving["variance"], seen.var(0, ddof=1), rtol=1e-4)
    later, kept = batch_norm(params, moving, x, filled)
    np.testing.assert_allclose(later, y * np.sqrt(11 / 12), rtol=1e-3, atol=1e-4)
    assert kept is moving


def test_without_a_text_the_statistics_stay():
    params, moving, x, filled = setting()
    y, kept = batch_norm(params, moving, x, np.zeros_like(filled), train=True)
    assert np.isfinite(y).all()
    jax.tree.map(np.testing.assert_array_equal, kept, moving)


def test_gradient_equals_finite_differences():
    params, moving, x, filled = setting(np.float64)
    weight = np.random.default_rng(1).normal(size=x.shape) * filled[:, None, None]
    tangent = np.random.default_rng(2).normal(size=x.shape)
    with jax.enable_x64(True):

        def loss(params, x):
            y, kept = batch_norm(params, moving, x, filled, train=True)
            return jnp.sum(weight * y) + 0 * jnp.sum(kept["mean"])

        gradients = jax.grad(loss, argnums=(0, 1))(params, x)
    of_params, of_x = jax.tree.map(np.asarray, gradients)
    value = lambda params, x: np.sum(
        weight * _oracles.batch_norm(params, moving, x, filled, True)[0]
    )
    expected = (value(params, x + 1e-5 * tangent) - value(params, x - 1e-5 * tangent)) / 2e-5
    np.testing.assert_allclose(np.sum(of_x * tangent), expected, rtol=1e-6)
    normalised = value({"scale": 1.0, "bias": 0.0}, x)
    np.testing.assert_allclose(np.sum(of_params["scale"]), normalised, rtol=1e-6)
    np.testing.assert_allclose(of_params["bias"], weight.sum((0, 1)), rtol=1e-6)
