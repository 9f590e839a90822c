"""UniDEC and DePSL: dual encoder and classifier, or the dual encoder alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from xmc_jax import losses
from xmc_jax.contracts import (
    Examples,
    Points,
    Stage,
    Step,
    Table,
    Tokens,
    Trains,
    TrainState,
    Weights,
)
from xmc_jax.models.encoders.transformer import TransformerEncoder
from xmc_jax.models.heads.unidec import UniDEC
from xmc_jax.systems.embedding import CHUNK_TEXTS
from xmc_jax.systems.frozen_layers import FrozenLayers, read_through, reads_pooled
from xmc_jax.systems.unidec import mining
from xmc_jax.systems.unidec.embedder import Embedder
from xmc_jax.systems.unidec.options import HeadOptions, UniDECOptions
from xmc_jax.systems.unidec.ranking import DualRanker, unit_rows
from xmc_jax.systems.unidec.source import make_source
from xmc_jax.systems.unidec.step import TABLE, HeadLoss, Objective, make_train_step
from xmc_jax.tables import label_pool
from xmc_jax.training.source import BatchSource, batch_shapes
from xmc_jax.training.state import make_optimizer, new_state, zeroed

SEEN = "seen"  # of the model state: labels that have a training point, [L] bool
_SCORES = 1 << 27  # bytes of a block of scores in `xmc_jax.data.search.exact_search` on a device
LABEL_LOSSES: dict[str, Callable[..., jax.Array]] = {
    "decoupled_softmax": losses.decoupled_softmax_loss,
    "supcon": losses.supcon_loss,
    "triplet": losses.triplet_loss,
}


def head_loss(options: HeadOptions, name: str) -> HeadLoss:
    """The loss of one head, from the section ``de`` or ``clf`` of a configuration.

    The dual encoder's triplet loss has no temperature: its margin is one of cosines.

    Raises:
      ValueError: the loss is not a known name, alone or (of the classifier) followed by ``+bce``.
    """
    parts = options.loss.split("+")
    multi_class = [part for part in parts if part != "bce"]
    allowed = options.bce_weight is not None
    wrong = len(multi_class) > 1 or len(parts) > 2 or not set(multi_class) <= LABEL_LOSSES.keys()
    if wrong or ("bce" in parts and not allowed):
        with_bce = ", 'bce', or one of them followed by '+bce', as in 'decoupled_softmax+bce'"
        raise ValueError(
            f"config.{name}.loss = {options.loss!r}: expected one of {list(LABEL_LOSSES)}"
            f"{with_bce if allowed else ' (bce is for config.clf.loss)'}."
        )
    label_loss = LABEL_LOSSES[multi_class[0]] if multi_class else None
    temperature = options.temperature
    if label_loss is not None and multi_class == ["triplet"]:
        label_loss = functools.partial(label_loss, margin=options.margin)
        temperature = 1.0 if name == "de" else temperature
    elif label_loss is not None:
        label_loss = functools.partial(label_loss, normalize=options.normalize)
    bce_weight = (options.bce_weight or 0.0) if "bce" in parts else 0.0
    return HeadLoss(label_loss, temperature, options.query_weight, bce_weight)


def objective(options: UniDECOptions) -> Objective:
    """Both heads' losses, or the dual encoder's alone."""
    de = head_loss(options.de, "de")
    if not options.classifier:
        return Objective(de)
    return Objective(de, head_loss(options.clf, "clf"), options.de_weight)


class UniDECSystem:
    """See `xmc_jax.contracts.System`."""

    def __init__(
        self, options: UniDECOptions, model: UniDEC, frozen: FrozenLayers | None = None
    ) -> None:
        """Join the parts.

        Args:
          options: of the run.
          model: encoder and heads.
          frozen: the layers below the encoder, where some are frozen.
        """
        self.options, self.model, self.frozen = options, model, frozen
        self.objective = objective(options)
        self.optimizer: optax.GradientTransformation = make_optimizer(options.lr)
        # A chunk of pooled vectors has no more places than texts.
        places = CHUNK_TEXTS if reads_pooled(model.encoder) else None
        self.embedder = Embedder(model, row_length=options.row_length, chunk_tokens=places)

    @property
    def dim(self) -> int:
        """Size of one head's output."""
        return self.model.dim

    @property
    def _ranks_unseen(self) -> bool:
        """Whether labels without a training point are ranked by their texts, in both heads."""
        return self.options.classifier and self.options.unseen_weight > 0

    def read(self, tokens: Tokens, *, keep: bool = True) -> Tokens:
        """Token ids, or what the frozen layers put out for them."""
        return read_through(self.frozen, tokens, keep=keep)

    def source(self, data: Points) -> BatchSource:
        """Makes the batches.

        Raises:
          ValueError: the pool is smaller than the batch.
        """
        encoder = self.model.encoder
        return make_source(self.options, data, encoder.max_segments, shared=encoder.shared)

    def weight_shapes(self, num_labels: int) -> Weights:
        """Shapes and types of what a checkpoint holds."""
        params = jax.eval_shape(lambda: self.model.init(jax.random.key(0)))
        zeros = lambda: label_pool.to_storage(
            jnp.zeros((num_labels, self.dim)), self.options.table.dtype
        )
        tables = {TABLE: jax.eval_shape(zeros)} if self.options.classifier else {}
        flags = jax.ShapeDtypeStruct((num_labels,), jnp.bool_)
        return Weights(params, {SEEN: flags} if self._ranks_unseen else {}, tables)

    def first_state(self, data: Points, weights: Weights, *, measure: bool = False) -> TrainState:
        """Step 0; the classifier table starts from DE label embeddings or noise, or at zero."""
        if not self.options.classifier:
            return new_state(weights.params, self.optimizer)
        state = {}
        if self._ranks_unseen and measure:
            state[SEEN] = jnp.zeros(data.num_labels, jnp.bool_)
        elif self._ranks_unseen:
            points = np.bincount(data.labels.indices, minlength=data.num_labels)
            state[SEEN] = jnp.asarray(points > 0)
        if measure:
            rows = jnp.zeros((data.num_labels, self.dim), jnp.float32)
        else:
            rows = self._first_rows(data, weights.params)
        table = label_pool.to_storage(rows, self.options.table.dtype)
        return new_state(weights.params, self.optimizer, {TABLE: table}, model_state=state)

    def _first_rows(self, data: Points, params: Any) -> Any:
        options = self.options
        if options.table.init == "labels":
            rows = self.embedder.de(params, data.label_tokens, side="label")
            rows *= options.table.scale
            return rows
        key = jax.random.fold_in(jax.random.key(options.seed), 1)
        return options.table.scale * jax.random.normal(key, (data.num_labels, self.dim))

    def begin_stage(
        self, data: Points, state: TrainState, stage: Stage, before: tuple[Stage, ...]
    ) -> TrainState:
        """All moments begin anew; a table that no stage has trained begins from this encoder."""
        tables = {name: Table(x, zeroed(moments)) for name, (x, moments) in state.tables.items()}
        untrained = all(other.trains == "encoder" for other in before)
        if tables and untrained and stage.trains != "encoder":
            rows = self._first_rows(data, state.params)
            values = label_pool.to_storage(rows, self.options.table.dtype)
            tables[TABLE] = tables[TABLE]._replace(values=values)
        return state._replace(opt_state=self.optimizer.init(state.params), tables=tables)

    def make_step(self, trains: Trains) -> Step:
        """The jitted step, a function of (state, batch, factor) that donates the state."""
        return make_train_step(
            self.model,
            self.objective,
            self.optimizer,
            table_rate=self.options.lr.table,
            seed=self.options.seed,
            trains=trains,
        )

    def write_refresh(
        self, folder: Path, epoch: int, data: Points, state: TrainState
    ) -> dict[str, Any]:
        """Clusters of queries, and their nearest labels as hard negatives."""
        levels = batch_shapes(self.options, data).levels
        return mining.write(folder, epoch, self.options, data, self.embedder, state.params, levels)

    def ranker(
        self,
        weights: Weights,
        label_tokens: Tokens,
        *,
        bonus: np.ndarray | None = None,
        kind: str = "exact",
        seed: int = 0,
        keep_indexes: bool = False,
        examples: Examples | None = None,
    ) -> DualRanker:
        """Labels beyond the table's rows leave the classifier out, unless they have examples.

        The row of a label with examples is the mean of these' unit CLF vectors.
        """
        table, why_not = weights.tables.get(TABLE), "the run has no classifier"
        if table is not None and examples is not None and examples.labels.shape[1]:
            _, clf = self.embedder.both(weights.params, examples.tokens)
            counts = np.maximum(examples.labels.sum(axis=0).reshape(-1, 1), 1)
            rows = np.asarray(examples.labels.T @ unit_rows(clf)) / counts
            known = label_pool.from_storage(table)
            table = jnp.concatenate([known, jnp.asarray(rows, jnp.float32)])
        if table is not None and len(label_tokens) > len(table):
            logging.warning(
                "%d new labels have no classifier row: all labels are ranked by the DE head",
                len(label_tokens) - len(table),
            )
            table, why_not = None, "new labels have no classifier row"
        unseen = None
        if self._ranks_unseen:
            unseen = np.flatnonzero(~np.asarray(weights.model_state[SEEN]))
        return DualRanker(
            self.embedder,
            weights.params,
            table,
            label_tokens,
            bonus=bonus,
            kind=kind,
            seed=seed,
            keep_indexes=keep_indexes,
            why_not=why_not,
            unseen=unseen,
            unseen_weight=self.options.unseen_weight,
        )

    def embed_some(self, weights: Weights, tokens: Tokens, rows: np.ndarray) -> None:
        """Both heads' embeddings of some texts."""
        self.embedder.both(weights.params, tokens, rows)

    def vector_bytes(self, data: Points, evaluated: int, *, mined: bool) -> int:
        """Queries and labels of a refresh, or both heads' and their join at an evaluation."""
        row = 4 * self.dim
        refresh = (len(data.rows) + data.num_labels) * row if mined else 0
        copies = 4 if self.options.classifier else 1  # DE, CLF and both side by side
        return max(refresh, (data.num_labels + evaluated) * copies * row)

    def searched_bytes(self, data: Points, evaluated: int) -> int:
        """Label vectors on a device for exact search (of both heads side by side), and scores."""
        copies = 2 if evaluated and self.options.classifier else 1
        return copies * 4 * data.num_labels * self.dim + _SCORES

    def resized(self, options: UniDECOptions) -> UniDECSystem:
        """The system with another batch, pool, head or table."""
        encoder = self.model.encoder
        if options.encoder.remat and isinstance(encoder, TransformerEncoder):
            encoder = dataclasses.replace(encoder, remat=True)
        model = dataclasses.replace(self.model, encoder=encoder, head_dim=options.head_dim or None)
        return UniDECSystem(options, model, self.frozen)
