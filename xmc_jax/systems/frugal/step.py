"""One step of a frugal classifier: BCE on the pool's labels and on all clusters, together.

The model state is ``{"moving": ..., "phase": {"label_clusters": [L] int32, "free_weights": []
bool}}``: what a training call renews, and what a phase of training fixes and ranking needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from xmc_jax.contracts import Step, TokenBatch, TrainState
from xmc_jax.host import xla
from xmc_jax.losses import sigmoid_bce_loss
from xmc_jax.models.frugal.classifier import Frugal
from xmc_jax.tables import label_pool
from xmc_jax.training.step import TableGradients, apply_gradients

TABLE = "free_weights"  # [L, D]


class FrugalBatch(NamedTuple):
    """What a step reads; parts that a system does not have are None.

    Attributes:
      tokens: texts of the queries.
      label_tokens: texts of the pool's labels.
      graph_ids: ``[P, T]`` tokens of the pool's rows of the label graph.
      graph_weights: ``[P, T]`` their weights.
      pool_ids: ``[P]`` int32 label ids, padded from L upwards.
      targets: ``[Q, P]`` bool, or float in [0, 1] where targets are soft.
      where: ``[Q, P]`` bool, False = not there.
      cluster_targets: ``[Q, C]`` of the same type: the largest target among all of the query's
        positives in the cluster, whether they are in the pool or not.
      free_weights: anything in a phase in which labels have weights of their own, else None.
      partners: ``[Q]`` int32 text with which a query's features are mixed (`text_mixing`), or None:
        ``tokens`` are those of the queries alone.
      shares: ``[Q]`` float32, what a query keeps of its own features, or None.
    """

    tokens: TokenBatch
    label_tokens: TokenBatch | None
    graph_ids: Any
    graph_weights: Any
    pool_ids: Any
    targets: Any
    where: Any
    cluster_targets: Any
    free_weights: Any
    partners: Any = None
    shares: Any = None


def frugal_loss(
    model: Frugal,
    params: Any,
    rows: jax.Array | None,
    batch: FrugalBatch,
    key: jax.Array,
    meta_weight: float,
) -> tuple[jax.Array, tuple[dict[str, jax.Array], Any]]:
    """``L = BCE(labels of the pool) + meta_weight * BCE(clusters)`` (Gandalf, appendix A.2).

    Each is the sum over a query's columns and the mean over queries (`losses.sigmoid_bce_loss`),
    so that a positive label and a positive cluster weigh the same whatever P and C are; the
    InceptionXML code takes the mean over columns too. Adam's rates do not depend on that factor.

    The paper gives each query its own shortlist; here the pool of the batch is one for all queries:
    their positives, and labels drawn from each query's best clusters, which are found anew at every
    refresh instead of in every step.

    Args:
      model: a ``models.frugal.Frugal``.
      params: its parameters, moving values included.
      rows: ``[P, D]`` free weights of the pool, or None.
      batch: the batch.
      key: dropout key.
      meta_weight: weight of the clusters' loss.

    Returns:
      The scalar loss; ``{"loss", "loss_labels", "loss_clusters"}`` and the new moving values.
    """
    query_key, label_key = jax.random.split(key)
    (meta, extreme), moving = model.features(params, batch.tokens, key=query_key, train=True)
    if batch.shares is not None:
        meta, extreme = (_mixed(x, batch.partners, batch.shares) for x in (meta, extreme))
    texts = graphs = None
    if batch.label_tokens is not None:
        texts = model.text_vectors(params, batch.label_tokens)  # [P, D]
    if batch.graph_ids is not None:
        graphs = model.weighted_sum(params, batch.graph_ids, batch.graph_weights)  # [P, D]
    labels, moving = model.label_vectors(
        {**params, "moving": moving}, texts, graphs, rows, key=label_key, train=True
    )  # [P, D]
    scores = extreme @ labels.T + params["offset"]  # [Q, P]
    loss_labels = sigmoid_bce_loss(scores, batch.targets.astype(jnp.float32), where=batch.where)
    loss_clusters = sigmoid_bce_loss(
        model.cluster_scores(params, meta),  # [Q, C]
        batch.cluster_targets.astype(jnp.float32),
        where=jnp.any(batch.where, axis=1, keepdims=True),  # empty slots have no column
    )
    loss = loss_labels + meta_weight * loss_clusters
    parts = {"loss": loss, "loss_labels": loss_labels, "loss_clusters": loss_clusters}
    return loss, (parts, moving)


def _mixed(features: jax.Array, partners: jax.Array, shares: jax.Array) -> jax.Array:
    """``[Q, D]`` of features ``[B, D]`` whose first Q are the queries'."""
    own = features[: len(shares)]
    return shares[:, None] * own + (1 - shares[:, None]) * features[partners]


def make_frugal_step(
    model: Frugal,
    optimizer: optax.GradientTransformation,
    *,
    meta_weight: float,
    table_rate: float,
    seed: int,
) -> Step:
    """The step as a jitted function of (state, batch, factor) that donates the state.

    Args:
      model: the model.
      optimizer: of the parameters, at its peak rates.
      meta_weight: weight of the clusters' loss.
      table_rate: peak learning rate of the free weights.
      seed: of the dropout masks, which are a function of (seed, step).

    Returns:
      ``step(state, batch, factor) -> (state, {"loss", "loss_labels", "loss_clusters",
      "gradient_norm"})``; ``factor`` multiplies all learning rates.
    """

    def step(
        state: TrainState, batch: FrugalBatch, factor: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        rows = None
        if batch.free_weights is not None:
            rows = label_pool.gather_rows(state.tables[TABLE].values, batch.pool_ids)  # [P, D]
        moving = state.model_state["moving"]

        def loss_of(params: Any, rows: Any) -> tuple[jax.Array, Any]:
            whole = {**params, "moving": moving}
            return frugal_loss(model, whole, rows, batch, key, meta_weight)

        (_, (parts, moved)), (gradients, row_gradients) = jax.value_and_grad(
            loss_of, argnums=(0, 1), has_aux=True
        )(state.params, rows)
        of_tables = {}
        if rows is not None:
            of_tables[TABLE] = TableGradients(batch.pool_ids, row_gradients)
        state, norm = apply_gradients(
            state,
            optimizer,
            gradients,
            of_tables,
            factor=factor,
            table_rate=table_rate,
            model_state={**state.model_state, "moving": moved},
        )
        return state, {**parts, "gradient_norm": norm}

    return jax.jit(step, donate_argnums=0, compiler_options=xla.compiler_options())
