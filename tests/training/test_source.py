"""Batches are a pure function of seed, epoch, step and refresh; shapes are few; masks are right."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
import tiny
from scipy.sparse import csr_matrix

from configs import unidec
from xmc_jax.data.batching import batches
from xmc_jax.systems import encoders
from xmc_jax.training import refresh, training_data
from xmc_jax.training.refresh import Refresh
from xmc_jax.training.source import BatchSource

MAX_SEGMENTS = 255


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Mini's data with filter pairs, and a refresh with hard negatives drawn at random."""
    config = tiny.config("wordnet-mini", batch_size=32, pool_size=128, row_length=64, fill="random")
    dataset, entry, _ = training_data.read_dataset(config)
    texts = [*dataset.train.texts, *dataset.label_texts]
    tokenizer = encoders.tokenizer(config, texts, tmp_path_factory.mktemp("tokenizer"))
    data = training_data.load(config, dataset, entry, tokenizer)
    return config, data


def refresh_of(config, data, source: BatchSource, seed: int = 0) -> Refresh:
    rng = np.random.default_rng(seed)
    rows, levels = len(data.rows), source.levels
    if config.batching == "joined":
        smallest = config.cluster_schedule[0][1]
        levels = batches.cluster_levels(rows, config.batch_size, "joined", smallest)
    offsets = np.arange(2**levels + 1) * rows // 2**levels
    width = config.eta * config.refresh_epochs
    mined = rng.integers(0, data.num_labels, (data.labels.shape[0], width), np.int32)
    mined[rng.random(mined.shape) < 0.1] = -1
    return Refresh(rng.permutation(rows), offsets, mined)


def source_of(config, data, refreshed: bool = True, **changes) -> BatchSource:
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    source = BatchSource(config, data, MAX_SEGMENTS)
    if refreshed:
        source.use(refresh_of(config, data, source))
    return source


def assert_same(first, second) -> None:
    (batch, stats, labels), (other, other_stats, other_labels) = first, second
    jax.tree.map(np.testing.assert_array_equal, batch, other)
    assert stats == other_stats
    np.testing.assert_array_equal(labels, other_labels)


@pytest.mark.parametrize("batching", ["clusters", "joined", "random"])
def test_pure_function_of_epoch_and_step(setting, batching):
    source = source_of(*setting, batching=batching)
    whole = list(source.ahead(3, 0))
    assert len(whole) == source.steps_per_epoch
    again = source_of(*setting, batching=batching)
    list(itertools.islice(again.ahead(1, 5), 3))  # what it made before leaves no trace
    for step, made in zip(range(20, source.steps_per_epoch), again.ahead(3, 20)):
        assert_same(made, whole[step])
    other_epoch, other_seed = (
        next(source.ahead(4, 0)),
        next(source_of(*setting, batching=batching, seed=1).ahead(3, 0)),
    )
    for other in (other_epoch, other_seed):
        assert not np.array_equal(other[0].pool_ids, whole[0][0].pool_ids)
    other_refresh = source_of(*setting, batching=batching)
    other_refresh.use(refresh_of(source._config, setting[1], source, seed=1))
    assert not np.array_equal(next(other_refresh.ahead(3, 0))[0].pool_ids, whole[0][0].pool_ids)


@pytest.mark.parametrize("batching", ["clusters", "joined", "random"])
def test_every_row_once_an_epoch(setting, batching):
    config, data = setting
    source = source_of(config, data, batching=batching)
    queries = source.epoch_queries(2)
    assert queries.shape == (source.steps_per_epoch, source.batch_size)
    np.testing.assert_array_equal(np.sort(queries[queries >= 0]), data.rows)


@pytest.mark.parametrize("refreshed", [False, True])
def test_shapes_are_fixed_and_few(setting, refreshed):
    source = source_of(*setting, refreshed=refreshed)
    rows, others = set(), set()
    for epoch in range(3):
        for batch, stats, labels in source.ahead(epoch, 0):
            rows.add(batch.tokens.ids.shape[0])
            assert stats["rows"] <= batch.tokens.ids.shape[0]
            shapes = jax.tree.map(lambda x: (x.shape, str(x.dtype)), batch)
            tokens = [(s[1:] if len(s) > 1 else s, d) for s, d in shapes.tokens]
            others.add((tuple(tokens), shapes.pool_ids, shapes.targets, shapes.where, labels.shape))
    assert len(others) == 1
    assert len(rows) <= 4


