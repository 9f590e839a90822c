"""The frugal classifiers: label clusters and a meta-classifier, beside one over labels."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

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
from xmc_jax.data.graph import label_features
from xmc_jax.data.search import clustering
from xmc_jax.models.frugal.classifier import Frugal
from xmc_jax.systems.frugal import mining
from xmc_jax.systems.frugal.embedder import FrugalEmbedder
from xmc_jax.systems.frugal.options import FrugalOptions
from xmc_jax.systems.frugal.ranking import FrugalRanker
from xmc_jax.systems.frugal.source import GraphRows, make_source
from xmc_jax.systems.frugal.step import TABLE, make_frugal_step
from xmc_jax.tables import label_pool
from xmc_jax.training.source import BatchSource
from xmc_jax.training.state import make_optimizer, new_state, zeroed

ENCODER = ("tokens", "queries")  # parameters that have the encoder's learning rate


class FrugalSystem:
    """See `xmc_jax.contracts.System`."""

    def __init__(
        self, options: FrugalOptions, model: Frugal, graph: GraphRows | None = None
    ) -> None:
        """Join the parts.

        Args:
          options: of the run.
          model: the model.
          graph: rows of the label graph where the model has that part.
        """
        self.options, self.model, self.graph = options, model, graph
        self.optimizer: optax.GradientTransformation = make_optimizer(
            options.lr, encoder_names=ENCODER
        )
        self.embedder = FrugalEmbedder(model, row_length=options.row_length)

    @property
    def dim(self) -> int:
        """Size D of features and label vectors."""
        return self.model.dim

    def read(self, tokens: Tokens, *, keep: bool = True) -> Tokens:
        """Token ids as they are."""
        del keep
        return tokens

    def source(self, data: Points) -> BatchSource:
        """Makes the batches.

        Raises:
          ValueError: the pool is smaller than the batch.
        """
        return make_source(
            self.options,
            data,
            self.model.queries.max_segments,
            num_clusters=self.model.num_clusters,
            label_text=self.model.label_text,
            graph=self.graph,
        )

    def weight_shapes(self, num_labels: int) -> Weights:
        """Shapes and types of what a checkpoint holds."""
        idf = np.zeros(self.model.queries.vocab_size, np.float32)
        params = dict(jax.eval_shape(lambda: self.model.init(jax.random.key(0), idf)))
        phase = {
            "label_clusters": jax.ShapeDtypeStruct((num_labels,), np.int32),
            "free_weights": jax.ShapeDtypeStruct((), np.bool_),
        }
        state = {"moving": params.pop("moving"), "phase": phase}
        params["offset"] = jax.ShapeDtypeStruct((), np.float32)
        zeros = lambda: label_pool.to_storage(
            jnp.zeros((num_labels, self.dim)), self.options.table.dtype
        )
        tables = {TABLE: jax.eval_shape(zeros)} if self.options.classifier else {}
        return Weights(params, state, tables)

    def first_state(self, data: Points, weights: Weights, *, measure: bool = False) -> TrainState:
        """Step 0, in the first phase. ``measure``: no clusters yet, free weights at zero."""
        options, stage = self.options, self._first_stage()
        params = {**weights.params, "offset": jnp.float32(options.offset)}
        # A step donates the state, in which no array may stand twice.
        params, moving = jax.tree.map(
            lambda x: jnp.array(x, copy=True), (params, weights.model_state["moving"])
        )
        weights = Weights(params, {"moving": moving}, {})
        if measure:
            clusters = jnp.zeros(data.num_labels, jnp.int32)
            phase = {
                "label_clusters": clusters,
                "free_weights": jnp.array(stage.options["free_weights"]),
            }
        else:
            phase = self._phase(data, weights, stage)
        state = {"moving": moving, "phase": phase}
        if not options.classifier:
            return new_state(params, self.optimizer, model_state=state)
        rows = jnp.zeros((data.num_labels, self.dim), jnp.float32)
        if stage.options["free_weights"] and not measure:
            rows = self._first_rows(data, weights)
        table = label_pool.to_storage(rows, options.table.dtype)
        return new_state(params, self.optimizer, {TABLE: table}, model_state=state)

    def begin_stage(
        self, data: Points, state: TrainState, stage: Stage, before: tuple[Stage, ...]
    ) -> TrainState:
        """The state with which a later phase begins (appendix A.4).

        Labels are clustered anew, the meta-classifier and all moments start anew, and free weights
        that were off start from the label texts. A function of the state, the options and the
        stage alone. The old moments are donated.
        """
        key = jax.random.fold_in(jax.random.key(self.options.seed), stage.first)
        params = {**state.params, "meta": self.model.init_meta(key)}
        weights = state.weights._replace(params=params)
        tables = dict(state.tables)
        if TABLE in tables:
            values = tables[TABLE].values
            if stage.options["free_weights"] and not before[-1].options["free_weights"]:
                rows = self._first_rows(data, weights)
                values = label_pool.to_storage(rows, self.options.table.dtype)
            tables[TABLE] = Table(values, zeroed(tables[TABLE].state))
        phase = self._phase(data, weights, stage)
        return TrainState(
            step=state.step,
            params=params,
            model_state={**state.model_state, "phase": phase},
            opt_state=self.optimizer.init(params),
            tables=tables,
        )

    def _first_stage(self) -> Stage:
        _, free_weights, clusters = self.options.phases[0]
        return Stage(0, 1, "all", {"free_weights": free_weights, "clusters": clusters})

    def _first_rows(self, data: Points, weights: Weights) -> Any:
        """Free weights at their start: the label texts' z1, scaled, or noise."""
        options = self.options
        if options.table.init == "labels":
            return options.table.scale * self.embedder.texts(weights, data.label_tokens)
        key = jax.random.fold_in(jax.random.key(options.seed), 1)
        shape = (data.num_labels, self.dim)
        return options.table.scale * jax.random.normal(key, shape, jnp.float32)

    def _phase(self, data: Points, weights: Weights, stage: Stage) -> dict[str, jax.Array]:
        """What a phase that begins fixes: the labels' clusters, and whether weights are free."""
        started = time.perf_counter()
        if stage.options["clusters"] == "text":
            vectors = self.embedder.texts(weights, data.label_tokens)
        else:
            vectors = label_features.pifa_vectors(
                data.train_tokens,
                data.label_tokens,
                data.labels[: data.first_text_row],  # without label texts as points
                np.asarray(weights.model_state["moving"]["idf"]),
                seed=self.options.seed,
            )
        levels = self.model.num_clusters.bit_length() - 1
        order, offsets = clustering.balanced_clusters(
            vectors, levels, seed=self.options.seed + 7919 * stage.first
        )
        clusters = np.empty(data.num_labels, np.int32)
        clusters[order] = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        logging.info(
            "%d label clusters by %s (%.1f s)",
            len(offsets) - 1,
            stage.options["clusters"],
            time.perf_counter() - started,
        )
        free_weights = jnp.array(stage.options["free_weights"])
        return {"label_clusters": jnp.asarray(clusters), "free_weights": free_weights}

    def make_step(self, trains: Trains) -> Step:
        """The jitted step, a function of (state, batch, factor) that donates the state.

        Raises:
          ValueError: a stage that trains a part alone.
        """
        if trains != "all":
            raise ValueError(f"a stage that trains {trains!r}: phases train all there is.")
        return make_frugal_step(
            self.model,
            self.optimizer,
            meta_weight=self.options.meta_weight,
            table_rate=self.options.lr.table,
            seed=self.options.seed,
        )

    def write_refresh(
        self, folder: Path, epoch: int, data: Points, state: TrainState
    ) -> dict[str, Any]:
        """The labels' clusters, and a shortlist of hard negatives from the best of them."""
        return mining.write(folder, epoch, self.options, data, self.embedder, state.weights)

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
    ) -> FrugalRanker:
        """See `FrugalRanker`, which allows no labels but those that were trained."""
        del examples
        return FrugalRanker(
            self.embedder,
            weights,
            label_tokens,
            self.graph,
            cluster_weight=self.options.clusters.weight,
            bonus=bonus,
            kind=kind,
            seed=seed,
            keep_indexes=keep_indexes,
        )

    def embed_some(self, weights: Weights, tokens: Tokens, rows: np.ndarray) -> None:
        """Features of some texts."""
        self.embedder.both(weights, tokens, rows)

    def vector_bytes(self, data: Points, evaluated: int, *, mined: bool) -> int:
        """Queries and labels of a refresh, or features and vectors of an evaluation."""
        row = 4 * self.dim
        refresh = (len(data.rows) + data.num_labels) * row if mined else 0
        copies = 4 if self.options.classifier else 1
        return max(refresh, (data.num_labels + evaluated) * copies * row)

    def searched_bytes(self, data: Points, evaluated: int) -> int:
        """None: the ranking is on the host."""
        del data, evaluated
        return 0

    def resized(self, options: FrugalOptions) -> FrugalSystem:
        """The system with another batch, pool or table."""
        return FrugalSystem(options, self.model, self.graph)
