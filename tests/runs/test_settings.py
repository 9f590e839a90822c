"""Own data: what a run derives, what it says, and when it refuses to start."""

from __future__ import annotations

import dataclasses
import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny

from configs import depsl, unidec
from xmc_jax.data.tokens import token_stores
from xmc_jax.data.tokens.tokenizer import train_words
from xmc_jax.models.encoders.transformer import TransformerConfig
from xmc_jax.runs import device_memory, launch, settings
from xmc_jax.training import training_data, workdir
from xmc_jax.training.options import GandalfOptions


def shaped(rows: int, labels: int, words: int = 6) -> SimpleNamespace:
    """What `resolve` looks at of a data set."""
    texts = [" ".join(["word"] * words)] * 100
    matrix = SimpleNamespace(shape=(rows, labels))
    return SimpleNamespace(
        train=SimpleNamespace(labels=matrix, texts=texts), label_texts=texts[:50]
    )


def own_config(get_config=unidec.get_config, **changes):
    config = get_config("my.tsv")
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    return config


@pytest.mark.parametrize("get_config", [unidec.get_config, depsl.get_config])
@pytest.mark.parametrize(
    ("rows", "labels"), [(20, 10), (300, 64), (60_000, 70_000), (2_248_619, 1_305_265)]
)
def test_nothing_is_left_open(get_config, rows, labels):
    given = own_config(get_config, batching="clusters", hard_negatives=True)
    config, chosen = settings.resolve(given, shaped(rows, labels))
    flat = workdir.flatten(config.to_dict())
    # Weights of retrieval are chosen after training.
    assert {name for name, value in flat.items() if value is None} == {
        "retrieval.points",
        "retrieval.labels",
        "retrieval.lexical",
    }
    assert config.encoder.name and config.index in ("exact", "ivf")
    assert (config.index == "ivf") == (2.0 * rows * labels * config.head_dim >= 1e14)
    assert config.batch_size <= config.pool_size
    assert config.row_length >= config.max_length
    settings.check(config)
    before = workdir.flatten(given.to_dict())
    changed = {name for name, value in flat.items() if value != before[name]}
    changed = {name for name in changed if not name.startswith("reading.")}  # as files are
    assert changed <= chosen.keys()
    assert {"batch_size", "pool_size", "epochs", "max_length", "index", "lr.table"} <= chosen.keys()
    assert given.batch_size is None  # what was given stays as it was


def test_what_is_given_is_kept():
    given = own_config(batch_size=40, epochs=3, lr__table=0.5, index="hnsw", hard_negatives=True)
    config, chosen = settings.resolve(given, shaped(5_000, 100))
    assert (config.batch_size, config.epochs, config.lr.table, config.index) == (40, 3, 0.5, "hnsw")
    assert not chosen.keys() & {"batch_size", "epochs", "lr.table", "index"}
    assert config.lr.encoder != 0.5


@pytest.mark.parametrize(("words", "length"), [(6, 32), (22, 64), (60, 128), (500, 256)])
def test_length_follows_the_texts(words, length):
    config, _ = settings.resolve(own_config(), shaped(1_000, 100, words))
    assert config.max_length == length and config.row_length >= length


def test_length_counts_what_tokenizers_cut(tmp_path):
    data = shaped(1_000, 100)
    data.train.texts = ["红色的水果" * 30] * 100
    assert settings.resolve(own_config(), data)[0].max_length == 256
    data.train.texts = ["AB-12/3.5-X CD-3.4/5"] * 100  # two words for people
    assert settings.resolve(own_config(), data)[0].max_length == 32
    data.train.texts = ["AB-12/3.5-X CD-3.4/5 EF-5/6.7"] * 100
    assert settings.resolve(own_config(), data)[0].max_length == 64


@pytest.mark.parametrize(
    "given", [{"encoder__embeddings": "vectors.vec"}, {"encoder__vocabulary": "words"}]
)
def test_token_vectors_are_a_bags_on_a_gpu_too(given, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert settings.resolve(own_config(**given), shaped(1_000, 100))[0].encoder.name == "bag"


def test_label_texts_that_are_points_are_searched_for_too():
    given = {"batching": "clusters", "head_dim": 256}
    kinds = [
        settings.resolve(own_config(gandalf__enabled=on, **given), shaped(50_000, 1_000_000))[
            0
        ].index
        for on in (False, True)
    ]
    assert kinds == ["exact", "ivf"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gandalf__variant": "glas"}, "config.gandalf.variant = 'glas' with"),
        ({"gandalf__share": 0.5}, "config.gandalf.share = 0.5 with config.gandalf.enabled = False"),
        ({"extra_positives": 6}, "config.extra_positives = 6, config.extra_pool_size = 0"),
        ({"extra_pool_size": 6}, "expected both above 0 and a classifier"),
        ({"extra_positives": 1, "extra_pool_size": 9, "classifier": False}, "and a classifier"),
        (
            {"encoder__compute_dtype": "bfloat16"},
            "compute_dtype = 'bfloat16': a bag",
        ),
        ({"gandalf__delta": 0.2}, "config.gandalf.delta = 0.2 with config.gandalf.enabled = False"),
        ({"encoder__name": "f", "encoder__vocabulary": "words"}, "it is for the bag encoder"),
        ({"encoder__remat": True}, "config.encoder.remat = True: a bag of tokens has none of it"),
    ],
)
def test_what_would_be_ignored_is_refused(changes, said):
    config = own_config(**{"encoder__name": "bag", "encoder__freeze": 0, **changes})
    with pytest.raises(settings.PlanError, match=re.escape(said)):
        settings.check(config)


