"""Small functions that several models share: dropout, GELU, linear map, layer normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_LEVELS = 256  # dropout rates are multiples of 1/256: one random byte an entry


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Sets entries to zero at random and scales the others so that the mean stays.

    ``x * keep / p``, ``keep ~ Bernoulli(p)``, ``p = 1 - round(256 rate) / 256``.

    Args:
      x: any shape with at least one axis.
      rate: share of zeros in [0, 1), rounded to a multiple of 1/256.
      key: a key of ``jax.random``; None = return ``x`` as it is.

    Returns:
      An array like ``x``.
    """
    dropped = round(rate * _LEVELS)
    if key is None or dropped == 0:
        return x
    # A word of random bits is the costly part on a CPU (20 ns): it serves four entries.
    *lead, last = x.shape
    words = jax.random.bits(key, (*lead, -(-last // 4)), jnp.uint32)
    draws = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*lead, -1)[..., :last]
    return jnp.where(draws >= dropped, x * (_LEVELS / (_LEVELS - dropped)), jnp.zeros((), x.dtype))


def gelu(x: jax.Array) -> jax.Array:
    """``x Phi(x)`` with the exact normal distribution function, as BERT has it."""
    return jax.nn.gelu(x, approximate=False)


def init_linear(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    """Parameters of :func:`linear`: Xavier uniform kernel ``[inputs, outputs]``, bias 0."""
    kernel = jax.nn.initializers.xavier_uniform()(key, (inputs, outputs), jnp.float32)
    return {"kernel": kernel, "bias": jnp.zeros(outputs, jnp.float32)}


def linear(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """``x W + b`` in the type of ``x``: ``[..., inputs] -> [..., outputs]``."""
    return x @ params["kernel"].astype(x.dtype) + params["bias"].astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Normalises the last axis, ``scale (x - mean) / sqrt(var + eps) + bias``, in 32 bits or more.

    Args:
      x: ``[..., H]``.
      scale, bias: ``[H]``.
      eps: added to the variance.

    Returns:
      ``[..., H]`` in the wider type of ``x`` and ``scale``.
    """
    x = x.astype(jnp.promote_types(x.dtype, scale.dtype))
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + eps) * scale + bias


def require_key(train: bool, key: jax.Array | None) -> jax.Array | None:
    """Returns the key dropout is to use: None outside training.

    Raises:
      ValueError: ``train=True`` without a key.
    """
    if train and key is None:
        raise ValueError("train=True needs key=jax.random.key(...) for dropout; found key=None")
    return key if train else None
