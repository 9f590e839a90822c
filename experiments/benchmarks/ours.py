"""The package's own training step as a contender, and the machine's matrix product."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.harness import Subject
from experiments.benchmarks.problem import Problem
from xmc_jax.contracts import TrainState
from xmc_jax.models import pretrained
from xmc_jax.models.heads.unidec import UniDEC
from xmc_jax.systems.unidec.options import UniDECOptions
from xmc_jax.systems.unidec.step import TABLE, StepBatch, objective_parts
from xmc_jax.systems.unidec.system import UniDECSystem, objective
from xmc_jax.tables import label_pool
from xmc_jax.training.state import new_state
from xmc_jax.training.step import CompiledStep


def train_step(problem: Problem, form: str) -> Subject:
    """The step of training, by the classes that the training loop uses.

    Args:
      problem: what to train on.
      form: "packed" or "single" (one text a row).
    """
    model, params = load(problem)
    batches = [getattr(batch, form) for batch in problem.batches]
    losses = first_losses(problem, model, params, batches[0])
    step, state = start(problem.options, model, params, problem.table())
    del params  # a step donates them
    for batch in batches:
        step.compile(state, batch)

    def turn(number: int) -> None:
        nonlocal state
        state, _ = step(state, batches[number % len(batches)], 1.0)
        jax.block_until_ready(state)

    tokens = np.mean([batch.lengths.sum() for batch in problem.batches])
    facts = {
        "losses": losses,
        "rows": [batch.tokens.ids.shape[0] for batch in batches],
        "row_length": batches[0].tokens.ids.shape[1],
        "packing": round(float(tokens / np.mean([batch.tokens.ids.size for batch in batches])), 4),
        "shapes_compiled": len(step.compiled),
    }
    return Subject(turn, facts, lambda: memory(step))


def load(problem: Problem) -> tuple[UniDEC, Any]:
    """The model and the parameters that all contenders start from."""
    options = problem.options
    encoder, weights = pretrained.load_encoder(
        problem.folder, pooling="mean", compute_dtype=options.encoder.compute_dtype
    )
    params = jax.tree.map(jnp.asarray, {"encoder": weights, **problem.heads})
    return UniDEC(encoder, options.head_dim, options.head_dropout), params


def start(
    options: UniDECOptions, model: UniDEC, params: Any, table: np.ndarray | jax.Array
) -> tuple[CompiledStep, TrainState]:
    """The training loop's step, not compiled yet, and its state."""
    system = UniDECSystem(options, model)
    state = new_state(params, system.optimizer, {TABLE: jnp.asarray(table)})
    return CompiledStep(system.make_step("all")), state


def first_losses(problem: Problem, model: UniDEC, params: Any, batch: StepBatch) -> dict:
    """Losses of the first batch without dropout, in float32."""
    shape = dataclasses.replace(model.encoder.config, dropout=0.0, attention_dropout=0.0)
    encoder = dataclasses.replace(model.encoder, config=shape, compute_dtype="float32")
    model = dataclasses.replace(model, encoder=encoder, dropout=0.0)
    rows = label_pool.gather_rows(jnp.asarray(problem.table()), batch.pool_ids)
    with jax.default_matmul_precision("highest"):
        _, parts = jax.jit(
            lambda params, rows, batch: objective_parts(
                objective(problem.options), model, params, rows, batch, jax.random.key(0)
            )
        )(params, rows, batch)
    return {name: float(value) for name, value in parts.items()}


def memory(step: CompiledStep) -> dict[str, int]:
    """Temporary memory of the largest program, and the device's peak where that is counted."""
    analyses = [executable.memory_analysis() for executable in step.compiled.values()]
    found = {"xla_temp_bytes": int(max(a.temp_size_in_bytes for a in analyses))}
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        found["peak_device_bytes"] = int(stats["peak_bytes_in_use"])
    return found


def matrix_product(size: int, dtype: str, times: int) -> Subject:
    """``times`` products of square matrices: the peak that a roofline share is a share of."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.dtype(dtype))
    product = jax.jit(jnp.matmul)

    def turn(_: int) -> None:
        jax.block_until_ready([product(a, a) for _ in range(times)])

    return Subject(turn, {"flops": 2.0 * times * size**3})