def test_shapes_stay_few_over_refreshes(setting):
    """A run of many refreshes compiles a handful of programs, not a handful for each."""
    config, data = setting
    source, rows = source_of(config, data), set()
    for epoch in range(12):
        source.use(refresh_of(config, data, source, seed=epoch))
        rows |= {
            batch.tokens.ids.shape[0] for batch, _, _ in itertools.islice(source.ahead(epoch, 0), 8)
        }
    assert len(rows) <= 5


def test_targets_and_where_are_exact(setting):
    config, data = setting
    source = source_of(config, data)
    queries = source.epoch_queries(1)
    masked = 0
    for step, (batch, _, labels) in enumerate(itertools.islice(source.ahead(1, 0), 20)):
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
    config, data = setting
    unmasked = dataclasses.replace(data, filters=None)
    batch = next(source_of(config, unmasked).ahead(1, 0))[0]
    queries = source_of(config, data).epoch_queries(1)[0]
    there = batch.pool_ids < data.num_labels
    assert batch.where[queries >= 0][:, there].all()


def test_tokens_are_those_of_queries_and_labels(setting):
    config, data = setting
    source = source_of(config, data)
    batch, stats, labels = next(source.ahead(1, 7))
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
    config, data = setting
    config = config.copy_and_resolve_references()
    config.hard_negatives = True
    source = source_of(config, data)
    own = data.labels.indices[data.labels.indptr[data.rows]]  # the first positive of each row
    mined = np.full((data.labels.shape[0], 6), -1, np.int32)
    mined[data.rows] = own[:, None]
    source.use(dataclasses.replace(refresh_of(config, data, source), hard_negatives=mined))
    batch, _, _ = next(source.ahead(1, 0))
    queries = source.epoch_queries(1)[0]
    for slot, query in enumerate(queries):
        if query >= 0:
            ids = batch.pool_ids[batch.targets[slot]]
            assert set(ids) <= set(data.labels[query].indices)


def test_extra_positives_are_the_classifiers_alone(setting):
    config, data = setting
    source = source_of(config, data, extra_positives=2, extra_pool_size=24, beta=1)
    batch, _, labels = next(source.ahead(1, 0))
    assert batch.pool_ids.shape == (source.pool_size + 24,)
    assert labels.shape == (source.pool_size,)
    assert batch.tokens.text_row.shape == (source.batch_size + source.pool_size,)
    assert batch.targets[:, source.pool_size :].any()


def test_random_batches_before_the_first_refresh(setting):
    config, data = setting
    source = source_of(config, data, refreshed=False)
    queries = source.epoch_queries(0)
    np.testing.assert_array_equal(np.sort(queries[queries >= 0]), data.rows)
    assert queries.shape == (2**source.levels, source.batch_size)


def test_pool_smaller_than_a_batch(setting):
    config, data = setting
    with pytest.raises(ValueError, match=r"config\.pool_size = 20 is smaller than the \d+ queries"):
        source_of(config, data, pool_size=20)


def test_few_labels_and_few_rows():
    """A pool is never larger than the labels there are, nor a batch than the rows."""
    config = unidec.get_config("wordnet-mini,debug")
    config.batching = "random"
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
    source = BatchSource(config, data, MAX_SEGMENTS)
    assert (source.batch_size, source.pool_size, source.steps_per_epoch) == (10, 10, 1)
    batch, _, _ = next(source.ahead(0, 0))
    assert np.array_equal(batch.targets.sum(axis=1), np.ones(10))


def test_due_epochs():
    config = unidec.get_config("amazontitles1.3m")
    assert [refresh.due(config, e) for e in (0, 4, 5, 11)] == [0, 0, 5, 10]
    config.warmup_epochs = 2
    assert [refresh.due(config, e) for e in (0, 1, 2, 6, 7)] == [None, None, 2, 2, 7]
    config.batching, config.hard_negatives = "random", False
    assert refresh.due(config, 50) is None
