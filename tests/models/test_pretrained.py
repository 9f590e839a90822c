"""Hugging Face folders: what is read, written back and refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from xmc_jax.models import pretrained
from xmc_jax.models.pretrained import load_encoder, save_encoder, word_embeddings

FAMILIES = pytest.mark.parametrize("family", ["bert", "distilbert"])


@pytest.fixture
def copy(golden, tmp_path):
    """copy(family, change=None): a copy of a golden folder, its tensors passed through change."""

    def make(family: str, change=None) -> Path:
        folder = tmp_path / family
        shutil.copytree(golden / f"encoder_{family}", folder)
        file = folder / "model.safetensors"
        if change is not None:
            tensors = change(load_file(file))
            save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, file)
        return folder

    return make


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@FAMILIES
def test_old_names_and_prefixes_are_understood(golden, copy, family):
    def age(tensors):
        def old(name):
            name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            return f"{family}." + name.replace("LayerNorm.bias", "LayerNorm.beta")

        return {old(name): value for name, value in tensors.items()}

    encoder, params = load_encoder(golden / f"encoder_{family}")
    old_encoder, old_params = load_encoder(copy(family, age))
    assert encoder == old_encoder
    assert_same(params, old_params)


@FAMILIES
def test_heads_of_pretraining_are_skipped_and_logged(golden, copy, family, caplog):
    unused = {
        "bert": [
            "cls.predictions.transform.dense.weight",
            "cls.seq_relationship.weight",
            "bert.pooler.dense.weight",
        ],
        "distilbert": ["vocab_transform.weight", "vocab_layer_norm.bias", "vocab_projector.bias"],
    }[family]
    unused.append("embeddings.position_ids")

    def add(tensors):
        kept = {k: v for k, v in tensors.items() if not k.startswith("pooler")}
        return kept | {name: np.ones(3, np.float32) for name in unused}

    folder = copy(family, add)
    pretrained.logging.set_verbosity(pretrained.logging.INFO)
    with caplog.at_level("INFO"):
        _, params = load_encoder(folder)
    assert_same(params, load_encoder(golden / f"encoder_{family}")[1])
    for name in unused:
        assert name.removeprefix("bert.") in caplog.text


@FAMILIES
def test_anything_else_left_over_or_missing_is_listed(copy, family):
    def change(tensors):
        del tensors["embeddings.LayerNorm.bias"]
        return tensors | {"adapter.weight": np.ones(2, np.float32)}

    message = r"missing tensors \['embeddings.LayerNorm.bias'\].*left over \['adapter.weight'\]"
    with pytest.raises(ValueError, match=message):
        load_encoder(copy(family, change))


def test_config_with_other_shapes(copy):
    folder = copy("bert")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    with pytest.raises(ValueError, match=r"mlp_in/kernel the shape \(48, 96\).*says \(48, 100\)"):
        load_encoder(folder)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match=r"left over.*encoder.layer.1.output.dense.weight"):
        load_encoder(folder)


def test_two_tensors_of_one_name(copy):
    name = "embeddings.word_embeddings.weight"
    folder = copy("bert", lambda tensors: tensors | {f"bert.{name}": tensors[name]})
    with pytest.raises(ValueError, match=f"'bert.{name}' are the same|'{name}' are the same"):
        load_encoder(folder)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_files_become_float32(golden, copy, dtype):
    narrow = jnp.dtype(dtype)
    folder = copy("bert", lambda tensors: {k: v.astype(narrow) for k, v in tensors.items()})
    _, params = load_encoder(folder)
    expected = jax.tree.map(
        lambda x: x.astype(narrow).astype(jnp.float32), load_encoder(golden / "encoder_bert")[1]
    )
    assert_same(params, expected)


@FAMILIES
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_saved_folders_are_read_back_exactly(golden, tmp_path, family, pooling):
    source = golden / f"encoder_{family}"
    encoder, params = load_encoder(source, pooling=pooling)
    save_encoder(tmp_path / "out", encoder, params)
    again, again_params = load_encoder(tmp_path / "out")
    assert again == encoder
    assert_same(again_params, params)
    # What transformers looks for: the same names and values as the file it wrote itself.
    ours = load_file(tmp_path / "out" / "model.safetensors")
    theirs = {k: v for k, v in load_file(source / "model.safetensors").items() if "pool" not in k}
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value)
    assert not list((tmp_path / "out").rglob("*.tmp"))


@FAMILIES
def test_transformers_reads_the_saved_config(golden, tmp_path, family):
    from transformers import AutoConfig

    encoder, params = load_encoder(golden / f"encoder_{family}")
    save_encoder(tmp_path, encoder, params)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.model_type == family
    assert config.hidden_size == encoder.dim  # transformers maps the families' own names
    assert config.num_hidden_layers == encoder.config.num_layers


def test_pooling_of_sentence_transformers_folders(copy):
    folder = copy("bert")
    assert load_encoder(folder)[0].pooling == "mean"
    (folder / "1_Pooling").mkdir()
    modes = {"word_embedding_dimension": 48, "pooling_mode_cls_token": True}
    file = folder / "1_Pooling" / "config.json"
    file.write_text(json.dumps(modes | {"pooling_mode_mean_tokens": False}))
    assert load_encoder(folder)[0].pooling == "cls"
    assert load_encoder(folder, pooling="mean")[0].pooling == "mean"
    file.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ValueError, match=r"pooling \['max_tokens'\]; expected one of"):
        load_encoder(folder)


def test_word_embeddings(golden):
    for family, shape in (("bert", (97, 48)), ("distilbert", (97, 32))):
        folder = golden / f"encoder_{family}"
        table = word_embeddings(folder)
        assert table.shape == shape and table.dtype == np.float32
        np.testing.assert_array_equal(table, load_encoder(folder)[1]["embeddings"]["word"])


def test_options_reach_the_encoder(golden):
    encoder, _ = load_encoder(
        str(golden / "encoder_bert"), compute_dtype="bfloat16", remat=True, max_segments=5
    )
    assert (encoder.compute_dtype, encoder.remat, encoder.max_segments) == ("bfloat16", True, 5)


def test_a_pickle_is_refused_with_a_way_out(copy):
    folder = copy("bert")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin only.*Convert it.*save_pretrained"):
        load_encoder(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"no model.safetensors in"):
        word_embeddings(folder)


def test_three_ways_not_to_find_a_model(tmp_path, copy, monkeypatch):
    for name in (tmp_path / "absent", str(tmp_path / "absent"), "./absent", "~/a/b/absent"):
        with pytest.raises(ValueError, match=r"no such folder: .*absent"):
            load_encoder(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("some-owner/some-model", "some-model"):
        with pytest.raises(ValueError, match=f"no folder '{name}' here, and no network"):
            load_encoder(name)
    folder = copy("bert")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "t5"}))
    with pytest.raises(ValueError, match=r"model_type\) 't5' is not supported"):
        load_encoder(folder)


def test_without_network_nothing_is_tried_twice(monkeypatch):
    def refuse(address, timeout):
        raise OSError("no route")

    tried = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **o: tried.append(o) or ".")
    pretrained.resolve_folder("some-owner/some-model")
    assert tried[0]["local_files_only"] and len(tried) == 1


def test_names_the_hub_does_not_know(monkeypatch):
    from huggingface_hub import errors

    class Missing(errors.RepositoryNotFoundError):
        def __init__(self):
            Exception.__init__(self, "404")

    def refuse(*args, **kwargs):
        raise Missing

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ValueError, match="neither a folder here nor a model on the Hugging Face"):
        load_encoder("some-owner/some-model")


def test_hub_names_become_folders(golden, monkeypatch):
    calls = []

    def download(name, allow_patterns, local_files_only):
        calls.append((name, allow_patterns))
        return str(golden / "encoder_bert")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    encoder, _ = load_encoder("some-owner/some-model")
    assert encoder.dim == 48
    assert calls == [("some-owner/some-model", list(pretrained.FILES))]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {*pretrained.FILES}


def test_damaged_files(copy):
    folder = copy("bert")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        load_encoder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        load_encoder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config.json in"):
        load_encoder(folder)
