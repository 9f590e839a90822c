"""What is particular to UniDEC and DePSL in a run: their step, table, refresh and ranking."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import optax
from ml_collections import ConfigDict

from xmc_jax.systems.unidec.ranking import DualRanker
from xmc_jax.systems.unidec.step import Objective, make_train_step
from xmc_jax.tables import label_pool
from xmc_jax.training import refresh
from xmc_jax.training.refresh import Refresh
from xmc_jax.training.source import BatchSource
from xmc_jax.training.state import TrainState, make_optimizer, new_state
from xmc_jax.training.training_data import TrainingData

if TYPE_CHECKING:
    from xmc_jax.training.loop import Run


@dataclasses.dataclass(frozen=True)
class DualSystem:
    """The dual encoder and its classifier; the methods are those of every system."""

    objective: Objective

    def optimizer(self, config: ConfigDict) -> optax.GradientTransformation:
        """Of the parameters, at its peak rates."""
        return make_optimizer(
            encoder_rate=config.lr.encoder,
            head_rate=config.lr.heads,
            weight_decay=config.lr.weight_decay,
            clip_norm=config.lr.clip_norm,
        )

    def make_step(
        self, run: Run, optimizer: optax.GradientTransformation
    ) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
        """The jitted step, a function of (state, batch, factor) that donates the state."""
        config = run.config
        return make_train_step(
            run.model,
            self.objective,
            optimizer,
            table_rate=config.lr.table,
            seed=config.seed,
        )

    def source(self, config: ConfigDict, model: Any, data: TrainingData) -> BatchSource:
        """Makes the batches.

        Raises:
          ValueError: the pool is smaller than the batch.
        """
        return BatchSource(config, data, model.encoder.max_segments)

    def parameter_shapes(self, model: Any, num_labels: int) -> Any:
        """Shapes and types of the parameters as a checkpoint holds them."""
        del num_labels
        return jax.eval_shape(lambda: model.init(jax.random.key(0)))

    def initial_state(
        self, run: Run, params: Any, optimizer: optax.GradientTransformation, *, table: bool
    ) -> TrainState:
        """Step 0; the classifier table starts from DE label embeddings or noise, or at zero."""
        config = run.config
        if not config.classifier:
            return new_state(params, optimizer)
        shape = (run.data.num_labels, run.model.dim)
        if not table:
            rows = jax.numpy.zeros(shape, jax.numpy.float32)
        elif config.table.init == "labels":
            rows = run.embedder.de(params, run.data.label_tokens)
            rows *= config.table.scale
        elif config.table.init == "normal":
            key = jax.random.fold_in(jax.random.key(config.seed), 1)
            rows = config.table.scale * jax.random.normal(key, shape)
        else:
            raise ValueError(
                f"config.table.init = {config.table.init!r}: expected 'labels' or 'normal'."
            )
        return new_state(params, optimizer, label_pool.to_storage(rows, config.table.dtype))

    def begin_phase(
        self, run: Run, state: TrainState, optimizer: optax.GradientTransformation, epoch: int
    ) -> TrainState:
        """The state with which the phase that begins at ``epoch`` begins; there is only one."""
        del run, optimizer, epoch
        return state

    def refresh(self, run: Run, state: TrainState, epoch: int) -> Refresh:
        """Clusters of queries, and their nearest labels as hard negatives."""
        return refresh.refresh(
            run.folder,
            epoch,
            run.config,
            run.data,
            run.embedder,
            state.params,
            run.source.levels,
        )

    def ranker(
        self, embedder: Any, params: Any, table: Any, label_tokens: Any, **options: Any
    ) -> DualRanker:
        """The model's ranker; options are those of `DualRanker`."""
        return DualRanker(embedder, params, table, label_tokens, **options)

    def resized(self, run: Run, config: ConfigDict) -> Run:
        """The run with another batch, pool, head or table.

        Raises:
          ValueError: the pool cannot hold a batch.
        """
        encoder = run.model.encoder
        if config.encoder.remat and hasattr(encoder, "remat"):
            encoder = dataclasses.replace(encoder, remat=True)
        model = dataclasses.replace(run.model, encoder=encoder, head_dim=config.head_dim or None)
        source = self.source(config, model, run.data)
        return dataclasses.replace(run, config=config, model=model, source=source)
