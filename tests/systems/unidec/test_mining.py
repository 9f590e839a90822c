"""A refresh: what it writes, that it is whole or absent, and which ones are kept."""

from __future__ import annotations

import dataclasses
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
from xmc_jax.systems.unidec import mining
from xmc_jax.systems.unidec.embedder import Embedder
from xmc_jax.training import refresh, training_data
from xmc_jax.training.refresh import Refresh
from xmc_jax.training.source import batch_shapes


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Mini, an untrained model, and what a refresh needs of them."""
    config = tiny.config("wordnet-mini", batch_size=32, pool_size=128, row_length=64)
    options = tiny.options(config)
    dataset, entry, _ = training_data.read_dataset("wordnet-mini", "", max_length=16)
    texts = [*dataset.train.texts, *dataset.label_texts]
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = encoders.tokenizer(options.encoder, texts, folder)
    data = training_data.load(options, dataset, entry, tokenizer)
    model = UniDEC(BagEncoder(tokenizer.get_vocab_size(), 16), 16)
    params = model.init(jax.random.key(0))
    return options, data, Embedder(model, row_length=64), params


def made(folder: Path, setting, epoch: int = 3, **changes: object) -> Refresh:
    """A refresh written into a work directory, as the loop has it written."""
    options, data, embedder, params = setting
    options = dataclasses.replace(options, **changes)
    levels = batch_shapes(options, data).levels
    write = lambda to: mining.write(to, epoch, options, data, embedder, params, levels)
    return refresh.write(folder, epoch, write)


def test_hard_negatives_are_the_nearest_other_labels(setting, tmp_path):
    """Against a plain loop over rows; neither positives nor filter pairs, best first."""
    _, data, embedder, params = setting
    found = made(tmp_path, setting)["hard_negatives"]
    queries = embedder.de(params, data.train_tokens)
    labels = embedder.de(params, data.label_tokens)
    assert found.shape == (data.labels.shape[0], 6) and found.dtype == np.int32
    trained = set(data.rows.tolist())
    barred = 0
    for row in range(0, data.labels.shape[0], 7):
        mined = found[row]
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
    whole = made(tmp_path / "whole", setting)
    monkeypatch.setattr(mining, "BLOCK_ROWS", 100)
    blocks = made(tmp_path / "blocks", setting)
    np.testing.assert_array_equal(whole["hard_negatives"], blocks["hard_negatives"])


def test_same_parameters_same_refresh_and_seeded_by_epoch(setting, tmp_path):
    first, again = made(tmp_path / "a", setting), made(tmp_path / "b", setting)
    for name in ("order", "offsets", "hard_negatives"):
        np.testing.assert_array_equal(first[name], again[name])
    other = made(tmp_path / "c", setting, epoch=4)
    np.testing.assert_array_equal(first["hard_negatives"], other["hard_negatives"])
    assert not np.array_equal(first["order"], other["order"])


@pytest.mark.parametrize("batching", ["clusters", "joined", "random"])
def test_clusters_cover_the_training_rows(setting, tmp_path, batching):
    options, data, _, _ = setting
    found = made(tmp_path, setting, batching=batching, hard_negatives=batching == "random")
    np.testing.assert_array_equal(np.sort(found["order"]), np.arange(len(data.rows)))
    offsets = found["offsets"]
    assert offsets[0] == 0 and offsets[-1] == len(data.rows)
    sizes = np.diff(offsets)
    assert sizes.max() - sizes.min() <= 1
    if batching == "clusters":
        assert sizes.max() <= batch_shapes(options, data).queries
    if batching == "joined":
        assert sizes.max() <= 2 * options.cluster_schedule[0][1]
    assert (found.get("hard_negatives") is None) == (batching != "random")


def test_written_whole_and_read_back(setting, tmp_path):
    assert refresh.load(tmp_path, 3) is None
    (tmp_path / "refresh/3.tmp").mkdir(parents=True)  # a kill left this
    (tmp_path / "refresh/3.tmp/order.npy").write_text("half")
    written = made(tmp_path, setting)
    assert os.listdir(tmp_path / "refresh") == ["3"]
    read = refresh.load(tmp_path, 3)
    np.testing.assert_array_equal(written["hard_negatives"], read["hard_negatives"])
    assert isinstance(read["hard_negatives"].base, np.memmap)
    info = json.loads((tmp_path / "refresh/3/info.json").read_text())
    assert info["epoch"] == 3 and info["index"] == "exact"


def test_full_disk_is_an_error_and_leaves_nothing(setting, small_disk):
    """Not a SIGBUS, which a memory map on a full disk would give."""
    disk = small_disk.folder
    (disk / "filling").write_bytes(b"x" * (2**20 - 24_000))
    with pytest.raises(OSError, match=r"refresh before epoch 3 could not be written \(.*space"):
        made(disk, setting)
    assert os.listdir(disk) == ["filling"]
    (disk / "filling").unlink()
    assert made(disk, setting).get("hard_negatives") is not None


def test_prune_keeps_what_checkpoints_need(tmp_path):
    for name in ("0", "5", "10", "15", "20.tmp"):
        (tmp_path / "refresh" / name).mkdir(parents=True)
    refresh.prune(tmp_path, {5, 15, None})
    assert sorted(os.listdir(tmp_path / "refresh")) == ["15", "5"]
    refresh.prune(tmp_path / "nowhere", {5})


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_other_indexes_by_name(setting, tmp_path, kind):
    rows = setting[1].rows
    exact = made(tmp_path / "exact", setting)["hard_negatives"][rows]
    found = made(tmp_path / kind, setting, index=kind)["hard_negatives"][rows]
    overlap = np.mean([len(set(a) & set(b)) / 6 for a, b in zip(exact, found)])
    assert overlap > 0.8
    info = json.loads((tmp_path / kind / "refresh/3/info.json").read_text())
    assert info["index"] == kind
