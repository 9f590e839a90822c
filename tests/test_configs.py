"""Every configuration with every data set: it builds, is complete, and its step has one shape."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from xmc_jax import catalog
from xmc_jax.contracts import TokenBatch
from xmc_jax.data.batching import batches
from xmc_jax.models.encoders.transformer import TransformerConfig, TransformerEncoder
from xmc_jax.models.heads.unidec import UniDEC
from xmc_jax.runs import settings
from xmc_jax.systems import encoders
from xmc_jax.systems.unidec.options import UniDECOptions
from xmc_jax.systems.unidec.step import TABLE, StepBatch, make_train_step
from xmc_jax.systems.unidec.system import objective
from xmc_jax.tables import label_pool
from xmc_jax.training import workdir
from xmc_jax.training.state import make_optimizer, new_state

ROOT = Path(__file__).parent.parent
FILES = ["depsl", "unidec"]  # configs/frugal.py: test_frugal_configs.py
OPTIONS = ("", ",debug", ",paper=preprint", ",loss=supcon+bce", ",loss=bce", ",encoder=bag")
DATASETS = [entry.name for entry in catalog.ENTRIES] + ["my_data.tsv"]


def get_config(file: str, arg: str) -> ConfigDict:
    return importlib.import_module(f"configs.{file}").get_config(arg)


def resolved(file: str, name: str, option: str = "") -> tuple[ConfigDict, catalog.Entry]:
    """The complete configuration, as for a data set of the catalog's size."""
    entry = catalog.find(name) or catalog.default_entry(name, 5_000, 1_000, 3_000, 32)
    texts = ["six words are in each text"] * 100
    matrix = SimpleNamespace(shape=(entry.num_train, entry.num_labels))
    train = SimpleNamespace(labels=matrix, texts=texts)
    given = get_config(file, name + option)
    settings.check(given)
    return settings.resolve(given, SimpleNamespace(train=train, label_texts=texts))[0], entry


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("file", FILES)
def test_builds_and_is_complete(file, name, option):
    config, _ = resolved(file, name, option)
    flat = workdir.flatten(config.to_dict())
    # Weights of retrieval are chosen after training.
    left_open = {field for field, value in flat.items() if value is None}
    assert left_open == {"retrieval.points", "retrieval.labels", "retrieval.lexical"}
    assert config.dataset == name
    options = settings.options_of(config)
    assert (objective(options).clf is not None) == config.classifier
    again = ConfigDict(json.loads(json.dumps(config.to_dict())))  # as in a work directory
    assert workdir.flatten(again.to_dict()).keys() == flat.keys()
    assert settings.options_of(again) == options


def test_the_triplet_loss_has_its_margin_in_cosines():
    config, _ = resolved("unidec", "LF-WordNetTitles", ",loss=triplet")
    assert config.de.temperature == 0.03
    config.clf.temperature = 0.5  # the classifier's scores are not cosines
    made = objective(settings.options_of(config))
    assert (made.de.temperature, made.clf.temperature) == (1, 0.5)
    assert made.de.label_loss.keywords == {"margin": 0.3}


def test_token_vectors_and_a_pretrained_encoder_exclude_each_other():
    with pytest.raises(ValueError, match="encoder='a' and embeddings='b'"):
        get_config("unidec", "wordnet-mini,encoder=a,embeddings=b")


@pytest.mark.parametrize("name", ["LF-WordNetTitles-Mini", "LF-WordNetTitles", "LF-MobyTitles"])
def test_what_a_pretrained_encoder_is_given(name, tmp_path):
    shape = TransformerConfig.minilm()
    (tmp_path / "config.json").write_text(json.dumps(shape.to_huggingface()))
    config, _ = resolved("unidec", name, f",encoder={tmp_path}")
    found = (config.encoder.freeze, config.head_dim, config.table.scale, config.batch_size)
    assert found == (5, 0, 1.0, 128) and config.pool_size == 512 and config.epochs == 8
    assert (config.lr.encoder, config.lr.heads, config.lr.weight_decay) == (3e-4, 1e-3, 0.01)
    assert config.lr.table == (1e-2 if name.endswith("Mini") else 3e-3)


def tiny_encoder(options: UniDECOptions) -> TransformerEncoder:
    """Takes DistilBERT's place: same kind, hardly any parameters."""
    shape = TransformerConfig(vocab_size=100, dim=8, num_layers=1, num_heads=2, mlp_dim=16)
    return TransformerEncoder(shape, pooling=options.encoder.pooling)


