"""A training step of each frugal system, and of UniDEC with its bag encoder, turn by turn.

The same queries, pool and label vectors' size for all, all parts of a system on (InceptionXML-LF's
second phase), random pools. Texts have LF-AmazonTitles-1.3M's lengths; a label's row of the graph
has as many tokens as it may have.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs import frugal
from experiments.benchmarks import harness, ours, problem
from experiments.benchmarks.harness import Contender, Subject
from xmc_jax.contracts import Stage, TrainState, Weights
from xmc_jax.models.encoders.bag import BagEncoder
from xmc_jax.models.heads.unidec import UniDEC
from xmc_jax.runs import settings
from xmc_jax.systems import FAMILIES, encoders
from xmc_jax.systems.frugal.family import frugal_model
from xmc_jax.systems.frugal.source import GraphRows
from xmc_jax.systems.frugal.system import FrugalSystem
from xmc_jax.systems.unidec.source import make_source
from xmc_jax.training.source import BatchSource
from xmc_jax.training.step import CompiledStep
from xmc_jax.training.training_data import TrainingData

VOCABULARY, LABELS, LABELS_A_POINT = 30_000, 100_000, 5.0
UNIDEC = "unidec, bag"


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One result: all systems, turn by turn."""
    queries, pool, dim = (8, 32, 64) if options.quick else (256, 2560, 256)
    labels = 300 if options.quick else options.labels or LABELS
    size = (options.queries or queries, options.pool or pool, dim, labels)
    names = ("astec", "inceptionxml-lf") if options.quick else frugal.SYSTEMS  # the least, the most
    contenders = [Contender(name, frugal_step, (name, *size)) for name in names]
    contenders.append(Contender(UNIDEC, unidec_step, size))
    results = harness.contest(options, contenders, repeats=10, warmup=2)
    yield {
        "case": "frugal_step",
        **dict(zip(("queries", "pool", "dim", "labels"), size)),
        "times_of_astec": harness.ratios(results, "astec"),
        "contenders": results,
    }


def _data(queries: int, labels: int) -> TrainingData:
    return problem.amazon_shaped(4 * queries, labels, VOCABULARY, labels_a_point=LABELS_A_POINT)


def frugal_step(name: str, queries: int, pool: int, dim: int, labels: int) -> Subject:
    """The step of a frugal system, by the classes that the training loop uses."""
    config = frugal.get_config(f"{name},amazontitles1.3m")
    config.batch_size, config.pool_size, config.encoder.dim = queries, pool, dim
    config.hard_negatives, config.held_out_share = False, 0.0
    config.phases = config.phases[-1:]
    options = settings.options_of(config)
    (stage,) = FAMILIES["frugal"].stages(options, 1)
    data = _data(queries, labels)
    model = frugal_model(
        options, encoders.queries(options.encoder, VOCABULARY, options.max_length), labels
    )
    rng = np.random.default_rng(0)
    graph = None
    if model.label_graph:
        shape = (labels, options.graph.tokens)
        ids = rng.integers(1, VOCABULARY, shape, np.int32)
        graph = GraphRows(ids, rng.random(shape, np.float32) + 0.1)
    system = FrugalSystem(options, model, graph)
    params = model.init(jax.random.key(0), rng.random(VOCABULARY, np.float32) + 0.1)
    weights = Weights(params, {"moving": params.pop("moving")}, {})
    state = system.first_state(data, weights, measure=True)
    return _subject(CompiledStep(system.make_step("all")), state, system.source(data), stage)


def unidec_step(queries: int, pool: int, dim: int, labels: int) -> Subject:
    """UniDEC's step: both heads of ``dim``, both losses."""
    options = problem.make_options(queries, pool, dim)
    encoder = BagEncoder(VOCABULARY, dim)
    model = UniDEC(encoder, dim, options.head_dropout)
    table = jnp.zeros((labels, dim), jnp.float32)
    step, state = ours.start(options, model, model.init(jax.random.key(0)), table)
    source = make_source(options, _data(queries, labels), encoder.max_segments)
    return _subject(step, state, source, problem.STAGE)


def _subject(step: CompiledStep, state: TrainState, source: BatchSource, stage: Stage) -> Subject:
    """Turns on the first batch of a source."""
    batch = next(source.ahead(stage, 0, 0))[0]
    step.compile(state, batch)

    def turn(_: int) -> None:
        nonlocal state
        state, _ = step(state, batch, 1.0)
        jax.block_until_ready(state)

    return Subject(turn, {}, lambda: ours.memory(step))
