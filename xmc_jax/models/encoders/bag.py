"""The frugal encoder: a bag of token embeddings and one residual block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from xmc_jax.contracts import Side, TokenBatch
from xmc_jax.models.encoders.padded import padded_batch
from xmc_jax.models.layers import dropout, gelu, init_linear, linear, require_key

Params = dict[str, Any]
State = tuple[jax.Array, jax.Array]  # of a loop: the place in the texts, the sums so far
Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]


@dataclass(frozen=True)
class BagEncoder:
    """Mean of token embeddings, then ``x + dropout(gelu(W x + b))``.

    ``x = dropout(mean_t E[id_t])`` over all tokens of a text. After SiameseXML and Astec, whose
    encoders are a sum of word vectors and a residual block. Parameters: ``{"tokens": {"embedding":
    [V, H]}, "block": {"kernel": [H, H], "bias": [H]}}``. ``apply`` never looks at ``vocab_size``: a
    caller may pass only the table rows that a batch uses, with ids renumbered to match.

    Attributes:
      vocab_size: V, rows of the token table.
      dim: H.
      dropout: rate of both dropouts, in training only.
      token_dropout: share of the tokens that a text loses in training, each by itself.
    """

    vocab_size: int
    dim: int
    dropout: float = 0.2
    token_dropout: float = 0.0
    max_segments: ClassVar[int] = 255  # texts in a row: what uint8 segment ids can tell apart
    shared: ClassVar[bool] = True

    def init(self, key: jax.Array) -> Params:
        """Draws parameters: tokens N(0, 1), block Xavier uniform, bias 0."""
        token_key, block_key = jax.random.split(key)
        return {
            "tokens": {
                "embedding": jax.random.normal(token_key, (self.vocab_size, self.dim), jnp.float32)
            },
            "block": init_linear(block_key, self.dim, self.dim),
        }

    def apply(
        self,
        params: Params,
        tokens: TokenBatch,
        *,
        key: jax.Array | None = None,
        train: bool = False,
        side: Side = "query",
    ) -> jax.Array:
        """One vector a text.

        Args:
          params: see the class.
          tokens: packed texts; the tokens of a text lie side by side in its row.
          key: for dropout; needed if and only if ``train``.
          train: dropout or not.
          side: not read: queries and labels are the same here.

        Returns:
          ``[B, H]`` float32; zeros where ``text_segment`` is 0.

        Raises:
          ValueError: ``train=True`` without a key.
        """
        key = require_key(train, key)
        token_key, mean_key, block_key = (None,) * 3 if key is None else jax.random.split(key, 3)
        start, count = text_spans(tokens)
        table = params["tokens"]["embedding"]
        ids = jnp.asarray(tokens.ids).astype(jnp.int32).reshape(-1)
        if token_key is not None and self.token_dropout:
            kept = jax.random.bernoulli(token_key, 1 - self.token_dropout, ids.shape)
            ids = jnp.where(kept, ids, table.shape[0])
        total = sum_of_spans(table, ids, start, count)  # [B, H]
        if train:
            total = total / (1 - self.token_dropout)
        x = dropout(total / jnp.maximum(count, 1)[:, None], self.dropout, mean_key)
        x = x + dropout(gelu(linear(params["block"], x)), self.dropout, block_key)
        return jnp.where((count > 0)[:, None], x, 0)  # an empty slot is not the bias either

    def apply_padded(
        self, params: Params, ids: jax.Array, mask: jax.Array, side: Side = "query"
    ) -> jax.Array:
        """The same of one text a row: see `xmc_jax.models.encoders.padded.padded_batch`."""
        return self.apply(params, padded_batch(ids, mask), side=side)

    def with_embeddings(self, params: Params, table: np.ndarray) -> Params:
        """Parameters whose token table is ``table [V, H]``, scaled to unit variance.

        Raises:
          ValueError: the table has another shape, or all its entries are equal or not finite.
        """
        table = np.asarray(table, np.float32)
        if table.shape != (self.vocab_size, self.dim):
            raise ValueError(
                f"token table of shape {table.shape} for an encoder of (vocab_size, dim) = "
                f"{(self.vocab_size, self.dim)}: build BagEncoder with the table's shape"
            )
        deviation = float(table.std(dtype=np.float64))
        if not 0 < deviation < np.inf:
            raise ValueError(
                f"token table with standard deviation {deviation}: expected finite, unequal entries"
            )
        return {**params, "tokens": {"embedding": jnp.asarray(table / np.float32(deviation))}}


def text_spans(tokens: TokenBatch) -> tuple[jax.Array, jax.Array]:
    """Where each text starts in the flattened rows, and its number of tokens; ``[B]`` each."""
    segment_ids = jnp.asarray(tokens.segment_ids)
    row = jnp.asarray(tokens.text_row).astype(jnp.int32)
    segment = jnp.asarray(tokens.text_segment).astype(jnp.int32)[:, None]
    mine = jnp.take(segment_ids, row, axis=0, mode="clip").astype(jnp.int32) == segment  # [B, T]
    mine &= segment > 0
    start = row * segment_ids.shape[1] + jnp.argmax(mine, axis=1).astype(jnp.int32)
    return start, jnp.sum(mine, axis=1, dtype=jnp.int32)


@jax.custom_vjp
def sum_of_spans(
    table: jax.Array,
    flat_ids: jax.Array,
    start: jax.Array,
    count: jax.Array,
    flat_weights: jax.Array | None = None,
) -> jax.Array:
    """Sums table rows over spans: ``s_b = sum_{j < count_b} w_(start_b + j) E[id_(start_b + j)]``.

    The loop runs over the place j in the text, all texts at once, to the longest text: no
    ``[tokens, H]`` array is made, forward or backward, which on a CPU is several times faster.

    Args:
      table: ``[V, H]``.
      flat_ids: ``[n]`` row numbers of the table; one past its end adds nothing.
      start, count: ``[B]`` int32.
      flat_weights: ``[n]`` factors w of the rows, constants; None = 1.

    Returns:
      ``[B, H]``, differentiable in ``table``.
    """
    unroll = 4

    def add(state: State) -> State:
        place, total = state
        for j in range(unroll):
            inside = place + j < count
            ids = jnp.where(inside, _ids_at(flat_ids, start + place + j), 0)
            inside &= ids < table.shape[0]
            rows = jnp.take(table, ids, axis=0, mode="clip")
            rows = _weighted(rows, flat_weights, start + place + j)
            total = total + jnp.where(inside[:, None], rows, 0)
        return place + unroll, total

    total = jnp.zeros((len(start), table.shape[1]), table.dtype)
    return _while_place_below(jnp.max(count, initial=0), add, total)


def _sum_forward(
    table: jax.Array,
    flat_ids: jax.Array,
    start: jax.Array,
    count: jax.Array,
    flat_weights: jax.Array | None = None,
) -> tuple[jax.Array, Residuals]:
    # An empty slice carries the table's type; its number of rows is static.
    like = jnp.zeros((table.shape[0], 0), table.dtype)
    total = sum_of_spans(table, flat_ids, start, count, flat_weights)
    return total, (like, flat_ids, start, count, flat_weights)


def _sum_backward(
    residuals: Residuals, gradient: jax.Array
) -> tuple[jax.Array, None, None, None, None]:
    like, flat_ids, start, count, flat_weights = residuals

    def scatter(state: State) -> State:
        place, total = state
        inside = place < count
        ids = jnp.where(inside, _ids_at(flat_ids, start + place), like.shape[0])  # past the end
        rows = _weighted(gradient, flat_weights, start + place)
        return place + 1, total.at[ids].add(rows, mode="drop")

    total = jnp.zeros((like.shape[0], gradient.shape[1]), like.dtype)
    return _while_place_below(jnp.max(count, initial=0), scatter, total), None, None, None, None


sum_of_spans.defvjp(_sum_forward, _sum_backward)


def _ids_at(flat_ids: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(flat_ids, index, axis=0, mode="clip").astype(jnp.int32)


def _weighted(rows: jax.Array, flat_weights: jax.Array | None, index: jax.Array) -> jax.Array:
    if flat_weights is None:
        return rows
    return rows * jnp.take(flat_weights, index, mode="clip")[:, None]


def _while_place_below(
    limit: jax.Array, body: Callable[[State], State], value: jax.Array
) -> jax.Array:
    return jax.lax.while_loop(lambda state: state[0] < limit, body, (jnp.int32(0), value))[1]
