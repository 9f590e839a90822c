"""Query encoder of Astec, DECAF and ECLARE: a bag of weighted word vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from xmc_jax.contracts import Side, TokenBatch
from xmc_jax.models.encoders.padded import padded_batch
from xmc_jax.models.frugal import label_parts
from xmc_jax.models.layers import dropout, require_key

Params = dict[str, Any]
Moving = dict[str, Any]


@dataclass(frozen=True)
class BagQueries:
    """Query encoder of Astec, DECAF and ECLARE: a TF-IDF sum of word vectors, a residual block.

    ``x = dropout(sum_t w_t E_t)``, see `label_parts.tfidf_sums`; then one block for each of the two
    tasks, ``sigmoid(a) R(dropout(gelu(x))) + sigmoid(b) x``. Parameters: ``{"meta": block,
    "extreme": block}``; moving: R's direction in each.

    Attributes:
      vocab_size: V, rows of the shared token table.
      dim: D.
      dropout: rate of the dropouts, in training only.
    """

    vocab_size: int
    dim: int = 300
    dropout: float = 0.2
    max_segments: ClassVar[int] = 255
    shared: ClassVar[bool] = True

    def init(self, key: jax.Array) -> tuple[Params, Moving]:
        """Draws parameters, without the token table, and moving values."""
        keys = jax.random.split(key)
        meta, meta_direction = label_parts.init_block(keys[0], self.dim)
        extreme, extreme_direction = label_parts.init_block(keys[1], self.dim)
        moving = {"meta": meta_direction, "extreme": extreme_direction}
        return {"meta": meta, "extreme": extreme}, moving

    def apply(
        self,
        params: Params,
        table: jax.Array,
        idf: jax.Array,
        tokens: TokenBatch,
        moving: Moving,
        *,
        key: jax.Array | None = None,
        train: bool = False,
        side: Side = "query",
    ) -> tuple[tuple[jax.Array, jax.Array], Moving]:
        """Meta and extreme features, each ``[B, D]``, and the moving values to keep.

        Args:
          params: see the class.
          table: ``[V, D]`` shared token table.
          idf: ``[V]``.
          tokens: packed texts.
          moving: see the class.
          key: for dropout; needed if and only if ``train``.
          train: dropout and power iterations, or not.
          side: not read.

        Returns:
          ``((meta, extreme), moving)``; features are zeros where ``text_segment`` is 0.

        Raises:
          ValueError: ``train=True`` without a key.
        """
        key = require_key(train, key)
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        x = dropout(label_parts.tfidf_sums(table, idf, tokens), self.dropout, keys[0])
        filled = (jnp.asarray(tokens.text_segment) > 0)[:, None]
        features, moved = {}, {}
        for name, block_key in zip(("meta", "extreme"), keys[1:]):
            features[name], moved[name] = label_parts.residual_block(
                params[name], moving[name], x, self.dropout, block_key, train=train
            )
        meta, extreme = (jnp.where(filled, features[name], 0) for name in ("meta", "extreme"))
        return (meta, extreme), moved

    def apply_padded(
        self,
        params: Params,
        table: jax.Array,
        idf: jax.Array,
        ids: jax.Array,
        mask: jax.Array,
        moving: Moving,
        side: Side = "query",
    ) -> tuple[tuple[jax.Array, jax.Array], Moving]:
        """The same of one text a row: see `xmc_jax.models.encoders.padded.padded_batch`."""
        return self.apply(params, table, idf, padded_batch(ids, mask), moving, side=side)
