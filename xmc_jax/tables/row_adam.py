"""Adam for a table of which a step touches few rows: time and temporary memory do not depend on L.

The semantics are those of ``torch.optim.SparseAdam``, not of dense Adam: rows that are not in the
pool are left alone, their moments do not decay, and the bias correction uses the global number of
steps. Every id of the pool counts as touched, also one whose gradient is zero.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xmc_jax.tables.label_pool import gather_rows, scatter_rows


class RowAdamState(NamedTuple):
    """Steps taken so far and the two moments of every row.

    Attributes:
      step: int32 ``[]``.
      m: ``[L, d]`` mean of gradients.
      v: ``[L, d]`` mean of squared gradients.
    """

    step: jax.Array
    m: jax.Array
    v: jax.Array


def init(table: jax.Array) -> RowAdamState:
    """Moments of zero for a table.

    They are float32 for a 16-bit table too: one step moves v by a factor of b2 = 0.999, which is
    less than the spacing of bfloat16, so a 16-bit v would never decay.

    Args:
      table: ``[L, d]`` floats, or uint16 bit patterns of bfloat16 (see `label_pool`).

    Returns:
      The state, with two ``[L, d]`` arrays.

    >>> import jax.numpy as jnp
    >>> init(jnp.zeros((5, 2))).v.shape
    (5, 2)
    """
    dtype = jnp.promote_types(jnp.float32, _float_dtype(table))
    zeros = lambda: jnp.zeros_like(table, dtype=dtype)
    return RowAdamState(step=jnp.zeros((), jnp.int32), m=zeros(), v=zeros())


def update(
    table: jax.Array,
    state: RowAdamState,
    ids: jax.typing.ArrayLike,
    row_gradients: jax.Array,
    *,
    learning_rate: float | jax.Array,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> tuple[jax.Array, RowAdamState]:
    r"""One step of SparseAdam on the rows ``ids`` of the table.

    With t the global number of steps, this one included, g the gradient of a row and w the row:

    .. math::
      m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad v \leftarrow \beta_2 v + (1 - \beta_2) g^2,

      w \leftarrow w - \eta \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \frac{m}{\sqrt{v} + \epsilon}

    (Kingma and Ba 2015, section 2, the order with epsilon outside of the correction, restricted to
    rows.) The rows of the table and of both moments are gathered, updated and scattered back. Jit
    the caller and donate table and state, and all three are updated in place.

    A 16-bit table is rounded stochastically, with bits that are a function of t alone: an update is
    usually smaller than the spacing of bfloat16 and would be lost by rounding to nearest, while in
    the mean over steps this loses nothing. Equal inputs give equal outputs.

    Args:
      table: ``[L, d]`` floats, or uint16 bit patterns of bfloat16.
      state: from `init` or the last `update`.
      ids: ``[P]`` unique integers; ids from L upwards are padding and are dropped.
      row_gradients: ``[P, d]`` gradients of the rows; those of padding are not read.
      learning_rate: a number or a scalar array.
      b1: decay of m in [0, 1), a Python number.
      b2: decay of v in [0, 1), a Python number.
      eps: added to the root of v.

    Returns:
      ``(table, state)`` of the same shapes and types.

    Raises:
      ValueError: the shape of row_gradients is not ``[P, d]``; b1 or b2 outside [0, 1).

    >>> import jax.numpy as jnp
    >>> table = jnp.zeros((3, 1))
    >>> ids, gradients = jnp.array([1, 3]), jnp.array([[5.0], [5.0]])  # 3 is padding
    >>> table, _ = update(table, init(table), ids, gradients, learning_rate=0.5)
    >>> [round(w, 4) for [w] in table.tolist()]
    [0.0, -0.5, 0.0]
    """
    ids = jnp.asarray(ids)
    if row_gradients.shape != (*ids.shape, *table.shape[1:]):
        raise ValueError(
            f"row_gradients have shape {row_gradients.shape}; expected "
            f"{(*ids.shape, *table.shape[1:])} for ids {ids.shape} and a table {table.shape}."
        )
    if not (0 <= b1 < 1 and 0 <= b2 < 1):
        raise ValueError(f"b1 is {b1} and b2 is {b2}; both must be in [0, 1).")
    step = state.step + 1
    g = row_gradients.astype(state.m.dtype)  # [P, d]
    m = b1 * gather_rows(state.m, ids) + (1 - b1) * g
    v = b2 * gather_rows(state.v, ids) + (1 - b2) * jnp.square(g)
    rate = learning_rate * jnp.sqrt(_bias_correction(b2, step)) / _bias_correction(b1, step)
    rows = gather_rows(table, ids) - rate.astype(m.dtype) * (m / (jnp.sqrt(v) + eps))
    if table.dtype == jnp.uint16:
        rows = _round_stochastically(rows, step)
    state = RowAdamState(step, scatter_rows(state.m, ids, m), scatter_rows(state.v, ids, v))
    return scatter_rows(table, ids, rows), state


def _bias_correction(decay: float, step: jax.Array) -> jax.Array:
    """``1 - decay ** step``, without the cancellation that costs four digits at decay = 0.999."""
    if decay == 0:
        return jnp.ones((), jnp.float32)
    return -jnp.expm1(step * math.log(decay))


def _round_stochastically(rows: jax.Array, step: jax.Array) -> jax.Array:
    """Rounds float32 to a bfloat16 neighbour, up or down in proportion to nearness."""
    noise = jax.random.bits(jax.random.fold_in(jax.random.key(0), step), rows.shape, jnp.uint16)
    bits = jax.lax.bitcast_convert_type(rows, jnp.uint32) + noise.astype(jnp.uint32)
    # The lower half is what bfloat16 does not keep; noise that carries out of it has rounded up.
    rounded = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(rows), rounded, rows)


def _float_dtype(table: jax.Array) -> jnp.dtype:
    return jnp.dtype(jnp.bfloat16) if table.dtype == jnp.uint16 else table.dtype
