"""Linear maps whose largest singular value is 1 (spectral normalisation)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xmc_jax.models.layers import init_linear, linear

Linear = dict[str, jax.Array]
TINY = 1e-12  # below it a norm is taken to be this


def init_spectral(
    key: jax.Array, inputs: int, outputs: int, *, identity: bool = False
) -> tuple[Linear, jax.Array]:
    """Parameters and first direction of :func:`spectral_linear`.

    Args:
      key: a key of ``jax.random``.
      inputs, outputs: sizes of the map.
      identity: the kernel is the identity (ones on the diagonal), else Xavier uniform.

    Returns:
      ``{"kernel": [inputs, outputs], "bias": [outputs]}`` and a random unit vector ``[outputs]``.
    """
    kernel_key, direction_key = jax.random.split(key)
    params = init_linear(kernel_key, inputs, outputs)
    if identity:
        params["kernel"] = jnp.eye(inputs, outputs, dtype=jnp.float32)
    direction = jax.random.normal(direction_key, (outputs,), jnp.float32)
    return params, direction / jnp.linalg.norm(direction)


def spectral_linear(
    params: Linear, direction: jax.Array, x: jax.Array, *, train: bool = False
) -> tuple[jax.Array, jax.Array]:
    """``x W / sigma + b``, sigma the largest singular value of W: see :func:`unit_kernel`.

    Args:
      params: kernel ``[I, O]`` and bias ``[O]``; without a bias none is added.
      direction: u ``[O]``, kept from step to step.
      x: ``[..., I]``.
      train: iterate, or take u as it is.

    Returns:
      ``[..., O]`` and the direction to keep.
    """
    kernel, direction = unit_kernel(params["kernel"], direction, train=train)
    return linear({**params, "kernel": kernel}, x), direction


def unit_kernel(
    kernel: jax.Array, direction: jax.Array, *, train: bool = False
) -> tuple[jax.Array, jax.Array]:
    """``W / sigma``, sigma the largest singular value of W (Miyato et al., 2018).

    ``sigma = |W u|`` for a unit vector u that one power iteration a training step turns towards the
    first singular vector: ``u <- norm(W^T norm(W u))``. No gradient flows into u, so that the
    gradient of sigma is ``v u^T`` with ``v = norm(W u)``.

    Args:
      kernel: W ``[I, O]``.
      direction: u ``[O]``, kept from step to step.
      train: iterate, or take u as it is.

    Returns:
      ``[I, O]`` and the direction to keep.
    """
    direction = jax.lax.stop_gradient(direction)
    if train:
        fixed = jax.lax.stop_gradient(kernel)
        direction = _unit(fixed.T @ _unit(fixed @ direction))
    return kernel / jnp.maximum(_length(kernel @ direction), TINY), direction


def _length(x: jax.Array) -> jax.Array:
    """Euclidean norm with a finite gradient at 0."""
    return jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(x)), TINY**2))


def _unit(x: jax.Array) -> jax.Array:
    return x / _length(x)
