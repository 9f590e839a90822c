"""Batch normalisation of channels-last maps, with running statistics beside the parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Arrays = dict[str, jax.Array]
MOMENTUM = 0.1  # share of a batch in the running statistics
EPS = 1e-5


def init_batch_norm(channels: int) -> tuple[Arrays, Arrays]:
    """Scale 1 and bias 0, ``[C]``; running mean 0 and variance 1, ``[C]``."""
    ones, zeros = jnp.ones(channels, jnp.float32), jnp.zeros(channels, jnp.float32)
    return {"scale": ones, "bias": zeros}, {"mean": zeros, "variance": ones}


def batch_norm(
    params: Arrays, moving: Arrays, x: jax.Array, filled: jax.Array, *, train: bool = False
) -> tuple[jax.Array, Arrays]:
    """``scale (x - mean) / sqrt(variance + eps) + bias``, a mean and a variance a channel.

    In training they are the batch's, over all positions of the texts that are there, and the
    running ones move by 0.1 towards them (the variance's there with n - 1 in place of n, as in
    PyTorch). Otherwise they are the running ones.

    Args:
      params: scale and bias ``[C]``.
      moving: running mean and variance ``[C]``.
      x: ``[B, W, C]``.
      filled: ``[B]`` bool, False = an empty slot of the batch, which no statistics see.
      train: use and collect the batch's statistics.

    Returns:
      ``[B, W, C]`` and the running statistics to keep; without a text they stay.
    """
    mean, variance = moving["mean"], moving["variance"]
    if train:
        filled = filled[:, None, None]
        count = jnp.sum(filled, dtype=x.dtype) * x.shape[1]
        mean = jnp.sum(jnp.where(filled, x, 0), axis=(0, 1)) / jnp.maximum(count, 1)
        square = jnp.sum(jnp.where(filled, jnp.square(x - mean), 0), axis=(0, 1))
        variance = square / jnp.maximum(count, 1)
        unbiased = square / jnp.maximum(count - 1, 1)
        share = jnp.where(count > 0, MOMENTUM, 0)
        move = lambda old, new: old + share * (jax.lax.stop_gradient(new) - old)
        moving = {
            "mean": move(moving["mean"], mean),
            "variance": move(moving["variance"], unbiased),
        }
    scale = params["scale"] * jax.lax.rsqrt(variance + EPS)
    return x * scale + (params["bias"] - mean * scale), moving
