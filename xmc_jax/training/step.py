"""What every step ends with, and how a step is compiled."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from absl import logging

from xmc_jax.contracts import Step, Table, TrainState
from xmc_jax.tables import row_adam
from xmc_jax.training.state import DENSE_ADAM


class TableGradients(NamedTuple):
    """Gradients of a table.

    Attributes:
      ids: ``[P]`` rows, padded from the table's length upwards; None = all rows, of a dense table.
      values: ``[P, d]``.
    """

    ids: jax.Array | None
    values: jax.Array


def apply_gradients(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    gradients: Any,
    table_gradients: Mapping[str, TableGradients],
    *,
    factor: jax.Array,
    table_rate: float,
    model_state: Any,
) -> tuple[TrainState, jax.Array]:
    """The state after a step, and the global norm of the gradients (the parameters', if trained).

    Args:
      state: before the step.
      optimizer: of the parameters, at its peak rates.
      gradients: of the parameters; None where only tables are trained.
      table_gradients: by name; a table that is not there stays as it is.
      factor: multiplies all learning rates.
      table_rate: peak learning rate of tables.
      model_state: the new one.
    """
    params, opt_state = state.params, state.opt_state
    if gradients is not None:
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda u: factor * u, updates))
    tables = dict(state.tables)
    for name, (ids, values) in table_gradients.items():
        table, moments = tables[name]
        if ids is None:
            updates, moments = DENSE_ADAM.update(values, moments)
            tables[name] = Table(table - table_rate * factor * updates, moments)
        else:
            tables[name] = Table(
                *row_adam.update(table, moments, ids, values, learning_rate=table_rate * factor)
            )
    if gradients is None:
        gradients = [values for _, values in table_gradients.values()]
    norm = optax.tree.norm(gradients)
    return TrainState(state.step + 1, params, model_state, opt_state, tables), norm


class CompiledStep:
    """A step, compiled once for each shape of its batches; the shapes are counted."""

    def __init__(self, function: Step) -> None:
        """Nothing is compiled yet.

        Args:
          function: the jitted step.
        """
        self._function = function
        self.compiled: dict[Any, Any] = {}

    def compile(self, state: TrainState, batch: Any) -> Any:
        """The executable for the batch's shapes; ``state`` may be shapes only."""
        leaves, structure = jax.tree.flatten(batch)
        shapes = structure, *(leaf.shape for leaf in leaves)
        if shapes not in self.compiled:
            started = time.perf_counter()
            # Shapes only: a resumed run compiles the same program as one that was not stopped.
            abstract = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, batch)
            )
            self.compiled[shapes] = self._function.lower(*abstract, np.float32(1)).compile()
            logging.info(
                "compiled the step for %d rows in %.1f s (shape %d)",
                leaves[0].shape[0],
                time.perf_counter() - started,
                len(self.compiled),
            )
        return self.compiled[shapes]

    def __call__(
        self, state: TrainState, batch: Any, factor: float
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step; the state is donated."""
        return self.compile(state, batch)(state, batch, np.float32(factor))
