"""Margin losses over the pairs of a positive and a negative of the same row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xmc_jax.losses._reduce import Inputs, ReduceFn, prepare, reduce_rows, replace


def triplet_loss(
    scores: jax.Array,
    targets: jax.Array,
    *,
    margin: float | jax.Array = 0.3,
    where: jax.Array | None = None,
    weights: jax.Array | None = None,
    reduce_fn: ReduceFn | None = jnp.mean,
) -> jax.Array:
    r"""Hinge on every pair of a positive and a negative of a row, averaged over the pairs.

    L_{Triplet} of the UniDEC preprint, section 2.1, the training objective of earlier dual
    encoders, with all pairs of the pool and no weighting. P_i are the positives, N_i the negatives
    of i:

    .. math::
      \ell_i = \frac{1}{|P_i| |N_i|} \sum_{p \in P_i} \sum_{n \in N_i} \max(0, m - s_{ip} + s_{in})

    Time and memory grow with P log P and P: the pairs are counted in one sorted row, never formed.

    Args:
      scores: ``[..., P]`` scores without temperature, usually cosines; the margin has their unit.
        16-bit scores are accumulated in float32.
      targets: ``[..., P]``; greater than 0 is a positive. The size of a soft target is not used.
      margin: the distance m by which a positive has to lead.
      where: boolean, broadcasts to ``[..., P]``; False = the label is not there.
      weights: ``[...]`` weights >= 0, one a row.
      reduce_fn: None for one value a row; ``jnp.mean`` divides by the number of counted rows (the
        sum of their weights); else called as ``reduce_fn(rows, where=counted)``.

    Returns:
      The reduced loss, or ``[...]`` rows. A row counts if it has a positive and a negative; else it
      gives 0. Infinite scores give the limit, possibly inf, with its gradient: -1 for the positive
      of an active pair, 1 for its negative, each divided by the number of pairs.

    Raises:
      ValueError: shapes of scores and targets differ, or where or weights do not broadcast.

    >>> import jax.numpy as jnp
    >>> from xmc_jax import losses
    >>> scores = jnp.array([[0.5, 0.5, 0.0]])
    >>> loss = losses.triplet_loss(scores, jnp.array([[1, 0, 0]]), margin=0.3)
    >>> print(f"{loss:.4f}")  # (0.3 + 0) / 2
    0.1500
    """
    inputs = prepare(scores, targets, where)
    negative = inputs.where & ~inputs.positive
    dtype = inputs.scores.dtype
    num_pairs = _count(inputs.positive, dtype) * _count(negative, dtype)  # [...]
    rows = _sum_of_hinges(inputs, negative, margin) / jnp.maximum(num_pairs, 1)
    return reduce_rows(rows, num_pairs > 0, weights, reduce_fn)


def _sum_of_hinges(inputs: Inputs, negative: jax.Array, margin: float | jax.Array) -> jax.Array:
    """Sum over pairs of ``max(0, s_n - t_p)`` with ``t_p = s_p - margin``, ``[...]``.

    A pair is active where t_p < s_n, so in the sorted row of all t_p and s_n a negative is in as
    many active pairs as there are positives before it, and a positive in as many as there are
    negatives after it. The sum is then linear in the sorted values, with those counts as
    coefficients.
    """
    lowest, highest = (
        jnp.min(inputs.scores, -1, keepdims=True, initial=jnp.inf, where=inputs.positive),
        jnp.max(inputs.scores, -1, keepdims=True, initial=-jnp.inf, where=negative),
    )
    # Each active pair adds one value and takes one away, so a shift cancels. With the lowest s_p no
    # value that takes part is larger than the largest hinge, whatever the scores are.
    shift = jax.lax.stop_gradient(jnp.where(jnp.isfinite(lowest), lowest, 0))
    values = inputs.scores - shift
    infinite = jnp.isinf(values)
    values = jnp.where(inputs.positive, values - margin, values)
    # 0 = negative, 1 = positive, 2 = masked. At equal values negatives come first: a pair just at
    # the margin is inactive, in any order of the pool. -1 = positive at infinity: it leads its like
    # by nothing, which is less than a margin above 0.
    rank = jnp.where(infinite & (margin > 0), -1, 1)
    kind = jnp.where(inputs.positive, rank, jnp.where(negative, 0, 2)).astype(jnp.int32)
    values, kind = jax.lax.sort((values, kind), dimension=-1, num_keys=2)
    positives, negatives = jnp.abs(kind) == 1, kind == 0
    positives_before = jnp.cumsum(positives, axis=-1)
    negatives_after = jnp.sum(negatives, axis=-1, keepdims=True) - jnp.cumsum(negatives, axis=-1)
    coefficients = jnp.where(negatives, positives_before, 0) - jnp.where(
        positives, negatives_after, 0
    )
    # Infinite values take part only in pairs with their like, else the largest hinge is infinite.
    values = replace(values, jnp.isinf(values), jnp.where(positives, -margin, 0))
    total = jnp.sum(coefficients * values, axis=-1)
    largest = jnp.squeeze(highest - lowest, -1)
    overflow = jnp.isnan(total) & jnp.isfinite(largest)
    return replace(total, overflow | (largest == jnp.inf), jnp.inf)


def _count(mask: jax.Array, dtype: jnp.dtype) -> jax.Array:
    # As a float: the number of pairs of a large pool does not fit 32-bit integers.
    return jnp.sum(mask, axis=-1).astype(dtype)
