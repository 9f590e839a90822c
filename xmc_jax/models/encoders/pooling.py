"""From one vector a token to one vector a text, for packed rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xmc_jax.contracts import TokenBatch


def mean_pool(hidden: jax.Array, tokens: TokenBatch, num_segments: int) -> jax.Array:
    """Mean over the tokens of each text, special tokens included.

    ``v_b = sum_t [segment_t = text_segment_b] h_t / count_b`` over row ``text_row_b``.

    Args:
      hidden: ``[R, T, H]``.
      tokens: the batch that ``hidden`` was made of.
      num_segments: the most texts a row can hold.

    Returns:
      ``[B, H]`` float32 (float64 stays). Zeros where ``text_segment`` is 0 or the row has no such
      segment; NaN where ``text_segment > num_segments``, so that training stops there.

    Example:
      >>> import numpy as np
      >>> batch = TokenBatch(np.zeros((1, 3)), np.array([[1, 1, 2]]), None, np.zeros(2, int),
      ...                    np.array([2, 1]))
      >>> mean_pool(jnp.array([[[1.0], [3.0], [5.0]]]), batch, 2).tolist()
      [[5.0], [2.0]]
    """
    member = _membership(tokens.segment_ids, num_segments).astype(hidden.dtype)  # [R, S, T]
    accumulator = jnp.promote_types(hidden.dtype, jnp.float32)
    counts = jnp.sum(member, axis=-1, keepdims=True, dtype=accumulator)  # [R, S, 1]
    sums = jnp.einsum("rst,rth->rsh", member, hidden, preferred_element_type=accumulator)
    return _take_texts(sums / jnp.maximum(counts, 1), tokens)


def cls_pool(hidden: jax.Array, tokens: TokenBatch, num_segments: int) -> jax.Array:
    """The vector of each text's first token.

    Args:
      hidden: ``[R, T, H]``.
      tokens: the batch that ``hidden`` was made of.
      num_segments: the most texts a row can hold.

    Returns:
      ``[B, H]`` as in :func:`mean_pool`, zeros and NaN in the same places.
    """
    member = _membership(tokens.segment_ids, num_segments)  # [R, S, T]
    first = jnp.argmax(member, axis=-1)  # [R, S]
    vectors = jnp.take_along_axis(hidden, first[..., None], axis=1, mode="clip")  # [R, S, H]
    vectors = jnp.where(jnp.any(member, axis=-1)[..., None], vectors, 0)
    return _take_texts(vectors.astype(jnp.promote_types(hidden.dtype, jnp.float32)), tokens)


def _membership(segment_ids: jax.Array, num_segments: int) -> jax.Array:
    """``[R, S, T]`` True where token t of row r belongs to segment s + 1."""
    numbers = jnp.arange(1, num_segments + 1, dtype=jnp.int32)
    return jnp.asarray(segment_ids).astype(jnp.int32)[:, None, :] == numbers[None, :, None]


def _take_texts(vectors: jax.Array, tokens: TokenBatch) -> jax.Array:
    """Puts segment vectors ``[R, S, H]`` into the order of the texts ``[B, H]``."""
    rows, segments, dim = vectors.shape
    row = jnp.asarray(tokens.text_row).astype(jnp.int32)
    segment = jnp.asarray(tokens.text_segment).astype(jnp.int32)
    inside = (segment > 0) & (segment <= segments)
    index = jnp.where(inside, row * segments + segment - 1, rows * segments)  # past the end: nan
    taken = jnp.take(vectors.reshape(-1, dim), index, axis=0, mode="fill", fill_value=jnp.nan)
    return jnp.where((segment > 0)[:, None], taken, 0)
