"""One step of a frugal classifier: BCE on the pool's labels and on all clusters, together.

Parameters hold more than those of ``models.frugal.Frugal``: ``params["phase"] = {"label_clusters":
[L] int32, "free_weights": [] bool}``, which a phase of training fixes and ranking needs. Neither
that nor ``params["moving"]`` is the optimiser's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from xmc_jax.contracts import TokenBatch
from xmc_jax.host import xla
from xmc_jax.losses import sigmoid_bce_loss
from xmc_jax.tables import label_pool, row_adam
from xmc_jax.training.state import TrainState

FIXED = ("moving", "phase")  # parts of the parameters that no gradient moves


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
      partners: ``[Q]`` int32 text with which a query's features are mixed (`xmc_jax.systems.frugal.text_mixing`), or
        None: ``tokens`` are those of the queries alone.
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


def trained(params: Any) -> Any:
    """The parameters that the optimiser moves."""
    return {name: value for name, value in params.items() if name not in FIXED}


def frugal_loss(
    model: Any,
    params: Any,
    rows: jax.Array | None,
    batch: FrugalBatch,
    key: Any,
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
      params: its parameters.
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
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    meta_weight: float,
    table_rate: float,
    seed: int,
) -> Callable[[TrainState, FrugalBatch, Any], tuple[TrainState, dict[str, jax.Array]]]:
    """The step as a jitted function of (state, batch, factor) that donates the state.

    Args:
      model: a ``models.frugal.Frugal``.
      optimizer: of `trained` parameters, at its peak rates.
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
            rows = label_pool.gather_rows(state.table, batch.pool_ids)  # [P, D]
        params, moving = trained(state.params), state.params["moving"]

        def loss_of(params: Any, rows: Any) -> tuple[jax.Array, Any]:
            whole = {**params, "moving": moving}
            return frugal_loss(model, whole, rows, batch, key, meta_weight)

        (_, (parts, moved)), (gradients, row_gradients) = jax.value_and_grad(
            loss_of, argnums=(0, 1), has_aux=True
        )(params, rows)
        updates, opt_state = optimizer.update(gradients, state.opt_state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda u: factor * u, updates))
        table, table_state = state.table, state.table_state
        if rows is not None:
            table, table_state = row_adam.update(
                table,
                table_state,
                batch.pool_ids,
                row_gradients,
                learning_rate=table_rate * factor,
            )
        parts["gradient_norm"] = optax.tree.norm(gradients)
        fixed = {"moving": moved, "phase": state.params["phase"]}
        new = TrainState(state.step + 1, {**params, **fixed}, opt_state, table, table_state)
        return new, parts

    return jax.jit(step, donate_argnums=0, compiler_options=xla.compiler_options())
