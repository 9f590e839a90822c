"""A compiled step needs a model, options and shapes, not a run: 1.3 million labels, no arrays."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny

from xmc_jax.contracts import TokenBatch
from xmc_jax.models.encoders.bag import BagEncoder
from xmc_jax.models.encoders.two_towers import TwoTowers
from xmc_jax.models.heads.unidec import UniDEC
from xmc_jax.systems import encoders
from xmc_jax.systems.frugal.family import frugal_model
from xmc_jax.systems.frugal.step import FrugalBatch
from xmc_jax.systems.frugal.system import FrugalSystem
from xmc_jax.systems.unidec.step import StepBatch
from xmc_jax.systems.unidec.system import UniDECSystem
from xmc_jax.training.state import num_bytes
from xmc_jax.training.step import CompiledStep

LABELS, QUERIES, POOL, ROWS, LENGTH = 1_300_000, 4, 8, 3, 32
BAG = BagEncoder(500, 16)


def shape(*dims: int, kind: type = np.bool_) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, kind)


def tokens(texts: int) -> TokenBatch:
    packed = [shape(ROWS, LENGTH, kind=kind) for kind in (np.uint16, np.uint8, np.uint16)]
    return TokenBatch(*packed, shape(texts, kind=np.int32), shape(texts, kind=np.uint8))


def unidec(towers: int, trains: str):
    options = tiny.options(tiny.config("x", lr__weight_decay=0.0))
    encoder = BAG if towers == 1 else TwoTowers(BAG, BAG)
    pair = shape(QUERIES, POOL)
    texts = (tokens(QUERIES + POOL), None) if towers == 1 else (tokens(QUERIES), tokens(POOL))
    batch = StepBatch(texts[0], shape(POOL, kind=np.int32), pair, pair, texts[1])
    return UniDECSystem(options, UniDEC(encoder, options.head_dim)), trains, batch


def frugal(name: str, free: bool):
    options = tiny.options(tiny.frugal_config(name, "x"))
    queries = encoders.queries(options.encoder, 500, options.max_length)
    model = frugal_model(options, queries, LABELS)
    graph = (POOL, options.graph.tokens)
    batch = FrugalBatch(
        tokens=tokens(QUERIES),
        label_tokens=tokens(POOL) if model.label_text else None,
        graph_ids=shape(*graph, kind=np.int32) if model.label_graph else None,
        graph_weights=shape(*graph, kind=np.float32) if model.label_graph else None,
        pool_ids=shape(POOL, kind=np.int32),
        targets=shape(QUERIES, POOL),
        where=shape(QUERIES, POOL),
        cluster_targets=shape(QUERIES, model.num_clusters),
        free_weights=shape() if free else None,
    )
    return FrugalSystem(options, model), "all", batch


CASES = {
    "unidec": lambda: unidec(1, "all"),
    "encoder alone": lambda: unidec(1, "encoder"),
    "tables alone": lambda: unidec(1, "tables"),
    "two towers": lambda: unidec(2, "all"),
    "astec": lambda: frugal("astec", True),
    "eclare, no free weights": lambda: frugal("eclare", False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_from_shapes_alone(case):
    system, trains, batch = CASES[case]()
    weights = system.weight_shapes(LABELS)
    state = jax.eval_shape(
        lambda weights: system.first_state(
            SimpleNamespace(num_labels=LABELS), weights, measure=True
        ),
        weights._replace(tables={}),
    )
    same = lambda found, expected: jax.tree.map(
        lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)),
        found,
        expected,
    )
    same(state.weights, weights)  # what a checkpoint is read into
    after, parts = jax.eval_shape(system.make_step(trains), state, batch, np.float32(1))
    same(after, state)
    assert all(part.shape == () for part in parts.values())
    step = CompiledStep(system.make_step(trains))
    memory = step.compile(state, batch).memory_analysis()
    assert step.compile(state, batch) is step.compile(state, batch) and len(step.compiled) == 1
    assert memory.alias_size_in_bytes >= num_bytes(state.tables) > 2 * 4 * LABELS * 16
    if case in ("unidec", "two towers"):  # of the others, C numbers are as many as L / 4
        assert memory.temp_size_in_bytes < 2**20
