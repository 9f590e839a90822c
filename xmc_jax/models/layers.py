"""Small functions that several models share: dropout, GELU, linear map, layer normalisation."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Sets entries to zero at random and scales the others so that the mean stays.

    ``x * keep / (1 - rate)``, ``keep ~ Bernoulli(1 - rate)``.

    Args:
      x: any shape.
      rate: share of zeros in [0, 1).
      key: a key of ``jax.random``; None = return ``x`` as it is.

    Returns:
      An array like ``x``.
    """
    if key is None or rate == 0:
        return x
    # On a CPU the bits of jax.random cost as much as a matrix product. A hash of the entry's number
    # is as good for a mask, and fuses with what comes before and after.
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    number = jax.lax.iota(jnp.uint32, x.size).reshape(x.shape)
    draws = _mix(_mix(number ^ first) ^ second)
    kept = draws >= jnp.uint32(rate * 2**32)
    return jnp.where(kept, x * (1 / (1 - rate)), jnp.zeros((), x.dtype))


def _mix(word: jax.Array) -> jax.Array:
    """A bijection of 32 bits of which every output bit depends on every input bit evenly.

    It is Wellons' lowbias32, a finaliser as in MurmurHash3 with constants of less bias.
    """
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * jnp.uint32(0x846CA68B)
    return word ^ (word >> 16)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """``x Phi(x)`` with the exact normal distribution function, as BERT has it."""
    return _gelu_and_slope(x)[0]


def _gelu_and_slope(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``x Phi(x)`` and its derivative ``Phi(x) + x phi(x)``, in 32 bits or more.

    By erf, as in PyTorch, not by erfc as in jax.nn.gelu, which takes four times as long on a CPU.
    The forward pass keeps the slope, so that the backward pass is one product.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    below = 0.5 * (1 + jax.lax.erf(wide * math.sqrt(0.5)))
    slope = below + wide * jnp.exp(-0.5 * jnp.square(wide)) * (1 / math.sqrt(2 * math.pi))
    return (wide * below).astype(x.dtype), slope.astype(x.dtype)


gelu.defvjp(_gelu_and_slope, lambda slope, gradient: (slope * gradient,))


def init_linear(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    """Parameters of :func:`linear`: Xavier uniform kernel ``[inputs, outputs]``, bias 0."""
    kernel = jax.nn.initializers.xavier_uniform()(key, (inputs, outputs), jnp.float32)
    return {"kernel": kernel, "bias": jnp.zeros(outputs, jnp.float32)}


def linear(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """``x W + b`` in the type of ``x``: ``[..., inputs] -> [..., outputs]``."""
    flat = x.reshape(-1, x.shape[-1])
    y = _affine(flat, params["kernel"].astype(x.dtype), params["bias"].astype(x.dtype))
    return y.reshape(*x.shape[:-1], -1)


@jax.custom_vjp
def _affine(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    return x @ kernel + bias


def _affine_backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients as they would come out anyway, but faster on a CPU.

    There is no transposed copy of ``g``, and its sum over rows is a product, on all cores.
    """
    x, kernel = saved
    bias = jnp.ones(len(g), g.dtype) @ g
    return g @ kernel.T, jnp.einsum("ni,no->io", x, g), bias


_affine.defvjp(lambda x, kernel, bias: (_affine(x, kernel, bias), (x, kernel)), _affine_backward)


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
