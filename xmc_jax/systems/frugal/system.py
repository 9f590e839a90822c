"""What is particular to the frugal family in a run: features, phases, shortlists, ranking."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from ml_collections import ConfigDict

from xmc_jax.data.batching import batches
from xmc_jax.data.graph import label_features
from xmc_jax.data.search import clustering
from xmc_jax.systems.frugal.ranking import FrugalRanker
from xmc_jax.systems.frugal.source import FrugalSource, GraphRows
from xmc_jax.systems.frugal.step import make_frugal_step, trained
from xmc_jax.tables import label_pool, row_adam
from xmc_jax.training import refresh, stages
from xmc_jax.training.state import TrainState, make_optimizer
from xmc_jax.training.training_data import TrainingData
from xmc_jax.training.workdir import write_json

if TYPE_CHECKING:
    from xmc_jax.training.loop import Run

FOLDER = "features"
ENCODER = ("tokens", "queries")  # parameters that have the encoder's learning rate


@dataclasses.dataclass(frozen=True)
class FrugalSystem:
    """Label clusters and a meta-classifier over them, beside the classifier over labels.

    The methods are those of `xmc_jax.systems.unidec.system.DualSystem`.

    Attributes:
      graph: rows of the label graph where the model has that part.
      cluster_weight: of the clusters' log-probabilities in the ranking.
    """

    graph: GraphRows | None = None
    cluster_weight: float = 1.0

    def optimizer(self, config: ConfigDict) -> optax.GradientTransformation:
        """Of the trained parameters, at its peak rates."""
        return make_optimizer(
            encoder_rate=config.lr.encoder,
            head_rate=config.lr.heads,
            weight_decay=config.lr.weight_decay,
            clip_norm=config.lr.clip_norm,
            encoder_names=ENCODER,
        )

    def make_step(
        self, run: Run, optimizer: optax.GradientTransformation
    ) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
        """The jitted step, a function of (state, batch, factor) that donates the state."""
        config = run.config
        return make_frugal_step(
            run.model,
            optimizer,
            meta_weight=config.meta_weight,
            table_rate=config.lr.table,
            seed=config.seed,
        )

    def source(self, config: ConfigDict, model: Any, data: TrainingData) -> FrugalSource:
        """Makes the batches.

        Raises:
          ValueError: the pool is smaller than the batch.
        """
        return FrugalSource(
            config,
            data,
            model.queries.max_segments,
            num_clusters=model.num_clusters,
            label_text=model.label_text,
            graph=self.graph,
        )

    def parameter_shapes(self, model: Any, num_labels: int) -> Any:
        """Shapes and types of the parameters as a checkpoint holds them."""
        idf = np.zeros(model.queries.vocab_size, np.float32)
        params = jax.eval_shape(lambda: model.init(jax.random.key(0), idf))
        facts = {
            "label_clusters": jax.ShapeDtypeStruct((num_labels,), np.int32),
            "free_weights": jax.ShapeDtypeStruct((), np.bool_),
        }
        return {**params, "phase": facts, "offset": jax.ShapeDtypeStruct((), np.float32)}

    def initial_state(
        self, run: Run, params: Any, optimizer: optax.GradientTransformation, *, table: bool
    ) -> TrainState:
        """Step 0, in the first phase. ``table=False``: no clusters yet, free weights at zero."""
        config, phase = run.config, stages.of(run.config)[0]
        params = {**params, "offset": jnp.float32(config.offset)}
        # A step donates the state, in which no array may stand twice.
        params = jax.tree.map(lambda x: jnp.array(x, copy=True), params)
        if table:
            params = self._with_phase(run, params, phase)
        else:
            clusters = jnp.zeros(run.data.num_labels, jnp.int32)
            facts = {"label_clusters": clusters, "free_weights": jnp.array(phase.free_weights)}
            params = {**params, "phase": facts}
        rows = None
        if config.classifier:
            rows = jnp.zeros((run.data.num_labels, run.model.dim), jnp.float32)
            if table and phase.free_weights:
                rows = self._first_rows(run, params)
            rows = label_pool.to_storage(rows, config.table.dtype)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(trained(params)),
            table=rows,
            table_state=None if rows is None else row_adam.init(rows),
        )

    def begin_phase(
        self, run: Run, state: TrainState, optimizer: optax.GradientTransformation, epoch: int
    ) -> TrainState:
        """The state with which the phase that begins at ``epoch`` begins (appendix A.4).

        Labels are clustered anew, the meta-classifier and all moments start anew, and free weights
        that were off start from the label texts. A function of the state, the configuration and
        the epoch alone. The old moments are donated.
        """
        phase = stages.at(run.config, epoch)
        key = jax.random.fold_in(jax.random.key(run.config.seed), epoch)
        params = {**state.params, "meta": run.model.init_meta(key)}
        table = state.table
        if phase.free_weights and not stages.at(run.config, epoch - 1).free_weights:
            rows = self._first_rows(run, params)
            table = label_pool.to_storage(rows, run.config.table.dtype)
        params = self._with_phase(run, params, phase)
        return TrainState(
            step=state.step,
            params=params,
            opt_state=optimizer.init(trained(params)),
            table=table,
            table_state=None if table is None else _zeroed(state.table_state),
        )

    def _first_rows(self, run: Run, params: Any) -> jax.Array:
        """Free weights at their start: the label texts' z1, scaled, or noise."""
        config = run.config
        if config.table.init == "labels":
            return config.table.scale * run.embedder.texts(params, run.data.label_tokens)
        key = jax.random.fold_in(jax.random.key(config.seed), 1)
        shape = (run.data.num_labels, run.model.dim)
        return config.table.scale * jax.random.normal(key, shape, jnp.float32)

    def _with_phase(self, run: Run, params: Any, phase: stages.Phase) -> Any:
        """Parameters with the clusters of a phase that begins."""
        started = time.perf_counter()
        data, config = run.data, run.config
        if phase.clusters == "text":
            vectors = run.embedder.texts(params, data.label_tokens)
        else:
            original = data.labels[: data.first_text_row]  # without label texts as points
            idf = np.asarray(params["moving"]["idf"])
            vectors = label_features.pifa_vectors(
                data.train_tokens, data.label_tokens, original, idf, seed=config.seed
            )
        levels = run.model.num_clusters.bit_length() - 1
        order, offsets = clustering.balanced_clusters(
            vectors, levels, seed=config.seed + 7919 * phase.first
        )
        clusters = np.empty(data.num_labels, np.int32)
        clusters[order] = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        logging.info(
            "%d label clusters by %s (%.1f s)",
            len(offsets) - 1,
            phase.clusters,
            time.perf_counter() - started,
        )
        free_weights = jnp.array(phase.free_weights)
        facts = {"label_clusters": jnp.asarray(clusters), "free_weights": free_weights}
        return {**params, "phase": facts}

    def refresh(self, run: Run, state: TrainState, epoch: int) -> refresh.Refresh:
        """The labels' clusters, and a shortlist of hard negatives from the best of them."""
        make = lambda folder: refresh.make(folder, epoch, run, state.params)
        return refresh.write(run.folder, epoch, make)

    def ranker(
        self, embedder: Any, params: Any, table: Any, label_tokens: Any, **options: Any
    ) -> FrugalRanker:
        """The model's ranker; options are those of `FrugalRanker`."""
        options["cluster_weight"] = self.cluster_weight
        return FrugalRanker(embedder, params, table, label_tokens, self.graph, **options)

    def resized(self, run: Run, config: ConfigDict) -> Run:
        """The run with another batch, pool or table.

        Raises:
          ValueError: the pool cannot hold a batch.
        """
        source = self.source(config, run.model, run.data)
        return dataclasses.replace(run, config=config, source=source)


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)  # an unused one is not donated
def _zeroed(moments: row_adam.RowAdamState) -> row_adam.RowAdamState:
    """Moments of zero in the place of old ones, for a second pair may be gigabytes."""
    return jax.tree.map(jnp.zeros_like, moments)


