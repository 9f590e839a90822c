"""What a run carries from step to step: parameters, classifier table, optimiser moments."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from xmc_jax.tables import row_adam
from xmc_jax.tables.row_adam import RowAdamState


class TrainState(NamedTuple):
    """A pytree; the step donates it.

    Attributes:
      step: int32 scalar, steps done.
      params: encoder and heads, plain dicts of arrays.
      opt_state: Optax state of ``params``.
      table: ``[L, d]`` classifier table Psi (float32, or uint16 bit patterns of bfloat16), or None
        for a dual encoder alone.
      table_state: Adam moments of the table's rows, or None.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    table: jax.Array | None
    table_state: RowAdamState | None


def warmup_cosine(step: int, *, total_steps: int, warmup_steps: int) -> float:
    """Factor of the learning rates: linear from 0 to 1 over the warm-up, then a cosine to 0.

    The papers anneal with a cosine after a warm-up and print no length of it (thesis 2.4). The
    factor is a number that the step is given, so that no compiled shape depends on the length of
    a run.

    Args:
      step: steps done before this one.
      total_steps: steps of the whole run, >= 1.
      warmup_steps: steps of the linear part; it ends at ``total_steps`` at the latest.

    Returns:
      A number in [0, 1].
    """
    warmup_steps = min(warmup_steps, total_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    return 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


def make_optimizer(
    *,
    encoder_rate: float,
    head_rate: float,
    weight_decay: float = 0.0,
    clip_norm: float = 0.0,
    encoder_names: tuple[str, ...] = ("encoder",),
) -> optax.GradientTransformation:
    """AdamW at its peak rates, one for the encoder and one for everything else in ``params``.

    An update is linear in the rate, so that the step multiplies it by the schedule's factor.

    Args:
      encoder_rate: peak learning rate of the encoder.
      head_rate: peak learning rate of everything else.
      weight_decay: decoupled decay, on matrices only (biases and norms are left alone).
      clip_norm: global gradient norm to clip at; 0 = none.
      encoder_names: names of ``params`` that are the encoder.
    """
    adam = lambda rate: optax.adamw(
        rate,
        weight_decay=weight_decay,
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )
    groups = {"encoder": adam(encoder_rate), "head": adam(head_rate)}
    labels = lambda params: {k: "encoder" if k in encoder_names else "head" for k in params}
    optimizer = optax.multi_transform(groups, labels)
    if clip_norm > 0:
        optimizer = optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)
    return optimizer


def new_state(
    params: Any, optimizer: optax.GradientTransformation, table: jax.Array | None = None
) -> TrainState:
    """State at step 0."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        table=table,
        table_state=None if table is None else row_adam.init(table),
    )


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays (or shapes with dtypes) of a tree."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in leaves)


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """Whether no array of a tree holds NaN or infinity (uint16 = bits of bfloat16); a scalar."""

    def finite(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.uint16:
            x = jax.lax.bitcast_convert_type(x, jnp.bfloat16)
        return jnp.isfinite(x).all()

    return jnp.all(jnp.stack([finite(x) for x in jax.tree.leaves(tree)]))
