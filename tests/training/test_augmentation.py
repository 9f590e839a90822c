"""Label texts as points: which, with what targets, tokens and filters; the rest stays as it was."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from scipy.sparse import csr_matrix

from xmc_jax import metrics
from xmc_jax.contracts import Stage
from xmc_jax.data.dataset import Split, make_dataset
from xmc_jax.data.graph import gandalf
from xmc_jax.systems import encoders
from xmc_jax.systems.unidec.source import make_source
from xmc_jax.training import augmentation, training_data

ONE = Stage(0, 1)


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Mini's data with a tenth of the rows held out."""
    config = tiny.config(
        "wordnet-mini", batch_size=32, pool_size=128, row_length=64, held_out_share=0.1,
        gandalf__enabled=True, batching="random", hard_negatives=False,
    )  # fmt: skip
    options = tiny.options(config)
    dataset, entry, _ = training_data.read_dataset("wordnet-mini", "", max_length=16)
    texts = [*dataset.train.texts, *dataset.label_texts]
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = encoders.tokenizer(options.encoder, texts, folder)
    return options, training_data.load(options, dataset, entry, tokenizer)


def test_a_positive_that_is_a_filter_pair_is_no_evidence(setting, tmp_path):
    options, data = setting
    options = dataclasses.replace(options, held_out_share=0.0)
    train, test = data.dataset.train, data.dataset.test
    row = int(np.argmax(np.diff(train.labels.indptr)))
    label = int(train.labels[row].indices[0])
    pairs = np.array(sorted([*map(tuple, train.filter_pairs.tolist()), (row, label)]))
    train = Split(train.texts, train.labels, pairs)
    dataset = make_dataset("barred", train, test, data.dataset.label_texts)
    texts = [*train.texts, *dataset.label_texts]
    tokenizer = encoders.tokenizer(options.encoder, texts, tmp_path)
    loaded = training_data.load(options, dataset, data.entry, tokenizer)
    expected = train.labels.tolil()
    expected[row, label] = 0
    assert (loaded.labels != expected.tocsr()).nnz == 0 and loaded.labels.has_canonical_format
    assert loaded.dataset.train.labels[row, label] == 1  # propensities are of the original
    made = augmentation.augment(options, loaded)
    targets = gandalf.gandalf_targets(loaded.labels, delta=0.1)
    assert (made.labels[len(train.texts) :] != targets).nnz == 0
    unmasked = dataclasses.replace(options, mask_filter_pairs=False)
    assert training_data.load(unmasked, dataset, data.entry, tokenizer).labels[row, label] == 1


def augmented(setting, **changes):
    options, data = setting
    gandalf_options = dataclasses.replace(options.gandalf, **changes)
    return augmentation.augment(dataclasses.replace(options, gandalf=gandalf_options), data)


def numbers(setting, made) -> tuple[np.ndarray, np.ndarray]:
    """Rows of D and labels of Z that take part."""
    border = setting[1].labels.shape[0]
    return made.rows[made.rows < border], made.rows[made.rows >= border] - border


def test_disabled_changes_nothing(setting):
    _, data = setting
    assert augmented(setting, enabled=False) is data
    without = tiny.config("wordnet-mini")
    del without.gandalf  # a work directory from before there was such a field
    assert augmentation.augment(tiny.options(without), data) is data


def test_points_are_d_and_z(setting):
    _, data = setting
    made = augmented(setting)
    num_points, num_labels = data.labels.shape
    assert made.labels.shape == (num_points + num_labels, num_labels)
    assert (made.labels[:num_points] != data.labels).nnz == 0
    expected = gandalf.gandalf_targets(data.labels, delta=0.1)
    assert (made.labels[num_points:] != expected).nnz == 0
    assert made.first_text_row == num_points and made.num_labels == num_labels
    assert (made.filters[:num_points] != data.filters).nnz == 0
    for name in ("dataset", "held_out", "test", "label_tokens"):
        assert getattr(made, name) is getattr(data, name)
    rows = np.array([num_points + 3, 5, num_points])
    ids, lengths = made.train_tokens.gather(rows)
    parts = [data.label_tokens.gather([3]), data.train_tokens.gather([5])]
    parts.append(data.label_tokens.gather([0]))
    np.testing.assert_array_equal(ids, np.concatenate([part[0] for part in parts]))
    np.testing.assert_array_equal(lengths, np.concatenate([part[1] for part in parts]))


def test_held_out_rows_are_unseen(setting):
    """Without the held-out rows in the data at all the graph is the same."""
    _, data = setting
    assert len(data.held_out.rows) > 100
    made = augmented(setting)
    assert not np.isin(made.rows, data.held_out.rows).any()
    others = np.setdiff1d(np.arange(data.labels.shape[0]), data.held_out.rows)
    alone = gandalf.gandalf_targets(data.labels[others], delta=0.1)
    assert (made.labels[made.first_text_row :] != alone).nnz == 0


