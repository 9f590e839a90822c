"""The step at 10^5, 10^6 and 10^7 labels: neither time nor temporary memory depends on L.

A bag encoder and d = 64, so that the row update is a good part of the step; float32 table and
moments; the same pool, its ids spread over the whole table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import harness, ours, problem
from experiments.benchmarks.harness import Contender, Subject
from xmc_jax.models.encoders.bag import BagEncoder
from xmc_jax.models.heads.unidec import UniDEC
from xmc_jax.systems.unidec.options import UniDECOptions
from xmc_jax.systems.unidec.source import make_source
from xmc_jax.systems.unidec.step import StepBatch

VOCABULARY, DIM = 30_000, 64


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One result: all sizes, turn by turn."""
    sizes = (1000, 10_000) if options.quick else (100_000, 1_000_000, 10_000_000)
    queries, pool = (16, 64) if options.quick else (256, 2048)
    of_run = problem.make_options(queries, pool, DIM)
    data = problem.amazon_shaped(4 * queries, sizes[0], VOCABULARY)
    source = make_source(of_run, data, BagEncoder(VOCABULARY, DIM).max_segments)
    batch = next(source.ahead(problem.STAGE, 0, 0))[0]
    contenders = [
        Contender(f"L = {size:,}", sweep_step, (of_run, batch, size, size // sizes[0]))
        for size in sizes
    ]
    results = harness.contest(options, contenders, repeats=30, warmup=3)
    smallest, largest = contenders[0].name, contenders[-1].name
    temporary = [results[name]["xla_temp_bytes"] for name in (smallest, largest)]
    yield {
        "case": "labels_sweep",
        **{"queries": queries, "pool": pool, "head_dim": DIM},
        "time_ratio": harness.ratios(results, smallest)[largest],
        "temporary_bytes_more": temporary[1] - temporary[0],
        "contenders": results,
    }


def sweep_step(options: UniDECOptions, batch: StepBatch, num_labels: int, apart: int) -> Subject:
    """A step with a table of ``num_labels`` rows; pool ids are multiplied by ``apart``."""
    model = UniDEC(BagEncoder(VOCABULARY, DIM), DIM, options.head_dropout)
    table = jnp.zeros((num_labels, DIM), jnp.float32)
    step, state = ours.start(options, model, model.init(jax.random.key(0)), table)
    del table  # a step donates it
    batch = batch._replace(pool_ids=np.asarray(batch.pool_ids * apart, np.int32))
    step.compile(state, batch)

    def turn(_: int) -> None:
        nonlocal state
        state, _ = step(state, batch, 1.0)
        jax.block_until_ready(state)

    facts = {"table_and_moments_bytes": 3 * 4 * num_labels * DIM}
    return Subject(turn, facts, lambda: ours.memory(step))
