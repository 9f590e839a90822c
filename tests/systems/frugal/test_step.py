"""The frugal step: its loss against plain numpy, and which parts of the state it moves."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xmc_jax.contracts import TokenBatch, TrainState
from xmc_jax.systems.frugal.step import TABLE, FrugalBatch, frugal_loss, make_frugal_step
from xmc_jax.training.options import Rates
from xmc_jax.training.state import make_optimizer, new_state

ENCODER = ("tokens", "queries")
QUERIES, POOL, LABELS, CLUSTERS, DIM = 5, 7, 30, 4, 3


@dataclasses.dataclass(frozen=True)
class LookUp:
    """A model whose features are parameters; free weights are added to label vectors."""

    def features(self, params, tokens, *, key=None, train=False):
        moving = {**params["moving"], "calls": params["moving"]["calls"] + 1}
        return (params["queries"]["meta"], params["queries"]["extreme"]), moving

    def text_vectors(self, params, tokens):
        return params["tokens"]["embedding"][tokens.text_row]

    def weighted_sum(self, params, ids, weights):
        return jnp.einsum("pt,ptd->pd", weights, params["tokens"]["embedding"][ids])

    def label_vectors(self, params, texts, graphs, rows, *, key=None, train=False):
        moving = {**params["moving"], "calls": 2 * params["moving"]["calls"]}
        parts = [part for part in (texts, graphs, rows) if part is not None]
        return sum(parts), moving

    def cluster_scores(self, params, meta):
        return meta @ params["meta"]["kernel"]


def tokens_of(num_texts: int) -> TokenBatch:
    rows, ones = np.arange(num_texts, dtype=np.int32), np.ones((num_texts, 1), np.uint8)
    return TokenBatch(ones, ones, 0 * ones, rows, ones[:, 0])


def state_of(rng: np.random.Generator):
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    params = {
        "tokens": {"embedding": draw(20, DIM)},
        "queries": {"meta": draw(QUERIES, DIM), "extreme": draw(QUERIES, DIM)},
        "meta": {"kernel": draw(DIM, CLUSTERS)},
        "offset": jnp.float32(-1.5),
    }
    phase = {"label_clusters": jnp.zeros(LABELS, jnp.int32), "free_weights": jnp.array(True)}
    model_state = {"moving": {"calls": jnp.float32(3)}, "phase": phase}
    optimizer = make_optimizer(Rates(encoder=0.1, heads=0.2, table=0.05), encoder_names=ENCODER)
    tables = {TABLE: draw(LABELS, DIM)}
    return new_state(params, optimizer, tables, model_state=model_state), optimizer


def whole(state: TrainState):
    """Parameters with moving values among them, as the loss takes them."""
    return {**state.params, "moving": state.model_state["moving"]}


def batch_of(rng: np.random.Generator, *, free: bool) -> FrugalBatch:
    ids = np.sort(rng.choice(LABELS, POOL - 1, replace=False))
    where = rng.random((QUERIES, POOL)) < 0.8
    where[:, -1] = where[-1] = False  # a pad, and an empty slot
    return FrugalBatch(
        tokens=tokens_of(QUERIES),
        label_tokens=tokens_of(POOL),
        graph_ids=rng.integers(0, 20, (POOL, 2)),
        graph_weights=rng.random((POOL, 2)).astype(np.float32),
        pool_ids=np.append(ids, LABELS).astype(np.int32),
        targets=(rng.random((QUERIES, POOL)) * where).astype(np.float32),
        where=where,
        cluster_targets=rng.random((QUERIES, CLUSTERS)).astype(np.float32),
        free_weights=np.True_ if free else None,
    )


def plain_bce(scores, targets, where) -> float:
    p = 1 / (1 + np.exp(-scores))
    terms = -(targets * np.log(p) + (1 - targets) * np.log(1 - p))
    counted = where.any(axis=1)
    return float((terms * where).sum() / counted.sum())


@pytest.mark.parametrize("free", [False, True])
def test_loss_equals_plain_numpy(free):
    rng = np.random.default_rng(0)
    state, _ = state_of(rng)
    batch = batch_of(rng, free=free)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), state.params)
    words = params["tokens"]["embedding"]
    labels = words[:POOL] + np.einsum("pt,ptd->pd", batch.graph_weights, words[batch.graph_ids])
    rows = None
    if free:
        rows = np.zeros((POOL, DIM))
        rows[:-1] = np.asarray(state.tables[TABLE].values)[batch.pool_ids[:-1]]
        labels = labels + rows
    scores = params["queries"]["extreme"] @ labels.T - 1.5
    loss_labels = plain_bce(scores, batch.targets, batch.where)
    clusters = params["queries"]["meta"] @ params["meta"]["kernel"]
    there = batch.where.any(axis=1, keepdims=True) & np.ones(CLUSTERS, bool)
    loss_clusters = plain_bce(clusters, batch.cluster_targets, there)
    found, (parts, moving) = frugal_loss(
        LookUp(), whole(state), rows, batch, jax.random.key(0), meta_weight=0.3
    )
    np.testing.assert_allclose(found, loss_labels + 0.3 * loss_clusters, rtol=1e-5)
    np.testing.assert_allclose(parts["loss_labels"], loss_labels, rtol=1e-5)
    np.testing.assert_allclose(parts["loss_clusters"], loss_clusters, rtol=1e-5)
    assert float(moving["calls"]) == 8  # (3 + 1) * 2: one call sees what the other left


@pytest.mark.parametrize("free", [False, True])
def test_what_a_step_moves(free):
    rng = np.random.default_rng(1)
    state, optimizer = state_of(rng)
    batch = batch_of(rng, free=free)
    before = jax.tree.map(np.array, state)
    step = make_frugal_step(LookUp(), optimizer, meta_weight=1.0, table_rate=0.05, seed=0)
    after, parts = step(state, batch, np.float32(0.5))
    assert jax.tree.structure(after) == jax.tree.structure(before)
    for found, expected in zip(jax.tree.leaves(after), jax.tree.leaves(before)):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert int(after.step) == 1 and float(after.model_state["moving"]["calls"]) == 8
    phases = (after.model_state["phase"], before.model_state["phase"])
    jax.tree.map(np.testing.assert_array_equal, *phases)
    # Adam's first update is the rate itself.
    for name, part, rate in (("meta", "kernel", 0.2), ("queries", "extreme", 0.1)):
        moved = np.abs(after.params[name][part] - before.params[name][part])
        moved = moved[:-1] if name == "queries" else moved  # the last one is an empty slot
        np.testing.assert_allclose(moved, 0.5 * rate, rtol=1e-3)
    tables = [np.asarray(state.tables[TABLE].values) for state in (after, before)]
    touched = np.flatnonzero(np.any(tables[0] != tables[1], axis=1))
    assert touched.tolist() == (batch.pool_ids[:-1].tolist() if free else [])
    assert int(after.tables[TABLE].state.step) == (1 if free else 0)
    assert {"loss", "loss_labels", "loss_clusters", "gradient_norm"} == set(parts)
