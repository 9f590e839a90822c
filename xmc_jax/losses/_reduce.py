"""What all losses share: the masked inputs at the start and the reduction over rows at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

ReduceFn = Callable[..., jax.Array]


class Inputs(NamedTuple):
    """Scores and targets of one loss, all ``[..., P]``; masked entries are 0 in both."""

    scores: jax.Array
    targets: jax.Array
    where: jax.Array
    positive: jax.Array


def prepare(scores: jax.Array, targets: jax.Array, where: jax.Array | None) -> Inputs:
    """Checks shapes, widens 16-bit scores to float32 and takes the masked entries out.

    A masked score may be anything, NaN included: it is replaced here, before any arithmetic,
    because the gradient of ``where(mask, f(x), 0)`` is NaN where ``f`` has no finite derivative.
    """
    scores, targets = jnp.asarray(scores), jnp.asarray(targets)
    if scores.ndim == 0 or scores.shape != targets.shape:
        raise ValueError(
            f"scores have shape {scores.shape} and targets {targets.shape}; both must be the same "
            "[..., P], with the pool of labels last."
        )
    dtype = jnp.promote_types(scores.dtype, jnp.float32)
    if where is None:
        where = jnp.ones(scores.shape, bool)
    else:
        where = _broadcast("where", jnp.asarray(where).astype(bool), scores.shape)
    scores = jnp.where(where, scores.astype(dtype), 0)
    targets = jnp.where(where, targets.astype(dtype), 0)
    return Inputs(scores, targets, where, targets > 0)


@jax.custom_jvp
def replace(x: jax.Array, condition: jax.Array, value: jax.Array | float) -> jax.Array:
    """``x``, with ``value`` where ``condition``; its gradient is that of ``x`` everywhere.

    For limits at infinite scores: there arithmetic such as inf - inf has no value, but the gradient
    of ``x`` is the right one.
    """
    return jnp.where(condition, value, x)


@replace.defjvp
def _replace_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return replace(*primals), tangents[0]


def reduce_rows(
    rows: jax.Array,
    counted: jax.Array,
    weights: jax.Array | None,
    reduce_fn: ReduceFn | None,
) -> jax.Array:
    """Weighs the rows and reduces those that count; 0, with gradient 0, where none does.

    Args:
      rows: ``[...]`` loss of each row.
      counted: ``[...]`` boolean; a row that does not count is 0.
      weights: ``[...]`` weights >= 0, or None for 1.
      reduce_fn: None returns the weighted rows; ``jnp.mean`` is the weighted mean, sum(w * loss) /
        sum(w) over counted rows; any other function is called as ``reduce_fn(weighted_rows,
        where=counted)``.
    """
    rows = jnp.where(counted, rows, 0)
    mass = counted.astype(rows.dtype)
    if weights is not None:
        weights = _broadcast("weights", jnp.asarray(weights).astype(rows.dtype), rows.shape)
        mass = jnp.where(counted, weights, 0)
        rows = mass * jnp.where((mass == 0) & jnp.isinf(rows), 0, rows)  # 0 * inf is NaN
    if reduce_fn is None:
        return rows
    if reduce_fn is jnp.mean:
        total, count = jnp.sum(rows), jnp.sum(mass)
        return total / jnp.where(count > 0, count, 1)
    # With no counted row all rows are the constant 0: they are handed over instead of an empty set,
    # for which most reductions have neither a value nor a gradient.
    none = ~jnp.any(counted)
    return jnp.where(none, 0, reduce_fn(rows, where=counted | none))


def _broadcast(name: str, value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    try:
        return jnp.broadcast_to(value, shape)
    except ValueError:
        raise ValueError(
            f"{name} has shape {value.shape}, which does not broadcast to {shape}."
        ) from None
