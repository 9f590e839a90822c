"""Spectral normalisation against NumPy's singular values."""

from __future__ import annotations

import _oracles
import jax
import jax.numpy as jnp
import numpy as np

from xmc_jax.models.frugal.spectral import init_spectral, spectral_linear


def layer(inputs, outputs):
    params, direction = init_spectral(jax.random.key(0), inputs, outputs)
    params["bias"] = jax.random.normal(jax.random.key(1), (outputs,))
    return params, direction


def test_equals_numpy_in_training_and_after():
    params, direction = layer(7, 5)
    x = np.random.default_rng(0).normal(size=(2, 3, 7)).astype(np.float32)
    for train in (False, True):
        y, kept = spectral_linear(params, direction, x, train=train)
        expected = _oracles.spectral_linear(
            _oracles.float64(params), _oracles.float64(direction), x, train
        )
        np.testing.assert_allclose(y, expected[0], atol=1e-5)
        np.testing.assert_allclose(kept, expected[1], atol=1e-5)
        assert train or kept is direction or np.array_equal(kept, direction)
    plain = {"kernel": params["kernel"]}
    np.testing.assert_allclose(
        spectral_linear(plain, direction, x)[0] + params["bias"],
        spectral_linear(params, direction, x)[0],
        atol=1e-5,
    )


def test_norm_is_one_after_some_iterations_whatever_the_scale():
    step = jax.jit(lambda params, u: spectral_linear(params, u, jnp.eye(12), train=True))
    for scale in (1e-3, 1.0, 1e3):
        params, direction = init_spectral(jax.random.key(2), 12, 20)
        params["kernel"] = scale * params["kernel"]
        for _ in range(60):
            y, direction = step(params, direction)
        norm = np.linalg.svd(y, compute_uv=False)[0]
        assert 1 - 1e-5 < norm < 1 + 1e-3
        np.testing.assert_allclose(np.linalg.norm(direction), 1, rtol=1e-5)


def test_starts_as_the_identity_if_told():
    params, direction = init_spectral(jax.random.key(0), 6, 6, identity=True)
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    np.testing.assert_allclose(spectral_linear(params, direction, x, train=True)[0], x, atol=1e-6)


def test_gradient_is_that_of_the_kernel_over_its_norm():
    """Finite differences of ``x W / svd(W)[0]``, at the converged direction."""
    rng = np.random.default_rng(3)
    kernel, x, weight = rng.normal(size=(6, 4)), rng.normal(size=(5, 6)), rng.normal(size=(5, 4))
    u = np.linalg.svd(kernel)[2][0]

    def plain(kernel):
        return np.sum(weight * (x @ kernel / np.linalg.svd(kernel, compute_uv=False)[0]))

    with jax.enable_x64(True):

        def loss(kernel, u):
            y, kept = spectral_linear({"kernel": kernel}, u, jnp.asarray(x), train=True)
            return jnp.sum(weight * y) + jnp.sum(kept)  # no gradient reaches the direction

        gradients = jax.grad(loss, argnums=(0, 1))(jnp.asarray(kernel), jnp.asarray(u))
    gradient, of_direction = map(np.asarray, gradients)
    for _ in range(5):
        step = rng.normal(size=kernel.shape)
        expected = (plain(kernel + 1e-5 * step) - plain(kernel - 1e-5 * step)) / 2e-5
        np.testing.assert_allclose(np.sum(gradient * step), expected, rtol=1e-6)
    np.testing.assert_array_equal(of_direction, np.zeros(4))


def test_a_kernel_of_zeros_is_no_nan():
    params, direction = layer(4, 3)
    params["kernel"] = jnp.zeros((4, 3))
    loss = lambda p: jnp.sum(spectral_linear(p, direction, jnp.ones((2, 4)), train=True)[0])
    value, gradient = jax.value_and_grad(loss)(params)
    assert np.isfinite(value) and np.isfinite(gradient["kernel"]).all()