def test_batches_hold_soft_targets(setting):
    options, made = setting[0], augmented(setting)
    source = make_source(options, made, 255)
    assert source.shapes.steps == -(-len(made.rows) // 32)
    soft, queries = 0, source.epoch_queries(0)
    for step, (batch, _, labels) in zip(range(6), source.ahead(ONE, 0, 0)):
        assert batch.targets.dtype == np.float32 and batch.where.dtype == bool
        there = labels >= 0
        for slot, row in enumerate(queries[step]):
            barred = np.isin(labels[there], made.filters[row].indices)
            expected = np.where(barred, 0, made.labels[row].toarray()[0, labels[there]])
            np.testing.assert_array_equal(batch.targets[slot, there], expected)
            if row >= made.first_text_row:
                own = labels[there] == row - made.first_text_row
                assert own.sum() == 1 and batch.where[slot, there][own]
                soft += ((expected > 0) & (expected < 1)).sum()
    assert soft > 0
    again = make_source(options, augmented(setting), 255)
    first, second = next(source.ahead(ONE, 1, 3)), next(again.ahead(ONE, 1, 3))
    jax.tree.map(np.testing.assert_array_equal, first[0], second[0])


def test_subsets_of_the_points(setting):
    _, data = setting
    points, texts = numbers(setting, augmented(setting, points="labels"))
    assert len(points) == 0 and len(texts) == data.num_labels
    points, texts = numbers(setting, augmented(setting, points="sample"))
    assert len(points) + len(texts) == len(data.rows)
    share = len(points) / len(data.rows)
    expected = len(data.rows) / (len(data.rows) + data.num_labels)
    assert abs(share - expected) < 0.05
    assert np.isin(points, data.rows).all()


@pytest.mark.parametrize("order", augmentation.ORDERS)
def test_share_of_the_labels(setting, order):
    _, data = setting
    found = {}
    for share in (0.0, 0.25, 0.75, 1.0):
        points, texts = numbers(setting, augmented(setting, share=share, order=order))
        np.testing.assert_array_equal(points, data.rows)
        assert len(texts) == round(share * data.num_labels)
        found[share] = texts
    bins = metrics.frequency_bins(data.labels)
    out = np.setdiff1d(found[1.0], found[0.75])
    if order == "tail":
        assert bins[found[0.75]].min() >= bins[out].max() and bins[found[0.25]].min() == 5
    else:
        assert abs(bins[found[0.75]].mean() - bins.mean()) < 0.15
    assert set(found[0.25]) <= set(found[0.75])


def test_labels_that_are_points_can_stay_out(setting):
    _, data = setting
    _, texts = numbers(setting, augmented(setting, skip_labels_that_are_points=True))
    seen = {data.dataset.train.texts[row].strip().casefold() for row in data.rows}
    wanted = [text.strip().casefold() not in seen for text in data.dataset.label_texts]
    np.testing.assert_array_equal(texts, np.flatnonzero(wanted))
    assert 0 < len(texts) < data.num_labels


def small(label_texts, rows, pairs=()) -> training_data.TrainingData:
    labels = np.zeros((len(rows), len(label_texts)), np.float32)
    for row, ids in enumerate(rows):
        labels[row, ids] = 1
    pairs = np.array(pairs, np.int64).reshape(-1, 2)
    split = Split([f"point {row}" for row in range(len(rows))], csr_matrix(labels), pairs)
    dataset = make_dataset("small", split, split.take(np.zeros(0, int)), label_texts)
    store = lambda n: training_data.TokenStore(np.arange(n, dtype=np.uint16), np.arange(n + 1))
    filters = training_data.filter_matrix(pairs, labels.shape) if len(pairs) else None
    return training_data.TrainingData(
        dataset, None, store(len(rows)), store(len(label_texts)), split.labels, filters, None, None
    )


@pytest.mark.parametrize("pairs", [(), [(0, 3)]])
def test_labels_of_the_same_text_are_neither_positive_nor_negative(setting, pairs):
    """Labels 0, 2 and 3 share a text; 0 and 2 stand together in a point, so they are positives."""
    data = small(["Fir", "oak", " fir", "FIR", ""], [[0, 2], [1, 3], [0, 1, 2], [4]], pairs)
    made = augmentation.augment(setting[0], data)
    barred = made.filters[4:].toarray()
    assert [np.flatnonzero(row).tolist() for row in barred] == [[3], [], [3], [0, 2], []]
    assert made.filters[:4].toarray().sum() == len(pairs)
    assert not made.labels[8].nnz  # a label without text poses no point
    unmasked = dataclasses.replace(setting[0], mask_filter_pairs=False)
    assert augmentation.augment(unmasked, dataclasses.replace(data, filters=None)).filters is None


def test_no_filters_where_there_is_nothing_to_filter(setting):
    made = augmentation.augment(setting[0], small(["a", "b"], [[0], [1], [0, 1]]))
    assert made.filters is None
    np.testing.assert_array_equal(made.rows, np.arange(5))


def test_nothing_left(setting):
    with pytest.raises(ValueError, match=r"leaves no training point.*Set gandalf\.points=all"):
        augmented(setting, points="labels", share=0.0)
