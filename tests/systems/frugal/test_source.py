"""Batches of the frugal family: cluster targets, rows of the graph, free weights by phase."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest
import tiny
from scipy.sparse import csr_matrix

from configs import frugal
from xmc_jax.contracts import Made
from xmc_jax.data.tokens.token_stores import TokenStore
from xmc_jax.systems import FAMILIES
from xmc_jax.systems.frugal.options import FrugalOptions
from xmc_jax.systems.frugal.source import GraphRows, make_source
from xmc_jax.training import stages
from xmc_jax.training.source import BatchSource
from xmc_jax.training.training_data import TrainingData

POINTS, LABELS, CLUSTERS = 40, 24, 8


def store_of(rng: np.random.Generator, texts: int) -> TokenStore:
    lengths = rng.integers(1, 9, texts)
    ids = rng.integers(0, 50, lengths.sum()).astype(np.uint16)
    return TokenStore(ids, np.concatenate([[0], np.cumsum(lengths)]))


def data_of(rng: np.random.Generator, soft: bool) -> TrainingData:
    labels = (rng.random((POINTS, LABELS)) < 0.2).astype(np.float32)
    labels[np.arange(POINTS), np.arange(POINTS) % LABELS] = 1
    if soft:
        labels *= rng.uniform(0.1, 1, labels.shape).astype(np.float32)
    return TrainingData(
        dataset=None,
        entry=None,
        train_tokens=store_of(rng, POINTS),
        label_tokens=store_of(rng, LABELS),
        labels=csr_matrix(labels),
        filters=None,
        held_out=None,
        test=None,
        first_text_row=0 if soft else None,
    )


def options_of(**changes: object) -> FrugalOptions:
    config = frugal.get_config("eclare,wordnet-mini")
    config.batch_size, config.pool_size, config.eta, config.beta = 16, 20, 2, 2
    config.phases, config.refresh_epochs = ((2, False, "pifa"), (2, True, "text")), 2
    return tiny.options(config, **changes)


def made(source: BatchSource, epoch: int, first: int = 0) -> Iterator[Made]:
    """Batches of an epoch, in its stage of the options' four epochs."""
    stage = stages.at(FAMILIES["frugal"].stages(options_of(), 4), epoch)
    return source.ahead(stage, epoch, first)


def source_of(
    data: TrainingData, rng: np.random.Generator, **changes: object
) -> tuple[BatchSource, dict[str, np.ndarray], GraphRows]:
    """A source, arrays of a refresh by name, and rows of the graph."""
    graph = GraphRows(
        rng.integers(0, 50, (LABELS, 4)).astype(np.int32),
        rng.random((LABELS, 4)).astype(np.float32),
    )
    source = make_source(
        options_of(**changes), data, 255, num_clusters=CLUSTERS, label_text=True, graph=graph
    )
    refresh = {
        "order": np.arange(POINTS),
        "offsets": np.array([0, POINTS]),
        "hard_negatives": rng.integers(0, LABELS, (POINTS, 4)).astype(np.int32),
        "label_clusters": rng.integers(0, CLUSTERS, LABELS).astype(np.int32),
    }
    return source, refresh, graph


@pytest.mark.parametrize("soft", [False, True])
def test_batches_against_a_plain_loop(soft):
    rng = np.random.default_rng(0)
    data = data_of(rng, soft)
    source, refresh, graph = source_of(data, rng)
    source.use(refresh)
    dense = data.labels.toarray()
    for epoch in (0, 3):
        queries = source.epoch_queries(epoch)
        assert (queries[-1] == -1).any()  # 40 points in batches of 16
        for rows, (batch, stats, label_rows) in zip(queries, made(source, epoch), strict=True):
            expected = np.zeros((16, CLUSTERS))
            for slot, row in enumerate(rows):
                for label in np.flatnonzero(dense[row]) if row >= 0 else ():
                    cluster = refresh["label_clusters"][label]
                    expected[slot, cluster] = max(expected[slot, cluster], dense[row, label])
            np.testing.assert_array_equal(batch.cluster_targets, expected.astype(np.float32))
            assert (
                batch.cluster_targets.dtype == batch.targets.dtype == (np.float32 if soft else bool)
            )
            for column, label in enumerate(batch.pool_ids):
                if label < LABELS:
                    assert label == label_rows[column]
                    np.testing.assert_array_equal(batch.graph_ids[column], graph.ids[label])
                    np.testing.assert_array_equal(batch.graph_weights[column], graph.weights[label])
                    np.testing.assert_array_equal(
                        batch.targets[rows >= 0, column], dense[rows[rows >= 0], label]
                    )
                else:
                    assert (
                        not batch.graph_weights[column].any() and not batch.where[:, column].any()
                    )
            assert (batch.free_weights is None) == (epoch < 2)
            assert len(batch.tokens.text_row) == 16 and len(batch.label_tokens.text_row) == 20
            assert stats["tokens"] > 0


def test_extra_positives_of_long_texts_have_room():
    """Texts that take a row each: as many rows as labels and extra places."""
    rng = np.random.default_rng(2)
    data = data_of(rng, False)
    offsets = 20 * np.arange(LABELS + 1)
    long = TokenStore(rng.integers(0, 50, offsets[-1]).astype(np.uint16), offsets)
    data = dataclasses.replace(data, label_tokens=long)
    changes = {"row_length": 32, "max_length": 32, "extra_positives": 3, "extra_pool_size": 24}
    source, refresh, _ = source_of(data, rng, **changes)
    source.use(refresh)
    rows = [(labels >= 0).sum() for _, _, labels in made(source, 0)]
    assert max(rows) > 20  # more than the pool without them


def test_batches_are_a_pure_function_of_seed_epoch_step_and_refresh():
    last = []
    for first in (0, 1):  # from the beginning, and from the second step on
        rng = np.random.default_rng(1)
        source, refresh, _ = source_of(data_of(rng, False), rng)
        source.use(refresh)
        last.append([batch for batch, _, _ in made(source, 1, first)][-1])
    jax.tree.map(np.testing.assert_array_equal, *last)


def test_without_a_refresh_there_are_no_clusters_yet():
    rng = np.random.default_rng(2)
    source, _, _ = source_of(data_of(rng, False), rng)
    batch, _, _ = next(made(source, 0))
    assert not batch.cluster_targets.any() and batch.cluster_targets.shape == (16, CLUSTERS)