@pytest.fixture
def model(tmp_path):
    """A pretrained folder of which nothing but the sizes is there."""
    shape = TransformerConfig.minilm(num_layers=4)
    (tmp_path / "config.json").write_text(json.dumps(shape.to_huggingface()))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("given", "device", "expected"),
    [
        ({}, "cpu", (3, 0, 128, 512, 1.0, 3e-4, 1e-2, 0.01)),
        ({}, "gpu", (0, 384, 256, 2560, 4.0, 1e-4, 1e-3, 0.0)),
        ({"encoder__towers": 2}, "cpu", (0, 384, 256, 2560, 4.0, 1e-4, 1e-3, 0.0)),
        ({"encoder__freeze": 0}, "cpu", (0, 384, 256, 2560, 4.0, 1e-4, 1e-3, 0.0)),
        ({"encoder__freeze": 4}, "gpu", (4, 384, 128, 512, 1.0, 3e-4, 1e-2, 0.01)),
        ({"head_dim": 64, "lr__table": 0.5}, "cpu", (3, 64, 128, 512, 1.0, 3e-4, 0.5, 0.01)),
    ],
)
def test_a_pretrained_encoder_is_frozen_but_for_its_last_layer_on_a_cpu(
    given, device, expected, model, monkeypatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    config, chosen = settings.resolve(own_config(encoder__name=model, **given), shaped(5_000, 100))
    settings.check(config)
    names = ("encoder.freeze", "head_dim", "batch_size", "pool_size", "table.scale")
    names += ("lr.encoder", "lr.table", "lr.weight_decay")
    assert tuple(settings.field_of(config, name) for name in names) == expected
    assert not chosen.keys() & {name.replace("__", ".") for name in given}


def test_usual_options_of_gandalf_are_the_configurations():
    assert own_config().gandalf.to_dict() == dataclasses.asdict(GandalfOptions())


def test_rates_follow_the_encoder(model):
    bag, _ = settings.resolve(own_config(encoder__name="bag"), shaped(1_000, 100))
    whole = own_config(encoder__name=model, encoder__freeze=0)
    pretrained, _ = settings.resolve(whole, shaped(1_000, 100))
    assert bag.lr.encoder > pretrained.lr.encoder and bag.lr.table > pretrained.lr.table


def test_epochs_in_a_budget():
    options = dict(step=0.5, steps_per_epoch=100, evaluation=10.0, every=5)
    # 0.95 * 600 s, less two evaluations, in epochs of 50 s and a fifth of an evaluation.
    assert settings.epochs_in(10, **options) == int((570 - 20) / (50 + 2))
    assert settings.epochs_in(0.01, **options) == 1


@pytest.mark.slow
def test_own_file_in_one_command(own_data, tmp_path):
    """As a user would: a file, a few minutes (here seconds), and what was chosen is said."""
    done = tiny.run(
        "train",
        f"--config=configs/unidec.py:{own_data}",
        "--config.max_minutes=0.05",
        "--config.encoder.dim=16",
        "--config.head_dim=16",
        f"--workdir={tmp_path}/run",
    )
    assert done.returncode == 0, done.stderr
    for name in ("encoder.name = bag", "batch_size = 32", "pool_size = 320", "max_length = 32"):
        assert f"chosen for this data and device: {name}" in done.stderr
    assert re.search(r"^points: \d+ training rows, 64 labels", done.stdout, re.MULTILINE)
    assert f"{own_data}:\n  training rows 240   test rows 60   labels 64\n" in done.stdout
    assert "  note: points.tsv: no test file; 60 rows split off" in done.stdout
    assert f"  numbers to beat: python -m xmc_jax.prepare --input={own_data}\n" in done.stdout
    assert re.search(r"^memory: parameters [\d.]+ GiB, table", done.stdout, re.MULTILINE)
    epochs = int(re.search(r"^(\d+) epochs are trained", done.stdout, re.MULTILINE)[1])
    meta = json.loads((tmp_path / "run/meta.json").read_text())
    assert meta["epochs"] == epochs <= meta["resolved"]["epochs"]
    steps = int(re.search(r"(\d+) steps an epoch", done.stdout)[1])
    assert (tmp_path / "run/checkpoints" / str(epochs * steps)).is_dir()
    assert "test rows: 60" in done.stdout


def test_what_tokens_leave_out_is_said(tmp_path):
    """Cut off, and unknown: the share always, a warning above 5 %; special tokens do not count."""
    texts = ["one two three"] * 30
    tokenizer = train_words(texts, vocab_size=300, folder=tmp_path)
    encode = lambda *texts: token_stores.encode(texts, tokenizer, max_length=4)
    data = SimpleNamespace(
        train_tokens=encode(*texts),
        label_tokens=encode("what is one two three", "one two"),
        test=SimpleNamespace(tokens=encode("one")),
    )
    cut, unknown, warning = training_data.lost(4, data, tokenizer)
    assert cut == "50% of the label texts fill max_length = 4 tokens; what is longer was cut off"
    assert unknown == (
        "unknown tokens: 0.0% in training texts, 33.3% in label texts, 0.0% in test texts"
    )
    assert warning.startswith("warning: more than 5% of the tokens are unknown")
    data.label_tokens = data.test.tokens
    assert training_data.lost(5, data, tokenizer) == [unknown.replace("33.3%", "0.0%")]


def test_more_minutes_than_epochs_are_pointed_out(own_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "train", lambda *_: (_ for _ in ()).throw(Stop))
    monkeypatch.setattr(launch, "_epochs_in_budget", lambda *_: 99)
    with pytest.raises(Stop):
        launch.start(tiny.config(own_data, epochs=2, max_minutes=5.0), tmp_path / "run")
    said = "2 epochs are trained, as config.epochs says; 5 minutes would be enough for 99\n"
    assert said in capsys.readouterr().out


# Memory.


class Stop(Exception):
    """The run would have begun."""


@pytest.fixture
def big(own_data):
    """A configuration whose batch, pool and table weigh something."""
    return tiny.config(own_data, batch_size=64, pool_size=64, head_dim=256, max_minutes=0.0)


@pytest.mark.slow
def test_refusal_names_settings_that_really_fit(big, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "train", lambda *_: (_ for _ in ()).throw(Stop))
    measured = []
    sizes = device_memory.sizes
    monkeypatch.setattr(
        device_memory, "sizes", lambda *args: measured.append(sizes(*args)) or measured[-1]
    )
    with pytest.raises(Stop):
        launch.start(big, tmp_path / "fits")
    found = measured[0]
    assert set(found) == {"parameters", "table", "moments", "vectors", "activations"}
    assert found["table"] == 64 * 256 * 4 and found["moments"] == 2 * found["table"] + 4
    total = sum(found.values())
    monkeypatch.setattr(device_memory, "available_bytes", lambda: int(total / 0.9) - 20)
    with pytest.raises(settings.PlanError, match="over 90% of what there is") as error:
        launch.start(big, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    advised = [line.strip() for line in str(error.value).splitlines() if "--config" in line]
    assert len(advised) == 2
    for number, line in enumerate(advised):
        config = big.copy_and_resolve_references()
        for flag in line.split():
            name, value = flag.removeprefix("--config.").split("=")
            config.update_from_flattened_dict({name: value if "dtype" in name else int(value)})
        with pytest.raises(Stop):
            launch.start(config, tmp_path / f"smaller{number}")


def test_label_vectors_on_a_device_count(big, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "train", lambda *_: (_ for _ in ()).throw(Stop))
    measured, sizes = [], device_memory.sizes

    def on_a_gpu(*args):
        with monkeypatch.context() as patch:
            patch.setattr(device_memory.jax, "default_backend", lambda: "gpu")
            measured.append(sizes(*args))
        return measured[-1]

    monkeypatch.setattr(device_memory, "sizes", on_a_gpu)
    with pytest.raises(Stop):
        launch.start(big, tmp_path / "run")
    searched = 2 * 4 * 64 * 256 + (1 << 27)  # both heads, and a block of scores
    assert measured[0]["activations"] + measured[0]["vectors"] == searched


def test_refusal_where_nothing_helps(big, tmp_path, monkeypatch):
    monkeypatch.setattr(device_memory, "available_bytes", lambda: 10_000)
    with pytest.raises(settings.PlanError, match="No smaller batch, pool, head or table would fit"):
        launch.start(big, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dataset", ["wordnet-mini", "amazontitles1.3m"])
@pytest.mark.parametrize("get_config", [unidec.get_config, depsl.get_config])
def test_smaller_settings_are_valid_and_smaller(get_config, dataset):
    config = get_config(dataset)
    seen = []
    for changes in device_memory.smaller_settings(config):
        smaller = config.copy_and_resolve_references()
        smaller.update_from_flattened_dict(changes)
        settings.check(smaller)
        assert changes and changes not in seen
        seen.append(changes)
        for name in ("batch_size", "pool_size", "head_dim"):
            assert changes.get(name, 0) <= settings.field_of(config, name)
        assert "table.dtype" not in changes or config.classifier
        assert "encoder.remat" not in changes or config.encoder.name != "bag"
    assert len(seen) >= 6


def test_available_memory_is_stated():
    available = device_memory.available_bytes()
    assert 2**28 < available < 2**50
    assert jax.default_backend() == "cpu" and np.isfinite(available)
