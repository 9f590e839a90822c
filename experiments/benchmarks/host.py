"""The data pipeline: batches a second, and whether the device ever waits for them.

``batches`` times pool building, token gathering and packing of one batch at the papers' sizes for
LF-AmazonTitles-1.3M, mined hard negatives included, by the one thread that does it in training.
``keeps up`` times steps whose batches come from that thread against steps whose batches were all
made before; the difference is the share of time that the device is idle.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import harness, ours, problem, train_step
from experiments.benchmarks.harness import Contender, Subject
from xmc_jax import catalog
from xmc_jax.host import allocator
from xmc_jax.systems.unidec.options import UniDECOptions
from xmc_jax.systems.unidec.source import make_source
from xmc_jax.training.source import BatchSource
from xmc_jax.training.state import num_bytes

AMAZON = catalog.get("LF-AmazonTitles-1.3M")
STEPS = 4  # in a turn of "keeps up"
VOCABULARY = 30_000


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Two results."""
    if options.wanted("host batches"):
        scale = 0.002 if options.quick else 1.0
        queries, pool = (64, 256) if options.quick else train_step.ON_GPU
        contender = Contender("batch", one_batch, (queries, pool, scale))
        results = harness.contest(options, [contender], repeats=100, warmup=10)
        median = results["batch"]["seconds"]["median"]
        yield {
            **{"case": "host", "part": "batches", "queries": queries, "pool": pool},
            "milliseconds_a_batch": round(1000 * median, 2),
            "batches_a_second": round(1 / median, 1),
            "contenders": results,
        }
    for shape in options.shapes or ["tiny" if options.quick else "minilm"]:
        if options.wanted(f"host keeps up {shape}"):
            yield keeps_up(options, shape)


def one_batch(queries: int, pool: int, scale: float) -> Subject:
    """A turn makes one batch."""
    source, _ = amazon_source(problem.make_options(queries, pool, 256), scale)
    epochs = (source.ahead(problem.STAGE, epoch, 0) for epoch in itertools.count())
    batches = itertools.chain.from_iterable(epochs)
    numbers = []

    def turn(_: int) -> None:  # waits for the thread, which is never ahead of one that does nothing
        numbers.append(next(batches)[1])

    def close() -> dict[str, Any]:
        names = ("rows", "packing", "in_batch_positives", "pool_fill")
        return {name: round(float(np.mean([n[name] for n in numbers])), 3) for name in names}

    return Subject(turn, {}, close)


def amazon_source(options: UniDECOptions, scale: float) -> tuple[BatchSource, int]:
    """Batches over data of LF-AmazonTitles-1.3M's shape, mined hard negatives included; and L."""
    points, labels = (round(scale * n) for n in (AMAZON.num_train, AMAZON.num_labels))
    data = problem.amazon_shaped(points, labels, VOCABULARY)
    options = dataclasses.replace(options, hard_negatives=True, beta=1, fill="none")
    source = make_source(options, data, 32)
    shape = points, options.eta * options.refresh_epochs
    mined = np.random.default_rng(0).integers(0, labels, shape, np.int32)
    source.use({"hard_negatives": mined})
    return source, labels


def keeps_up(options: argparse.Namespace, shape: str) -> dict[str, Any]:
    """Steps with batches made ahead in a thread against steps with batches that are there."""
    scale = 0.02 if options.quick else 1.0
    repeats = options.repeats or 3
    with tempfile.TemporaryDirectory() as folder:
        made = train_step.make_problem(options, shape, "amazon", Path(folder))
        made = dataclasses.replace(made, batches=())
        number = STEPS * (repeats + 1)
        contenders = [
            Contender("made ahead in a thread", steps, (made, scale, number, True)),
            Contender("all made before", steps, (made, scale, number, False)),
        ]
        results = harness.contest(options, contenders, repeats=repeats)
    slower = results["made ahead in a thread"]["seconds"]["median"]
    faster = results["all made before"]["seconds"]["median"]
    for found in results.values():
        found["bytes_beside_table_and_moments"] = found["peak_rss_bytes"] - found["facts"]["table"]
    return {
        **{"case": "host", "part": "keeps up", "encoder": shape, "steps_a_turn": STEPS},
        **{"queries": made.options.batch_size, "pool": made.options.pool_size},
        **{"head_dim": made.options.head_dim, "dtype": options.dtype},
        "device_idle": round(1 - faster / slower, 4),
        "contenders": results,
    }


def steps(made: problem.Problem, scale: float, number: int, ahead: bool) -> Subject:
    """A turn does the next `STEPS` of ``number`` steps; compiled for all of their shapes."""
    source, labels = amazon_source(made.options, scale)
    model, params = ours.load(made)
    table = jnp.zeros((labels, made.options.head_dim), jnp.float32)
    step, state = ours.start(made.options, model, params, table)
    size = num_bytes(state.tables)
    del params, table  # a step donates them
    batches = []
    for batch, _, _ in itertools.islice(source.ahead(problem.STAGE, 0, 0), number):
        step.compile(state, batch)
        if not ahead:
            batches.append(batch)
    allocator.give_back()  # what making all this took, as before the first step of a training
    harness.forget_peak_rss()
    waiting = source.ahead(problem.STAGE, 0, 0) if ahead else ((batch,) for batch in batches)

    def turn(_: int) -> None:
        nonlocal state
        for batch, *_ in itertools.islice(waiting, STEPS):
            state, _ = step(state, batch, 1.0)
        jax.block_until_ready(state)
        allocator.give_back()  # two tables fit a small machine, two steps' memory does not

    facts = {"labels": labels, "table": size, "shapes_compiled": len(step.compiled)}
    return Subject(turn, facts, lambda: ours.memory(step))
