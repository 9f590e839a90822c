"""One padded text a row, as other software passes texts, in the form of a packed batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xmc_jax.contracts import TokenBatch


def padded_batch(ids: jax.Array, mask: jax.Array) -> TokenBatch:
    """The batch of one text a row.

    Args:
      ids: ``[B, T]`` token ids (``[B, T, H]`` hidden states where lower layers are frozen).
      mask: ``[B, T]``, 1 at a text's tokens, which lie side by side anywhere in the row: padding
        may be on the left or on the right.

    Raises:
      ValueError: unequal shapes.

    Example:
      >>> batch = padded_batch(jnp.array([[0, 7, 8], [0, 0, 0]]), jnp.array([[0, 1, 1], [0, 0, 0]]))
      >>> batch.positions.tolist(), batch.text_segment.tolist()
      ([[0, 0, 1], [0, 0, 0]], [1, 0])
    """
    ids, present = jnp.asarray(ids), jnp.asarray(mask) > 0
    if present.ndim != 2 or ids.shape[:2] != present.shape:
        raise ValueError(f"ids {ids.shape}, mask {present.shape}; expected both [B, T]")
    segment_ids = present.astype(jnp.int32)
    positions = jnp.maximum(jnp.cumsum(segment_ids, axis=1) - 1, 0)
    rows = jnp.arange(len(present), dtype=jnp.int32)
    return TokenBatch(ids, segment_ids, positions, rows, jnp.max(segment_ids, axis=1, initial=0))
