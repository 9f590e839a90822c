"""UniDEC: one encoder shared by queries and labels, a dual-encoder head and a classifier head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from xmc_jax.contracts import Encoder, Side, TokenBatch
from xmc_jax.models.layers import dropout, init_linear, linear, require_key

Params = dict[str, Any]


def l2norm(x: jax.Array) -> jax.Array:
    """``x / |x|`` over the last axis; a row of zeros has value 0 and gradient 0.

    Args:
      x: ``[..., d]``.

    Returns:
      ``[..., d]`` unit rows.
    """
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    # The inner where keeps the derivative of rsqrt at 0 (infinite) out of the gradient.
    return jnp.where(square > 0, x * jax.lax.rsqrt(jnp.where(square > 0, square, 1)), 0)


@dataclass(frozen=True)
class UniDEC:
    """Encoder with the two heads of UniDEC (preprint, appendix C.1: g_1 and g_2).

    ``DE(x) = l2norm(dropout(tanh(W_1 v + b_1)))`` and ``CLF(x) = dropout(W_2 v + b_2)`` of the
    encoder's vector ``v``. Parameters: ``{"encoder": ..., "de_head": {"kernel": [H, d], "bias":
    [d]}, "clf_head": {...}}``.

    Attributes:
      encoder: any `xmc_jax.contracts.Encoder`.
      head_dim: size d of each head; None = no heads: ``DE = l2norm(v)``, ``CLF = v``.
      dropout: rate in both heads, in training only.
    """

    encoder: Encoder
    head_dim: int | None = None
    dropout: float = 0.1

    @property
    def dim(self) -> int:
        """Size of one head's output."""
        return self.encoder.dim if self.head_dim is None else self.head_dim

    def init(
        self, key: jax.Array, init_encoder: Callable[[jax.Array], Params] | None = None
    ) -> Params:
        """Draws parameters: the encoder's by ``init_encoder`` (default its own way); heads Xavier
        uniform, biases 0.
        """
        encoder_key, de_key, clf_key = jax.random.split(key, 3)
        params = {"encoder": (init_encoder or self.encoder.init)(encoder_key)}
        if self.head_dim is not None:
            params["de_head"] = init_linear(de_key, self.encoder.dim, self.head_dim)
            params["clf_head"] = init_linear(clf_key, self.encoder.dim, self.head_dim)
        return params

    def vectors(
        self,
        params: Params,
        tokens: TokenBatch,
        key: jax.Array | None = None,
        train: bool = False,
        side: Side = "both",
    ) -> jax.Array:
        """The encoder's vectors ``[B, H]``, one a text, which both heads take.

        Raises:
          ValueError: ``train=True`` without a key (here and in both heads), or texts of both sides
            for an encoder of two towers.
        """
        return self.encoder.apply(params["encoder"], tokens, key=key, train=train, side=side)

    def apply_padded(
        self, params: Params, ids: jax.Array, mask: jax.Array, side: Side = "query"
    ) -> jax.Array:
        """The encoder's vectors of one text a row: ids and mask ``[B, T]``."""
        return self.encoder.apply_padded(params["encoder"], ids, mask, side)

    def de(
        self, params: Params, vectors: jax.Array, key: jax.Array | None = None, train: bool = False
    ) -> jax.Array:
        """Dual-encoder embeddings ``[..., d]`` of ``vectors [..., H]``: unit rows."""
        key = require_key(train, key)
        if self.head_dim is None:
            return l2norm(vectors)
        return l2norm(dropout(jnp.tanh(linear(params["de_head"], vectors)), self.dropout, key))

    def clf(
        self, params: Params, vectors: jax.Array, key: jax.Array | None = None, train: bool = False
    ) -> jax.Array:
        """Classifier embeddings ``[..., d]`` of ``vectors [..., H]``: not normalised."""
        key = require_key(train, key)
        if self.head_dim is None:
            return vectors
        return dropout(linear(params["clf_head"], vectors), self.dropout, key)
