"""Batches are a pure function of seed, epoch, step and refresh; shapes are few; masks are right."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
import tiny
from scipy.sparse import csr_matrix

from xmc_jax.contracts import Stage
from xmc_jax.data.batching import batches
from xmc_jax.systems import encoders
from xmc_jax.systems.unidec.source import make_source
from xmc_jax.training import training_data
from xmc_jax.training.source import BatchSource

MAX_SEGMENTS = 255
ONE = Stage(0, 1)


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Mini's data with filter pairs, and a refresh with hard negatives drawn at random."""
    config = tiny.config("wordnet-mini", batch_size=32, pool_size=128, row_length=64, fill="random")
    options = tiny.options(config)
    dataset, entry, _ = training_data.read_dataset("wordnet-mini", "", max_length=16)
    texts = [*dataset.train.texts, *dataset.label_texts]
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = encoders.tokenizer(options.encoder, texts, folder)
    return options, training_data.load(options, dataset, entry, tokenizer)


def refresh_of(options, data, source: BatchSource, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays by name; a dict is what a source asks of a refresh."""
    rng = np.random.default_rng(seed)
    rows, levels = len(data.rows), source.shapes.levels
    if options.batching == "joined":
        smallest = options.cluster_schedule[0][1]
        levels = batches.cluster_levels(rows, options.batch_size, "joined", smallest)
    offsets = np.arange(2**levels + 1) * rows // 2**levels
    width = options.eta * options.refresh_epochs
    mined = rng.integers(0, data.num_labels, (data.labels.shape[0], width), np.int32)
    mined[rng.random(mined.shape) < 0.1] = -1
    return {"order": rng.permutation(rows), "offsets": offsets, "hard_negatives": mined}


def source_of(options, data, refreshed: bool = True, drawn: int = 0, **changes) -> BatchSource:
    options = dataclasses.replace(options, **changes)
    source = make_source(options, data, MAX_SEGMENTS)
    if refreshed:
        source.use(refresh_of(options, data, source, seed=drawn))
    return source


def assert_same(first, second) -> None:
    (batch, stats, labels), (other, other_stats, other_labels) = first, second
    jax.tree.map(np.testing.assert_array_equal, batch, other)
    assert stats == other_stats
    np.testing.assert_array_equal(labels, other_labels)


@pytest.mark.parametrize("batching", ["clusters", "joined", "random"])
def test_pure_function_of_epoch_and_step(setting, batching):
    source = source_of(*setting, batching=batching)
    whole = list(source.ahead(ONE, 3, 0))
    assert len(whole) == source.shapes.steps
    again = source_of(*setting, batching=batching)
    list(itertools.islice(again.ahead(ONE, 1, 5), 3))  # what it made before leaves no trace
    for step, made in zip(range(20, source.shapes.steps), again.ahead(ONE, 3, 20)):
        assert_same(made, whole[step])
    other_epoch = next(source.ahead(ONE, 4, 0))
    other_seed = next(source_of(*setting, batching=batching, seed=1).ahead(ONE, 3, 0))
    other_refresh = next(source_of(*setting, drawn=1, batching=batching).ahead(ONE, 3, 0))
    for other in (other_epoch, other_seed, other_refresh):
        assert not np.array_equal(other[0].pool_ids, whole[0][0].pool_ids)


@pytest.mark.parametrize("batching", ["clusters", "joined", "random"])
def test_every_row_once_an_epoch(setting, batching):
    options, data = setting
    source = source_of(options, data, batching=batching)
    queries = source.epoch_queries(2)
    assert queries.shape == (source.shapes.steps, source.shapes.queries)
    np.testing.assert_array_equal(np.sort(queries[queries >= 0]), data.rows)


@pytest.mark.parametrize("refreshed", [False, True])
def test_shapes_are_fixed_and_few(setting, refreshed):
    source = source_of(*setting, refreshed=refreshed)
    rows, others = set(), set()
    for epoch in range(3):
        for batch, stats, labels in source.ahead(ONE, epoch, 0):
            rows.add(batch.tokens.ids.shape[0])
            assert stats["rows"] <= batch.tokens.ids.shape[0]
            shapes = jax.tree.map(lambda x: (x.shape, str(x.dtype)), batch)
            tokens = [(s[1:] if len(s) > 1 else s, d) for s, d in shapes.tokens]
            others.add((tuple(tokens), shapes.pool_ids, shapes.targets, shapes.where, labels.shape))
    assert len(others) == 1
    assert len(rows) <= 4


def test_shapes_stay_few_over_refreshes(setting):
    """A run of many refreshes compiles a handful of programs, not a handful for each."""
    options, data = setting
    source, rows = source_of(options, data), set()
    for epoch in range(12):
        source.use(refresh_of(options, data, source, seed=epoch))
        rows |= {
            batch.tokens.ids.shape[0]
            for batch, _, _ in itertools.islice(source.ahead(ONE, epoch, 0), 8)
        }
    assert len(rows) <= 5


def test_targets_and_where_are_exact(setting):
    options, data = setting
    source = source_of(options, data)
    queries = source.epoch_queries(1)
    masked = 0
    for step, (batch, _, labels) in enumerate(itertools.islice(source.ahead(ONE, 1, 0), 20)):
        there = batch.pool_ids < data.num_labels
        np.testing.assert_array_equal(labels, np.where(there, batch.pool_ids, -1))
        ids = batch.pool_ids[there]
        for slot, query in enumerate(queries[step]):
            if query < 0:
                assert not batch.where[slot].any() and not batch.targets[slot].any()
                continue
            own = data.labels[query].indices
            barred = data.filters[query].indices
            np.testing.assert_array_equal(batch.targets[slot, there], np.isin(ids, own))
            np.testing.assert_array_equal(batch.where[slot, there], ~np.isin(ids, barred))
            assert batch.targets[slot].any()
            masked += np.isin(ids, barred).sum()
        assert not batch.where[:, ~there].any()
    assert masked > 0


def test_without_masking_filter_pairs_count(setting):
    options, data = setting
    unmasked = dataclasses.replace(data, filters=None)
    batch = next(source_of(options, unmasked).ahead(ONE, 1, 0))[0]
    queries = source_of(options, data).epoch_queries(1)[0]
    there = batch.pool_ids < data.num_labels
    assert batch.where[queries >= 0][:, there].all()


def test_tokens_are_those_of_queries_and_labels(setting):
    options, data = setting
    source = source_of(options, data)
    batch, stats, labels = next(source.ahead(ONE, 1, 7))
    queries = source.epoch_queries(1)[7]
    tokens, number = batch.tokens, 0
    for text, (store, row) in enumerate(
        [(data.train_tokens, q) for q in queries] + [(data.label_tokens, i) for i in labels]
    ):
        ids, _ = store.gather(np.array([row]))
        segment = tokens.text_segment[text]
        mine = tokens.segment_ids[tokens.text_row[text]] == segment
        assert (segment == 0) == (len(ids) == 0)
        if segment:
            np.testing.assert_array_equal(tokens.ids[tokens.text_row[text]][mine], ids)
            np.testing.assert_array_equal(
                tokens.positions[tokens.text_row[text]][mine], range(len(ids))
            )
        number += len(ids)
    assert stats["tokens"] == number


def test_no_hard_negative_is_an_own_positive(setting):
    """Mined lists never hold positives or filter pairs; were they to, targets would be right."""
    options, data = setting
    assert options.hard_negatives
    source = source_of(options, data)
    own = data.labels.indices[data.labels.indptr[data.rows]]  # the first positive of each row
    mined = np.full((data.labels.shape[0], 6), -1, np.int32)
    mined[data.rows] = own[:, None]
    source.use(refresh_of(options, data, source) | {"hard_negatives": mined})
    batch, _, _ = next(source.ahead(ONE, 1, 0))
    queries = source.epoch_queries(1)[0]
    for slot, query in enumerate(queries):
        if query >= 0:
            ids = batch.pool_ids[batch.targets[slot]]
            assert set(ids) <= set(data.labels[query].indices)


def test_extra_positives_are_the_classifiers_alone(setting):
    options, data = setting
    source = source_of(options, data, extra_positives=2, extra_pool_size=24, beta=1)
    batch, _, labels = next(source.ahead(ONE, 1, 0))
    assert batch.pool_ids.shape == (source.shapes.labels + 24,)
    assert labels.shape == (source.shapes.labels,)
    assert batch.tokens.text_row.shape == (source.shapes.queries + source.shapes.labels,)
    assert batch.targets[:, source.shapes.labels :].any()


def test_random_batches_before_the_first_refresh(setting):
    options, data = setting
    source = source_of(options, data, refreshed=False)
    queries = source.epoch_queries(0)
    np.testing.assert_array_equal(np.sort(queries[queries >= 0]), data.rows)
    assert queries.shape == (2**source.shapes.levels, source.shapes.queries)


def test_pool_smaller_than_a_batch(setting):
    options, data = setting
    with pytest.raises(ValueError, match=r"config\.pool_size = 20 is smaller than the \d+ queries"):
        source_of(options, data, pool_size=20)


def test_few_labels_and_few_rows(setting):
    """A pool is never larger than the labels there are, nor a batch than the rows."""
    store = training_data.TokenStore(np.arange(10, dtype=np.uint16), np.arange(11))
    data = training_data.TrainingData(
        dataset=None,
        entry=None,
        train_tokens=store,
        label_tokens=store,
        labels=csr_matrix(np.eye(10, dtype=np.float32)),
        filters=None,
        held_out=None,
        test=None,
    )
    source = source_of(setting[0], data, refreshed=False, batching="random")
    assert source.shapes == (10, 10, 0, 1)
    batch, _, _ = next(source.ahead(ONE, 0, 0))
    assert np.array_equal(batch.targets.sum(axis=1), np.ones(10))
