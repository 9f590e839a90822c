"""Multi-class losses over a pool with several positives a row: SupCon and decoupled softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xmc_jax.losses._reduce import ReduceFn, prepare, reduce_rows, replace


def supcon_loss(
    scores: jax.Array,
    targets: jax.Array,
    *,
    where: jax.Array | None = None,
    weights: jax.Array | None = None,
    reduce_fn: ReduceFn | None = jnp.mean,
    normalize: bool = True,
) -> jax.Array:
    r"""Softmax cross entropy of every positive of a row against the whole pool.

    L_{D,q2l} of the UniDEC preprint, section 3.1 (SupCon in thesis section 2.4.2), for row i:

    .. math::
      \ell_i = \frac{-1}{\sum_p y_{ip}} \sum_p y_{ip} \log \frac{\exp(s_{ip})}{\sum_l \exp(s_{il})}

    The preprint prints the sum over rows; here it is their mean. ``normalize=True`` is the PAL-N
    reduction of section 3; ``normalize=False`` is PAL, without the leading fraction.

    Args:
      scores: ``[..., P]`` scores, already divided by the temperature; no unit. 16-bit scores are
        accumulated in float32.
      targets: ``[..., P]`` targets in [0, 1]; greater than 0 is a positive, and a soft target
        weighs its positive's term.
      where: boolean, broadcasts to ``[..., P]``; False = the label is not there.
      weights: ``[...]`` weights >= 0, one a row.
      reduce_fn: None for one value a row; ``jnp.mean`` divides by the number of counted rows (the
        sum of their weights); else called as ``reduce_fn(rows, where=counted)``.
      normalize: divide a row by the sum of its positive targets.

    Returns:
      The reduced loss, or ``[...]`` rows. A row without positives gives 0 and is not counted.
      Infinite scores give the limit, possibly inf, with its gradient, softmax minus targets.

    Raises:
      ValueError: shapes of scores and targets differ, or where or weights do not broadcast.

    >>> import jax.numpy as jnp
    >>> from xmc_jax import losses
    >>> scores = jnp.array([[2.0, 1.0, 0.0]])
    >>> print(f"{losses.supcon_loss(scores, jnp.array([[1, 0, 0]])):.4f}")  # log(1 + 1/e + 1/e^2)
    0.4076
    """
    inputs = prepare(scores, targets, where)
    shift, log_total = _log_sum_exp(inputs.scores, inputs.where)  # [..., 1]
    losses = jnp.where(inputs.positive, log_total - _distance(inputs.scores, shift), 0)
    rows = _sum_positives(losses, inputs.targets, normalize)  # [...]
    return reduce_rows(rows, jnp.any(inputs.positive, axis=-1), weights, reduce_fn)


def decoupled_softmax_loss(
    scores: jax.Array,
    targets: jax.Array,
    *,
    where: jax.Array | None = None,
    weights: jax.Array | None = None,
    reduce_fn: ReduceFn | None = jnp.mean,
    normalize: bool = True,
) -> jax.Array:
    r"""Softmax cross entropy of every positive of a row against itself and the row's negatives.

    L_{DecoupledSoftmax} of the thesis, section 2.4.2: as `supcon_loss`, but the other positives of
    the row leave the denominator. N_i are the labels of the pool that are no positives of i:

    .. math::
      \ell_i = \frac{-1}{\sum_p y_{ip}} \sum_p y_{ip}
        \log \frac{\exp(s_{ip})}{\exp(s_{ip}) + \sum_{l \in N_i} \exp(s_{il})}

    The reduction is that of the preprint, section 3 (PAL-N), approximated over the pool as in
    section 3.1; ``normalize=False`` is PAL, without the leading fraction.

    Args:
      scores: ``[..., P]`` scores, already divided by the temperature; no unit. 16-bit scores are
        accumulated in float32.
      targets: ``[..., P]`` targets in [0, 1]; greater than 0 is a positive, and a soft target
        weighs its positive's term.
      where: boolean, broadcasts to ``[..., P]``; False = the label is not there.
      weights: ``[...]`` weights >= 0, one a row.
      reduce_fn: None for one value a row; ``jnp.mean`` divides by the number of counted rows (the
        sum of their weights); else called as ``reduce_fn(rows, where=counted)``.
      normalize: divide a row by the sum of its positive targets.

    Returns:
      The reduced loss, or ``[...]`` rows. A row without positives gives 0 and is not counted; one
      without negatives gives 0 with gradient 0 and is counted. Infinite scores give the limit,
      possibly inf, with its gradient; a negative at -inf adds nothing.

    Raises:
      ValueError: shapes of scores and targets differ, or where or weights do not broadcast.

    >>> import jax.numpy as jnp
    >>> from xmc_jax import losses
    >>> scores = jnp.array([[2.0, 1.0, 0.0]])
    >>> loss = losses.decoupled_softmax_loss(scores, jnp.array([[1, 1, 0]]))
    >>> print(f"{loss:.4f}")  # (log(1 + 1/e^2) + log(1 + 1/e)) / 2
    0.2201
    """
    inputs = prepare(scores, targets, where)
    negative = inputs.where & ~inputs.positive
    shift, log_negatives = _log_sum_exp(inputs.scores, negative)  # [..., 1]
    # -log(e^s / (e^s + N)) = softplus(log N - s): once over the row for N, then elementwise.
    margin = log_negatives - _distance(inputs.scores, shift)
    losses = jnp.where(inputs.positive, jax.nn.softplus(margin), 0)
    rows = _sum_positives(losses, inputs.targets, normalize)  # [...]
    return reduce_rows(rows, jnp.any(inputs.positive, axis=-1), weights, reduce_fn)


def _log_sum_exp(scores: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``(m, log sum exp(scores - m))`` over the mask, ``[..., 1]``; both -inf if it is empty.

    The shift m, the largest score, stays apart so that a caller subtracts it from scores before the
    logarithm is added: at scores of 1e4 a float32 sum of the two would keep three decimals.
    """
    shift = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf, where=mask)
    shift = jax.lax.stop_gradient(shift)
    exponents = jnp.where(mask, _distance(scores, shift), -jnp.inf)
    total = jnp.sum(jnp.exp(exponents), axis=-1, keepdims=True)
    # Twice where: log has no finite gradient at 0. `== 0`, so that NaN scores stay visible.
    log_total = jnp.log(jnp.where(total == 0, 1, total))
    return shift, jnp.where(total == 0, -jnp.inf, log_total)


def _distance(scores: jax.Array, shift: jax.Array) -> jax.Array:
    """``scores - shift``, which is 0 where both are the same infinity."""
    return replace(scores - shift, scores == shift, 0)


def _sum_positives(losses: jax.Array, targets: jax.Array, normalize: bool) -> jax.Array:
    rows = jnp.sum(targets * losses, axis=-1)
    if not normalize:
        return rows
    mass = jnp.sum(jnp.maximum(targets, 0), axis=-1)
    return rows / jnp.where(mass > 0, mass, 1)