def step_shapes(options: UniDECOptions, entry: catalog.Entry, max_segments: int) -> StepBatch:
    """Shapes of a batch, computed from the numbers in the options alone."""
    rows = entry.num_train
    levels = batches.cluster_levels(rows, options.batch_size)
    queries = min(options.batch_size, rows)
    if options.batching == "clusters":
        queries = batches.batch_slots(rows, levels)
    assert queries <= options.pool_size, "a pool must hold one positive of each query"
    pool = min(options.pool_size, max(entry.num_labels, queries))
    width, texts = pool + options.extra_pool_size, queries + pool
    shape = lambda dims, kind: jax.ShapeDtypeStruct(dims, kind)
    packed = (-(-texts // max_segments), options.row_length)
    tokens = TokenBatch(
        shape(packed, np.uint16),
        shape(packed, np.uint8),
        shape(packed, np.uint16),
        shape((texts,), np.int32),
        shape((texts,), np.uint8),
    )
    pair = shape((queries, width), np.bool_)
    return StepBatch(tokens, shape((width,), np.int32), pair, pair)


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("file", FILES)
def test_step_keeps_the_shapes_of_its_state(file, name):
    """Nothing is allocated: 1.3 million labels are only looked at."""
    config, entry = resolved(file, name)
    options = settings.options_of(config)
    if options.encoder.name == "bag":
        encoder, _ = encoders.encoder(
            options.encoder,
            Path("no-folder"),
            500,
            np.ones(500, np.int64),
            seed=options.seed,
            max_length=options.max_length,
            head_dim=options.head_dim,
        )
    else:
        encoder = tiny_encoder(options)
    model = UniDEC(encoder, options.head_dim or None, options.head_dropout)
    optimizer = make_optimizer(options.lr)

    def start():
        tables = {}
        if options.classifier:
            rows = jax.numpy.zeros((entry.num_labels, model.dim))
            tables = {TABLE: label_pool.to_storage(rows, options.table.dtype)}
        return new_state(model.init(jax.random.key(0)), optimizer, tables)

    state = jax.eval_shape(start)
    assert options.max_length <= options.row_length
    step = make_train_step(
        model, objective(options), optimizer, table_rate=options.lr.table, seed=options.seed
    )
    batch = step_shapes(options, entry, encoder.max_segments)
    after, parts = jax.eval_shape(step, state, batch, np.float32(1))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for found, expected in zip(jax.tree.leaves(after), jax.tree.leaves(state)):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert parts["loss"].shape == () and parts["gradient_norm"].dtype == np.float32
    assert ("loss_clf" in parts) == options.classifier


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", ["LF-AmazonTitles-1.3M", "LF-WordNetTitles", "my_data.tsv"])
def test_setting_a_field_sets_no_other(file, name):
    plain = workdir.flatten(get_config(file, name).to_dict())
    for field, value in plain.items():
        config = get_config(file, name)
        left_open = {"lr": 0.25, "reading": "x"}.get(field.partition(".")[0], 7)
        left_open = {"reading.merge_labels": True, "reading.version": 7}.get(field, left_open)
        new = {int: 7, float: 0.25, str: "x", bool: not value, tuple: ((0, 2),)}
        new = new.get(type(value), left_open)
        config.update_from_flattened_dict({field: new})
        changed = workdir.flatten(config.to_dict())
        assert {k for k in plain if plain[k] != changed[k]} <= {field}


@pytest.mark.parametrize("file", FILES)
def test_every_field_is_read(file):
    """No field that nobody reads: each is found, by name, outside of the checks of its range."""
    files = [path for path in (ROOT / "xmc_jax").rglob("*.py") if path.name != "defaults.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    text = re.sub(r"^(NAMES|BOUNDS)(: .*?)? = {.*?^}", "", text, flags=re.MULTILINE | re.DOTALL)
    unread = []
    for name in DATASETS:
        for field in workdir.flatten(get_config(file, name).to_dict()):
            last = field.rpartition(".")[2]
            if not re.search(rf"\.{last}\b", text):
                unread.append(field)
    assert not unread


def test_commands_in_the_docstrings_are_right():
    """The first command of each file names that file and a data set of the catalog."""
    for file in FILES:
        module = importlib.import_module(f"configs.{file}")
        command = re.search(r"--config=configs/(\w+)\.py:([\w.-]+)", module.__doc__)
        assert command and command[1] == file
        assert catalog.find(command[2]) is not None
