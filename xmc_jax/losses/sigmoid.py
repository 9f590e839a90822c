"""One-versus-all losses: every label of the pool is a question of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xmc_jax.losses._reduce import ReduceFn, prepare, reduce_rows, replace


def sigmoid_bce_loss(
    scores: jax.Array,
    targets: jax.Array,
    *,
    where: jax.Array | None = None,
    weights: jax.Array | None = None,
    reduce_fn: ReduceFn | None = jnp.mean,
) -> jax.Array:
    r"""Binary cross entropy of every label of the pool, summed over the row.

    The auxiliary classifier loss ("+ BCE") of the thesis, table 2.4; with targets from GLaS or
    Gandalf it takes soft values. For row i, over the labels l with where = True:

    .. math::
      \ell_i = -\sum_l y_{il} \log \sigma(s_{il}) + (1 - y_{il}) \log (1 - \sigma(s_{il}))

    Args:
      scores: ``[..., P]`` logits, without temperature; no unit. 16-bit scores are accumulated in
        float32.
      targets: ``[..., P]`` targets in [0, 1].
      where: boolean, broadcasts to ``[..., P]``; False = the label is not there.
      weights: ``[...]`` weights >= 0, one a row.
      reduce_fn: None for one value a row; ``jnp.mean`` divides by the number of counted rows (the
        sum of their weights), not by the size of the pool; else called as ``reduce_fn(rows,
        where=counted)``.

    Returns:
      The reduced loss, or ``[...]`` rows. A row without positives counts like any other; a row with
      ``where`` all False gives 0 and is not counted. Infinite scores give the limit, possibly inf,
      with its gradient, sigmoid(s) - y.

    Raises:
      ValueError: shapes of scores and targets differ, or where or weights do not broadcast.

    >>> import jax.numpy as jnp
    >>> from xmc_jax import losses
    >>> scores = jnp.array([[0.0, 0.0, 9.0]])
    >>> where = jnp.array([[True, True, False]])
    >>> loss = losses.sigmoid_bce_loss(scores, jnp.array([[1, 0, 0]]), where=where)
    >>> print(f"{loss:.4f}")  # 2 log 2
    1.3863
    """
    inputs = prepare(scores, targets, where)
    # softplus(s) - y s is the same at (-s, 1 - y). Turned so that y <= 1/2, a sure and correct
    # positive (s = 1e4, y = 1) is exactly 0 instead of a difference of two large numbers.
    flip = inputs.targets > 0.5
    s = jnp.where(flip, -inputs.scores, inputs.scores)
    y = jnp.where(flip, 1 - inputs.targets, inputs.targets)
    terms = jax.nn.softplus(s) - y * s
    # At infinite scores inf - y inf and 0 inf are NaN; the limit is there that of max(s, 0).
    terms = replace(terms, jnp.isnan(terms), jnp.maximum(s, 0))
    rows = jnp.sum(jnp.where(inputs.where, terms, 0), axis=-1)  # [...]
    return reduce_rows(rows, jnp.any(inputs.where, axis=-1), weights, reduce_fn)
