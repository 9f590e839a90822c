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
    """``x W + b`` in the type of ``x``: ``[..., inputs] -> [..., outputs]``; without a bias x W."""
    y = product(x, params["kernel"].astype(x.dtype))
    return _plus_bias(y, params["bias"].astype(x.dtype)) if "bias" in params else y


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """``x W``, ``[..., inputs] -> [..., outputs]``, with gradients that are faster on a CPU."""
    return _product(x.reshape(-1, x.shape[-1]), kernel).reshape(*x.shape[:-1], kernel.shape[1])


@jax.custom_vjp
def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return x @ kernel


def _product_backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients as they would come out anyway, but without a transposed copy of ``g``."""
    x, kernel = saved
    return g @ kernel.T, jnp.einsum("ni,no->io", x, g)


_product.defvjp(lambda x, kernel: (_product(x, kernel), (x, kernel)), _product_backward)


@jax.custom_vjp
def _plus_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    return x + bias


def _plus_bias_backward(_: None, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum over rows is a product, on all cores."""
    flat = g.reshape(-1, g.shape[-1])
    return g, jnp.ones(len(flat), g.dtype) @ flat


_plus_bias.defvjp(lambda x, bias: (_plus_bias(x, bias), None), _plus_bias_backward)


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
