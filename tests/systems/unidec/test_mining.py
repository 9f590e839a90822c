"""A refresh: what it writes, that it is whole or absent, and which ones are kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from xmc_jax.models.encoders.bag import BagEncoder
from xmc_jax.models.heads.unidec import UniDEC
from xmc_jax.systems import encoders
from xmc_jax.systems.embedding import Embedder
from xmc_jax.training import refresh, training_data
from xmc_jax.training.source import BatchSource


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Mini, an untrained model, and what a refresh needs of them."""
    config = tiny.config("wordnet-mini", batch_size=32, pool_size=128, row_length=64)
    dataset, entry, _ = training_data.read_dataset(config)
    texts = [*dataset.train.texts, *dataset.label_texts]
    tokenizer = encoders.tokenizer(config, texts, tmp_path_factory.mktemp("tokenizer"))
    data = training_data.load(config, dataset, entry, tokenizer)
    model = UniDEC(BagEncoder(tokenizer.get_vocab_size(), 16), 16)
    params = model.init(jax.random.key(0))
    return config, data, Embedder(model, row_length=64), params


def refresh(folder: Path, setting, epoch: int = 3, **changes):
    config, data, embedder, params = setting
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(changes)
    levels = BatchSource(config, data, 255).levels
    return refresh.refresh(folder, epoch, config, data, embedder, params, levels)


def test_hard_negatives_are_the_nearest_other_labels(setting, tmp_path):
    """Against a plain loop over rows; neither positives nor filter pairs, best first."""
    _, data, embedder, params = setting
    found = refresh(tmp_path, setting)
    queries = embedder.de(params, data.train_tokens)
    labels = embedder.de(params, data.label_tokens)
    assert found.hard_negatives.shape == (data.labels.shape[0], 6)
    assert found.hard_negatives.dtype == np.int32
    trained = set(data.rows.tolist())
    barred = 0
    for row in range(0, data.labels.shape[0], 7):
        mined = found.hard_negatives[row]
        if row not in trained:  # held out, or without labels
            assert (mined == -1).all()
            continue
        scores = labels @ queries[row]
        own = [*data.labels[row].indices, *data.filters[row].indices]
        barred += len(data.filters[row].indices)
        others = np.setdiff1d(np.arange(len(labels)), own)
        expected = np.sort(scores[others])[::-1][:6]
        np.testing.assert_allclose(scores[mined], expected, atol=1e-5)
        assert not set(mined) & set(own)
    assert barred > 0


def test_blocks_do_not_show(setting, tmp_path, monkeypatch):
    whole = refresh(tmp_path / "whole", setting)
    monkeypatch.setattr(refresh, "BLOCK_ROWS", 100)
    blocks = refresh(tmp_path / "blocks", setting)
    np.testing.assert_array_equal(whole.hard_negatives, blocks.hard_negatives)


def test_same_parameters_same_refresh_and_seeded_by_epoch(setting, tmp_path):
    first, again = refresh(tmp_path / "a", setting), refresh(tmp_path / "b", setting)
    for name in ("order", "offsets", "hard_negatives"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    other = refresh(tmp_path / "c", setting, epoch=4)
    np.testing.assert_array_equal(first.hard_negatives, other.hard_negatives)
    assert not np.array_equal(first.order, other.order)


@pytest.mark.parametrize("batching", ["clusters", "joined", "random"])
def test_clusters_cover_the_training_rows(setting, tmp_path, batching):
    config, data, _, _ = setting
    found = refresh(tmp_path, setting, batching=batching, hard_negatives=batching == "random")
    np.testing.assert_array_equal(np.sort(found.order), np.arange(len(data.rows)))
    assert found.offsets[0] == 0 and found.offsets[-1] == len(data.rows)
    sizes = np.diff(found.offsets)
    assert sizes.max() - sizes.min() <= 1
    if batching == "clusters":
        assert sizes.max() <= BatchSource(config, data, 255).batch_size
    if batching == "joined":
        assert sizes.max() <= 2 * config.cluster_schedule[0][1]
    assert (found.hard_negatives is None) == (batching != "random")


def test_written_whole_and_read_back(setting, tmp_path):
    assert refresh.load(tmp_path, 3) is None
    (tmp_path / "refresh/3.tmp").mkdir(parents=True)  # a kill left this
    (tmp_path / "refresh/3.tmp/order.npy").write_text("half")
    made = refresh(tmp_path, setting)
    assert os.listdir(tmp_path / "refresh") == ["3"]
    read = refresh.load(tmp_path, 3)
    np.testing.assert_array_equal(made.hard_negatives, read.hard_negatives)
    assert isinstance(read.hard_negatives, np.memmap)
    info = json.loads((tmp_path / "refresh/3/info.json").read_text())
    assert info["epoch"] == 3 and info["index"] == "exact"


def test_full_disk_is_an_error_and_leaves_nothing(setting, small_disk):
    """Not a SIGBUS, which a memory map on a full disk would give."""
    disk = small_disk.folder
    (disk / "filling").write_bytes(b"x" * (2**20 - 24_000))
    with pytest.raises(OSError, match=r"refresh before epoch 3 could not be written \(.*space"):
        refresh(disk, setting)
    assert os.listdir(disk / "refresh") == []
    (disk / "filling").unlink()
    assert refresh(disk, setting).hard_negatives is not None


def test_prune_keeps_what_checkpoints_need(tmp_path):
    for name in ("0", "5", "10", "15", "20.tmp"):
        (tmp_path / "refresh" / name).mkdir(parents=True)
    refresh.prune(tmp_path, {5, 15, None})
    assert sorted(os.listdir(tmp_path / "refresh")) == ["15", "5"]
    refresh.prune(tmp_path / "nowhere", {5})


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_other_indexes_by_name(setting, tmp_path, kind):
    exact = refresh(tmp_path / "exact", setting).hard_negatives[setting[1].rows]
    found = refresh(tmp_path / kind, setting, index=kind).hard_negatives[setting[1].rows]
    overlap = np.mean([len(set(a) & set(b)) / 6 for a, b in zip(exact, found)])
    assert overlap > 0.8
    info = json.loads((tmp_path / kind / "refresh/3/info.json").read_text())
    assert info["index"] == kind