def num_clusters(num_labels: int, size: int) -> int:
    """C: the power of two that makes clusters of about ``size`` labels."""
    return 2 ** batches.cluster_levels(num_labels, size)


def graph_rows(folder: Path, config: ConfigDict, data: TrainingData, idf: np.ndarray) -> GraphRows:
    """Rows of the label graph, read from a work directory or made and written there."""
    if not (folder / FOLDER / "info.json").exists():
        started = time.perf_counter()
        original = data.labels[: data.first_text_row]
        graph = label_features.neighbour_graph(
            original, neighbours=config.graph.neighbours, seed=config.seed
        )
        blocks = label_features.graph_rows(
            graph,
            data.label_tokens,
            idf,
            tokens=config.graph.tokens,
            degree=config.graph.degree,
        )
        _write_rows(folder, blocks, (data.num_labels, config.graph.tokens))
        logging.info(
            "label graph of %.1f neighbours a label (%.1f s)",
            graph.nnz / max(1, data.num_labels),
            time.perf_counter() - started,
        )
    return load_graph_rows(folder)


def load_graph_rows(folder: Path) -> GraphRows:
    """Rows of the label graph of a work directory, memory-mapped."""
    info = json.loads((folder / FOLDER / "info.json").read_text())
    read = lambda name, dtype: np.memmap(
        folder / FOLDER / name, dtype, mode="r", shape=tuple(info["shape"])
    )
    return GraphRows(read("graph_ids.bin", "<i4"), read("graph_weights.bin", "<f4"))


def _write_rows(folder: Path, blocks: Iterator[Any], shape: tuple[int, int]) -> None:
    """Stream blocks into ``features/``, under a temporary name first."""
    target, temporary = folder / FOLDER, folder / f"{FOLDER}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        with (
            open(temporary / "graph_ids.bin", "wb") as ids_file,
            open(temporary / "graph_weights.bin", "wb") as weights_file,
        ):
            for ids, weights in blocks:
                ids_file.write(np.ascontiguousarray(ids, "<i4"))
                weights_file.write(np.ascontiguousarray(weights, "<f4"))
        write_json(temporary / "info.json", {"shape": shape})
        temporary.rename(target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(
            f"{target}: the label features could not be written ({error.strerror or error}). Free "
            "some space, then run the same command again."
        ) from error
