"""One step of UniDEC: a forward pass, both heads' losses, and the row update of the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from xmc_jax.contracts import Step, TokenBatch, Trains, TrainState
from xmc_jax.host import xla
from xmc_jax.losses import pick_some_labels_loss, sigmoid_bce_loss
from xmc_jax.models.heads.unidec import UniDEC
from xmc_jax.tables import label_pool
from xmc_jax.training.step import TableGradients, apply_gradients

TABLE = "classifier"  # Psi [L, d]


class StepBatch(NamedTuple):
    """What a step reads.

    Attributes:
      tokens: texts of the queries, then of the dual encoder's ``P`` pool labels; of the queries
        alone where there are two towers.
      pool_ids: ``[P + E]`` int32 label ids, padded from L upwards; the last E labels are extra
        positives for the classifier alone.
      targets: ``[Q, P + E]`` bool, or float in [0, 1] where targets are soft.
      where: ``[Q, P + E]`` bool, False = not there.
      label_tokens: texts of the pool labels where there are two towers, else None.
    """

    tokens: TokenBatch
    pool_ids: Any
    targets: Any
    where: Any
    label_tokens: TokenBatch | None = None


@dataclasses.dataclass(frozen=True)
class HeadLoss:
    """The loss of one head: L = query_weight * L_q2l + (1 - query_weight) * L_l2q.

    Attributes:
      label_loss: a multi-class loss of ``xmc_jax.losses``, or None: only ``bce_weight`` counts.
      temperature: divides the scores.
      query_weight: the papers' lambda_D or lambda_C.
      bce_weight: weight of an added sigmoid BCE on scores without temperature, query side only.
    """

    label_loss: Callable[..., jax.Array] | None
    temperature: float
    query_weight: float = 0.5
    bce_weight: float = 0.0

    def __call__(
        self, queries: jax.Array, labels: jax.Array, targets: jax.Array, where: jax.Array
    ) -> jax.Array:
        """Loss of embeddings ``[Q, d]`` and ``[P, d]``, a scalar."""
        loss = jnp.zeros((), jnp.float32)
        if self.label_loss is not None:
            loss += pick_some_labels_loss(
                queries,
                labels,
                targets,
                temperature=self.temperature,
                label_loss=self.label_loss,
                where=where,
                query_weight=self.query_weight,
            )
        if self.bce_weight > 0:
            scores = jnp.matmul(queries, labels.T, preferred_element_type=jnp.float32)
            loss += self.bce_weight * sigmoid_bce_loss(scores, targets, where=where)
        return loss


@dataclasses.dataclass(frozen=True)
class Objective:
    """L = de_weight * L_DE + (1 - de_weight) * L_CLF (preprint, section 3.2; thesis 2.3.2).

    ``clf`` None is DePSL, the dual encoder alone: L = L_DE.
    """

    de: HeadLoss
    clf: HeadLoss | None = None
    de_weight: float = 0.5


def objective_parts(
    objective: Objective,
    model: UniDEC,
    params: Any,
    rows: jax.Array | None,
    batch: StepBatch,
    key: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of a batch and its parts.

    Args:
      objective: which losses, with which weights.
      model: the model.
      params: its parameters.
      rows: ``[P + E, d]`` classifier rows of the pool, or None without a classifier.
      batch: the batch.
      key: dropout key.

    Returns:
      The scalar loss and ``{"loss", "loss_de", "loss_clf"}``.
    """
    num_queries = batch.targets.shape[0]
    targets = batch.targets.astype(jnp.float32)
    encoder_key, de_key, clf_key = jax.random.split(key, 3)
    vectors = _vectors(model, params, batch, encoder_key)  # [Q + P, H]
    num_labels = vectors.shape[0] - num_queries
    de = model.de(params, vectors, key=de_key, train=True)  # [Q + P, d]
    loss_de = objective.de(
        de[:num_queries],
        de[num_queries:],
        targets[:, :num_labels],
        batch.where[:, :num_labels],
    )
    if objective.clf is None or rows is None:
        return loss_de, {"loss": loss_de, "loss_de": loss_de}
    queries = model.clf(params, vectors[:num_queries], key=clf_key, train=True)  # [Q, d]
    loss_clf = objective.clf(queries, rows, targets, batch.where)
    loss = objective.de_weight * loss_de + (1.0 - objective.de_weight) * loss_clf
    return loss, {"loss": loss, "loss_de": loss_de, "loss_clf": loss_clf}


def _vectors(model: UniDEC, params: Any, batch: StepBatch, key: jax.Array) -> jax.Array:
    """``[Q + P, H]``: in one pass, or one for each tower."""
    if batch.label_tokens is None:
        return model.vectors(params, batch.tokens, key=key, train=True, side="both")
    query_key, label_key = jax.random.split(key)
    queries = model.vectors(params, batch.tokens, key=query_key, train=True, side="query")
    labels = model.vectors(params, batch.label_tokens, key=label_key, train=True, side="label")
    return jnp.concatenate([queries, labels])


def make_train_step(
    model: UniDEC,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    table_rate: float,
    seed: int,
    trains: Trains = "all",
) -> Step:
    """The step as a jitted function of (state, batch, factor) that donates the state.

    The table's gradient is taken with respect to the gathered rows only, so that neither time nor
    temporary memory depends on L. Dropout's key is a function of (seed, step): a resumed run draws
    the same masks.

    Args:
      model: the model.
      objective: the losses.
      optimizer: of ``state.params``, at its peak rates.
      table_rate: peak learning rate of the table.
      seed: seed of the dropout masks.
      trains: ``all``; ``encoder``: all parameters, by the dual encoder's loss alone; ``tables``:
        the classifier's rows, with all parameters as they are.

    Returns:
      ``step(state, batch, factor) -> (state, {"loss", "loss_de", "loss_clf", "gradient_norm"})``;
      ``factor`` multiplies all learning rates.
    """

    def step(
        state: TrainState, batch: StepBatch, factor: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        rows = None
        if TABLE in state.tables and trains != "encoder":
            rows = label_pool.gather_rows(state.tables[TABLE].values, batch.pool_ids)  # [P + E, d]

        def loss_of(params: Any, rows: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            return objective_parts(objective, model, params, rows, batch, key)

        gradients, row_gradients = None, None
        if trains == "tables":
            (_, parts), row_gradients = jax.value_and_grad(loss_of, argnums=1, has_aux=True)(
                state.params, rows
            )
        else:
            (_, parts), (gradients, row_gradients) = jax.value_and_grad(
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
            model_state=state.model_state,
        )
        return state, {**parts, "gradient_norm": norm}

    return jax.jit(step, donate_argnums=0, compiler_options=xla.compiler_options())
