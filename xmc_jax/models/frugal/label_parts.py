"""Parts of the frugal models on dense text vectors: TF-IDF sums, residual block, attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xmc_jax.contracts import TokenBatch
from xmc_jax.models.encoders.bag import sum_of_spans, text_spans
from xmc_jax.models.frugal.spectral import init_spectral, spectral_linear
from xmc_jax.models.layers import dropout, gelu

Params = dict[str, Any]
Moving = dict[str, Any]


def tfidf_sums(table: jax.Array, idf: jax.Array, tokens: TokenBatch) -> jax.Array:
    """TF-IDF weighted sums of word vectors: ``z_b = sum_t w_bt E_t``.

    ``w_bt = n_bt idf_t / |n_b idf|_2`` over the distinct tokens t of text b, ``n_bt`` how often t
    occurs: a row of the L2-normalised TF-IDF matrix, so that z_b = (row b) E. Astec, DECAF and
    ECLARE read such rows.

    Args:
      table: E ``[V, D]``.
      idf: ``[V]`` >= 0; a constant.
      tokens: packed texts; the tokens of a text lie side by side in its row.

    Returns:
      ``[B, D]``; zeros where ``text_segment`` is 0 or all of a text's idf are 0.
    """
    start, count = text_spans(tokens)
    ids = jnp.asarray(tokens.ids).astype(jnp.int32)
    weights = _tfidf_weights(ids, jnp.asarray(tokens.segment_ids), jax.lax.stop_gradient(idf))
    return sum_of_spans(table, ids.reshape(-1), start, count, weights.reshape(-1))


def _tfidf_weights(ids: jax.Array, segment_ids: jax.Array, idf: jax.Array) -> jax.Array:
    """``[R, T]``: a token's share of its text's row, one share for each time that it occurs."""
    idf = jnp.take(idf, ids, mode="clip")  # [R, T]
    together = segment_ids[:, :, None] == segment_ids[:, None, :]  # [R, T, T]
    times = jnp.sum(together & (ids[:, :, None] == ids[:, None, :]), axis=2, dtype=idf.dtype)
    # sum over distinct t of (n_t idf_t)^2 = sum over occurrences of n_t idf_t^2
    square = jnp.sum(jnp.where(together, (times * idf**2)[:, None, :], 0), axis=2)
    return jnp.where(square > 0, idf * jax.lax.rsqrt(jnp.where(square > 0, square, 1)), 0)


def weighted_sums(table: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    """``z_p = sum_t w_pt E[id_pt]``, without an array ``[P, T, D]``.

    Args:
      table: E ``[V, D]``.
      ids: ``[P, T]`` integers.
      weights: ``[P, T]`` constants; 0 = nothing there. The loop ends at the last place that any row
        uses, so that rows should have their zeros at the end.

    Returns:
      ``[P, D]``, differentiable in ``table``.
    """
    rows, length = ids.shape
    place = jnp.arange(1, length + 1, dtype=jnp.int32)
    count = jnp.max(jnp.where(jnp.asarray(weights) != 0, place, 0), axis=1, initial=0)  # [P]
    start = length * jnp.arange(rows, dtype=jnp.int32)
    flat_weights = jnp.asarray(weights).reshape(-1).astype(table.dtype)
    return sum_of_spans(table, jnp.asarray(ids).reshape(-1), start, count, flat_weights)


def init_block(key: jax.Array, dim: int) -> tuple[Params, jax.Array]:
    """Parameters of :func:`residual_block`: R the identity, a = b = 0; and R's direction."""
    params, direction = init_spectral(key, dim, dim, identity=True)
    return {"linear": params, "a": jnp.zeros(()), "b": jnp.zeros(())}, direction


def residual_block(
    params: Params,
    direction: jax.Array,
    x: jax.Array,
    rate: float,
    key: jax.Array | None,
    *,
    train: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """``sigmoid(a) R(dropout(gelu(x))) + sigmoid(b) x`` (DECAF's block; appendix A.3 of Gandalf).

    R is a linear map of spectral norm 1. DECAF has a ReLU where the appendix has a GELU; the
    sigmoids are DECAF's, the appendix writes alpha and beta.

    Args:
      params: ``{"linear": {"kernel", "bias"}, "a": [], "b": []}``.
      direction: of R.
      x: ``[B, D]``.
      rate: of the dropout.
      key: of the dropout; None = none.
      train: whether R's direction takes a step.

    Returns:
      ``[B, D]`` and the direction to keep.
    """
    inner = dropout(gelu(x), rate, key)
    inner, direction = spectral_linear(params["linear"], direction, inner, train=train)
    return jax.nn.sigmoid(params["a"]) * inner + jax.nn.sigmoid(params["b"]) * x, direction


def init_attention(key: jax.Array, dim: int, parts: int) -> tuple[Params, Moving]:
    """Parameters of :func:`attend`, Xavier uniform, and its two directions."""
    mix_key, score_key = jax.random.split(key)
    mix, mix_direction = init_spectral(mix_key, dim, dim)
    score, score_direction = init_spectral(score_key, dim * parts, parts)
    params = {"mix": mix, "score": {"kernel": score["kernel"]}}
    return params, {"mix": mix_direction, "score": score_direction}


def attend(
    params: Params,
    moving: Moving,
    parts: list[jax.Array | None],
    rate: float,
    key: jax.Array | None,
    *,
    train: bool = False,
) -> tuple[jax.Array, Moving]:
    """Convex combination of the parts of a label vector: ``w = sum_k alpha_k u_k`` (ECLARE).

    ``alpha = softmax(S [T relu(u_1); T relu(u_2); ...])``, T ``[D, D]`` with a bias and S
    ``[kD, k]`` without one, both of spectral norm 1; dropout on u before the ReLU.

    Args:
      params: of :func:`init_attention`, for k parts.
      moving: directions of T and S.
      parts: k arrays ``[P, D]``; None = not there: weight 0, and T relu(u) counts as 0.
      rate: of the dropout.
      key: of the dropout; None = none.
      train: whether the directions take a step.

    Returns:
      ``[P, D]`` and the directions to keep.
    """
    present = jnp.array([part is not None for part in parts])
    some = next(part for part in parts if part is not None)
    stacked = jnp.stack([jnp.zeros_like(some) if u is None else u for u in parts], axis=1)
    mixed = jax.nn.relu(dropout(stacked, rate, key))  # [P, k, D]
    mixed, mix = spectral_linear(params["mix"], moving["mix"], mixed, train=train)
    mixed = jnp.where(present[:, None], mixed, 0).reshape(len(some), -1)  # [P, k D]
    logits, score = spectral_linear(params["score"], moving["score"], mixed, train=train)
    alpha = jax.nn.softmax(logits, axis=1, where=present)  # [P, k]
    return jnp.einsum("pk,pkd->pd", alpha, stacked), {"mix": mix, "score": score}
