"""The pick-some-labels loss of UniDEC: one loss over a pool, from queries to labels and back."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from xmc_jax.losses._reduce import ReduceFn
from xmc_jax.losses.softmax import decoupled_softmax_loss


def pick_some_labels_loss(
    query_embeddings: jax.Array,
    label_embeddings: jax.Array,
    targets: jax.Array,
    *,
    temperature: float | jax.Array,
    label_loss: Callable[..., jax.Array] = decoupled_softmax_loss,
    where: jax.Array | None = None,
    query_weight: float | jax.Array = 0.5,
    reduce_fn: ReduceFn | None = jnp.mean,
) -> jax.Array:
    r"""Weighs a loss from queries to pool labels with the same loss from labels to queries.

    L_D of the UniDEC preprint, section 3.1, and L_C of section 3.2, which is the same formula on
    the classifier's embeddings. With S the scores, Y the targets and lambda the query weight:

    .. math::
      S = X Z^T / \tau, \qquad
      L = \lambda \, \ell(S, Y) + (1 - \lambda) \, \ell(S^T, Y^T)

    with L_{q2l} = l(S, Y) and L_{l2q} = l(S^T, Y^T). The preprint prints sums over queries and
    labels; the default is a mean a side, because a pool has about three labels a query and sums
    would let the label side drown the other. ``reduce_fn=jnp.sum`` gives the printed form.

    Args:
      query_embeddings: ``[..., Q, d]``; normalised for a dual encoder, raw for a classifier.
      label_embeddings: ``[..., P, d]`` embeddings or classifier rows of the pool.
      targets: ``[..., Q, P]`` targets in [0, 1], exact for the whole pool.
      temperature: tau > 0; divides the scores.
      label_loss: a loss of this package, called as
        ``label_loss(scores, targets, where=where, reduce_fn=reduce_fn)``; bind its options with
        ``functools.partial``.
      where: boolean, broadcasts to ``[..., Q, P]``; False = the pair is not there, in both
        directions.
      query_weight: lambda in [0, 1]. As a Python number 1.0 or 0.0 the other side is not computed.
      reduce_fn: reduces each side on its own, see `label_loss`. None, one value a row, is possible
        only where a single side is left, since the sides have different rows.

    Returns:
      The loss. Rows of either side that `label_loss` does not count (labels that came in as hard
      negatives only) do not enter that side's mean.

    Raises:
      ValueError: shapes do not fit; query_weight outside [0, 1] or temperature not above 0, as
        Python numbers; reduce_fn=None with two sides.

    >>> import jax.numpy as jnp
    >>> from xmc_jax import losses
    >>> queries, labels = jnp.eye(2), jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    >>> targets = jnp.array([[1, 0, 0], [0, 1, 0]])
    >>> print(f"{losses.pick_some_labels_loss(queries, labels, targets, temperature=0.5):.4f}")
    0.1832
    """
    static = isinstance(query_weight, int | float)
    if static and not 0 <= query_weight <= 1:
        raise ValueError(f"query_weight is {query_weight}; it must be in [0, 1].")
    if isinstance(temperature, int | float) and not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0.")
    scores = _scores(query_embeddings, label_embeddings, targets, temperature)  # [..., Q, P]
    if where is not None:
        where = jnp.broadcast_to(jnp.asarray(where), scores.shape)

    def query_side() -> jax.Array:
        return label_loss(scores, targets, where=where, reduce_fn=reduce_fn)

    def label_side() -> jax.Array:
        scores_t, targets_t = _transpose(scores), _transpose(targets)  # [..., P, Q]
        where_t = None if where is None else _transpose(where)
        return label_loss(scores_t, targets_t, where=where_t, reduce_fn=reduce_fn)

    if static and query_weight == 1:
        return query_side()
    if static and query_weight == 0:
        return label_side()
    if reduce_fn is None:
        raise ValueError(
            "reduce_fn=None returns one value a row, but the query side and the label side have "
            f"different rows; reduce them, or set query_weight (now {query_weight}) to 1.0 or 0.0."
        )
    return query_weight * query_side() + (1 - query_weight) * label_side()


def _scores(
    x: jax.Array, z: jax.Array, targets: jax.Array, temperature: float | jax.Array
) -> jax.Array:
    x, z = jnp.asarray(x), jnp.asarray(z)
    expected = (*x.shape[:-1], *z.shape[-2:-1])
    if x.ndim < 2 or z.shape[:-2] != x.shape[:-2] or z.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"query_embeddings have shape {x.shape} and label_embeddings {z.shape}; expected "
            "[..., Q, d] and [..., P, d] with the same leading axes and the same d."
        )
    if jnp.shape(targets) != expected:
        raise ValueError(
            f"targets have shape {jnp.shape(targets)}; expected [..., Q, P] = {expected}."
        )
    # 16-bit embeddings keep their fast matrix product but are summed up, and divided, in float32.
    dtype = jnp.promote_types(jnp.result_type(x, z), jnp.float32)
    return jnp.einsum("...qd,...pd->...qp", x, z, preferred_element_type=dtype) / temperature


def _transpose(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(jnp.asarray(x), -1, -2)
