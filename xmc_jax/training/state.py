"""The state at the start, its optimiser and its learning-rate schedule."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from xmc_jax.contracts import Table, TrainState
from xmc_jax.tables import row_adam
from xmc_jax.training.options import Rates

Moments = TypeVar("Moments")
DENSE_ADAM = optax.scale_by_adam()  # of tables whose rows all move in every step


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
    rates: Rates, *, encoder_names: tuple[str, ...] = ("encoder",)
) -> optax.GradientTransformation:
    """AdamW at its peak rates, one for the encoder and one for everything else in ``params``.

    An update is linear in the rate, so that the step multiplies it by the schedule's factor.

    Args:
      rates: peak rates, weight decay (on matrices only: biases and norms are left alone), clipping.
      encoder_names: names of ``params`` that are the encoder.
    """
    adam = lambda rate: optax.adamw(
        rate,
        weight_decay=rates.weight_decay,
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )
    groups = {"encoder": adam(rates.encoder), "head": adam(rates.heads)}
    labels = lambda params: {k: "encoder" if k in encoder_names else "head" for k in params}
    optimizer = optax.multi_transform(groups, labels)
    if rates.clip_norm > 0:
        optimizer = optax.chain(optax.clip_by_global_norm(rates.clip_norm), optimizer)
    return optimizer


def new_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    tables: Mapping[str, jax.Array] | None = None,
    *,
    model_state: Any = None,
    dense: Collection[str] = (),
) -> TrainState:
    """State at step 0.

    Args:
      params: what the optimiser moves.
      optimizer: of ``params``.
      tables: as stored, by name.
      model_state: see `xmc_jax.contracts.Weights`.
      dense: names of the tables whose rows all move in every step; they hold floats.
    """
    init = lambda name: DENSE_ADAM.init if name in dense else row_adam.init
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        model_state={} if model_state is None else model_state,
        opt_state=optimizer.init(params),
        tables={name: Table(x, init(name)(x)) for name, x in (tables or {}).items()},
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


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)  # an unused one is not donated
def zeroed(moments: Moments) -> Moments:
    """Moments of zero in the place of old ones, for a second pair may be gigabytes."""
    return jax.tree.map(jnp.zeros_like, moments)
