"""Losses for label pools: pure functions of scores and targets that need nothing but JAX.

Every loss is ``name_loss(scores, targets, *, where=None, weights=None, reduce_fn=jnp.mean)``. The
last axis is the pool of labels, leading axes are free. An infinite score is the limit of a growing
finite one, equal infinities growing alike: a value may be inf, gradients by scores are finite.
`pick_some_labels_loss` forms the scores from two sets of embeddings and applies one of the others
in both directions.
"""

from __future__ import annotations

from xmc_jax.losses.margin import triplet_loss
from xmc_jax.losses.pick_some_labels import pick_some_labels_loss
from xmc_jax.losses.sigmoid import sigmoid_bce_loss
from xmc_jax.losses.softmax import decoupled_softmax_loss, supcon_loss

__all__ = [
    "decoupled_softmax_loss",
    "pick_some_labels_loss",
    "sigmoid_bce_loss",
    "supcon_loss",
    "triplet_loss",
]
