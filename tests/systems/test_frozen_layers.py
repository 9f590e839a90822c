"""Frozen layers: what is cached stands for the same encoder, not trained below; runs and errors."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import damage
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny

from configs import unidec
from xmc_jax import predictor
from xmc_jax.data.batching import packing
from xmc_jax.data.tokens import token_stores
from xmc_jax.data.tokens import tokenizer as tokenizers
from xmc_jax.models import pretrained
from xmc_jax.models.encoders.transformer import TransformerConfig, TransformerEncoder
from xmc_jax.models.heads.unidec import UniDEC
from xmc_jax.runs import launch, open_runs, settings
from xmc_jax.systems import frozen_layers
from xmc_jax.training import checkpoints, workdir

LAYERS, ROW = 2, 24
SHAPE = TransformerConfig(
    family="bert",
    vocab_size=400,
    dim=16,
    num_layers=LAYERS,
    num_heads=2,
    mlp_dim=32,
    max_positions=32,
    num_token_types=2,
    dropout=0.0,
    attention_dropout=0.0,
    initializer_range=0.3,
)


@pytest.fixture(scope="module")
def folder(own_data, tmp_path_factory) -> Path:
    """A pretrained folder: random weights, and a tokenizer of the data's words."""
    made = tmp_path_factory.mktemp("encoder")
    texts = own_data.read_text(encoding="utf-8").splitlines()
    tokenizers.train_wordpiece(texts, vocab_size=400, folder=made)
    encoder = TransformerEncoder(SHAPE)
    pretrained.save_encoder(made, encoder, encoder.init(jax.random.key(3)))
    return made


def config(source, folder, freeze, **changes):
    return tiny.config(
        source,
        encoder__name=str(folder),
        encoder__freeze=freeze,
        encoder__embeddings="",
        **changes,
    )


def token_store(seed: int, count: int) -> token_stores.TokenStore:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, count)
    ids = rng.integers(0, SHAPE.vocab_size, lengths.sum()).astype(np.uint16)
    return token_stores.TokenStore(ids, np.concatenate([[0], np.cumsum(lengths)]))


@pytest.mark.parametrize(("layers", "pooling"), [(1, "cls"), (LAYERS, "mean"), (LAYERS, "cls")])
def test_values_and_gradients_are_those_of_the_whole_encoder(layers, pooling):
    encoder = TransformerEncoder(SHAPE, pooling=pooling)
    params = encoder.init(jax.random.key(0))
    lower, upper, rest = frozen_layers.split(encoder, params, layers, row_length=ROW)
    lower = frozen_layers.FrozenLayers(
        lower.encoder, lower.params, pooled=lower.pooled, row_length=ROW, dtype="float32"
    )
    tokens = token_store(1, 30)
    hidden = lower(tokens, keep=False)
    assert len(hidden) == 30 and hidden.ids.dtype == np.float32
    order = np.random.default_rng(2).permutation(30)

    def batch(store, max_segments):
        flat, lengths = store.gather(order)
        return packing.pack(flat, lengths, row_length=ROW, max_segments=max_segments)

    def loss(params, model, batch):
        vectors = model.vectors(params, batch)
        found = model.de(params, vectors), model.clf(params, vectors)
        return jnp.sum(found[0] * jnp.sin(found[1])), found

    whole, above = UniDEC(encoder, 8, 0.0), UniDEC(upper, 8, 0.0)
    of_whole = {**whole.init(jax.random.key(1)), "encoder": params}
    of_rest = {**of_whole, "encoder": rest}
    gradients, values = {}, {}
    for name, model, p, store in (
        ("whole", whole, of_whole, tokens),
        ("rest", above, of_rest, hidden),
    ):
        made = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
        gradients[name], values[name] = made(p, model, batch(store, model.encoder.max_segments))
    for a, b in zip(values["whole"], values["rest"]):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for name in gradients["whole"]["encoder"].keys() - rest.keys():
        del gradients["whole"]["encoder"][name]
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    jax.tree.map(same, gradients["whole"], gradients["rest"])


def test_stores_on_disk_and_in_memory_are_equal(tmp_path, monkeypatch):
    monkeypatch.setenv("XMC_CACHE", str(tmp_path))
    encoder = TransformerEncoder(SHAPE)
    params, tokens = encoder.init(jax.random.key(0)), token_store(5, 40)
    for layers, vectors in ((1, len(tokens.ids)), (LAYERS, 40)):
        lower, _, _ = frozen_layers.split(encoder, params, layers, row_length=ROW)
        in_memory = lower(tokens, keep=False)
        assert len(list(tmp_path.glob("hidden/*"))) == layers - 1  # nothing was written
        on_disk = lower(tokens)
        assert isinstance(on_disk.ids, np.memmap) and on_disk.ids.dtype == np.float16
        assert on_disk.ids.shape == (vectors, 16)
        for name in ("ids", "offsets"):
            np.testing.assert_array_equal(getattr(on_disk, name), getattr(in_memory, name))
        assert lower(tokens, keep=False).ids.filename == on_disk.ids.filename  # found there
        assert len(lower(token_store(5, 0), keep=False)) == 0
    assert len(list(tmp_path.glob("hidden/*"))) == 2


def test_a_killed_pass_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setenv("XMC_CACHE", str(tmp_path))
    monkeypatch.setattr(frozen_layers, "PART_TEXTS", 16)
    encoder = TransformerEncoder(SHAPE)
    lower, _, _ = frozen_layers.split(encoder, encoder.init(jax.random.key(0)), 1, row_length=ROW)
    tokens, made, asked = token_store(5, 40), lower._blocks, []

    def killed(tokens, rows):
        asked.append(int(rows[0]))
        if rows[0] == 32 and asked.count(32) == 1:
            raise KeyboardInterrupt
        return made(tokens, rows)

    monkeypatch.setattr(lower, "_blocks", killed)
    with pytest.raises(KeyboardInterrupt):
        lower(tokens)
    store = lower(tokens)
    assert asked == [0, 16, 32, 32]
    assert len(list((tmp_path / "hidden").iterdir())) == 1
    monkeypatch.setattr(lower, "_blocks", made)
    monkeypatch.setenv("XMC_CACHE", str(tmp_path / "other"))
    np.testing.assert_array_equal(store.ids, lower(tokens).ids)


def test_too_little_room_is_said_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setenv("XMC_CACHE", str(tmp_path))
    usage = shutil._ntuple_diskusage(100, 90, 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    encoder = TransformerEncoder(SHAPE)
    lower, _, _ = frozen_layers.split(encoder, encoder.init(jax.random.key(0)), 1, row_length=ROW)
    with pytest.raises(OSError, match=r"free\. Set the environment variable XMC_CACHE"):
        lower(token_store(0, 9))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("freeze", [pytest.param(1, marks=pytest.mark.slow), LAYERS])
def test_a_run_resumes_exactly_and_predicts_new_texts(freeze, own_data, folder, tmp_path):
    source = shutil.copytree(folder, tmp_path / "encoder")
    made = config(own_data, source, freeze, epochs=2)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    result = launch.start(made, whole)
    assert set(result["heads"]) == {"concat", "de", "clf"}
    lower, _ = pretrained.load_encoder(whole / "frozen")
    assert lower.config == dataclasses.replace(SHAPE, num_layers=freeze)
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / str(checkpoints.steps(cut)[-1]))
    other = TransformerEncoder(SHAPE)  # what is frozen lives in the work directory from then on
    pretrained.save_encoder(source, other, other.init(jax.random.key(9)))
    launch.start(made, cut)
    assert_same_end(cut, whole)
    # Texts never seen go through the frozen layers, then the rest: as the whole encoder has it.
    shutil.rmtree(source)
    opened = open_runs.open_run(whole)
    names = {f"layer_{i}" for i in range(freeze, LAYERS)}
    params = opened.weights.params
    assert set(params["encoder"]) == names
    joined = {**opened.system.frozen.params, **params["encoder"]}
    encoder = TransformerEncoder(SHAPE)
    texts = ["red apple", "a wild garden or an old castle", "river"]
    tokens = token_stores.encode(texts, opened.tokenizer, max_length=made.max_length)
    batch = packing.one_text_a_row(tokens.ids, np.diff(tokens.offsets), row_length=32)
    expected = opened.system.model.de(params, encoder.apply(joined, batch))
    found = predictor.load(whole).encode(texts, head="de")
    np.testing.assert_allclose(found, expected, atol=3e-3)  # hidden states in 16 bits
    evaluated = open_runs.evaluate_run(open_runs.open_run(whole))
    assert evaluated == json.loads(json.dumps(result))


def assert_same_end(folder: Path, reference: Path) -> None:
    newest = [run / "checkpoints" / str(checkpoints.steps(run)[-1]) for run in (folder, reference)]
    with ocp.StandardCheckpointer() as reader:
        restore = lambda path: [reader.restore(path / part) for part in ("model", "optimizer")]
        found = [restore(path) for path in newest]
    assert len(jax.tree.leaves(found[0])) == len(jax.tree.leaves(found[1]))
    jax.tree.map(np.testing.assert_array_equal, *found)
    for path in reference.glob("eval-*.json"):
        assert (folder / path.name).read_bytes() == path.read_bytes()


def test_labels_pass_frozen_layers_once_on_a_machine(own_data, folder, tmp_path, monkeypatch):
    launch.start(config(own_data, folder, LAYERS, epochs=1), tmp_path / "run")
    monkeypatch.setenv("XMC_CACHE", str(tmp_path / "elsewhere"))
    passed, blocks = [], frozen_layers.FrozenLayers._blocks

    def counting(self, tokens, rows):
        passed.append(len(rows))
        return blocks(self, tokens, rows)

    monkeypatch.setattr(frozen_layers.FrozenLayers, "_blocks", counting)
    found = [predictor.load(tmp_path / "run").predict(["red apple"]) for _ in range(2)]
    assert found[0] == found[1] and passed == [64, 1, 1]
    (tmp_path / "full").write_text("")  # where nothing can be kept
    monkeypatch.setenv("XMC_CACHE", str(tmp_path / "full"))
    assert predictor.load(tmp_path / "run").predict(["red apple"]) == found[0]
    assert passed == [64, 1, 1, 64, 1]


def test_label_texts_as_points_read_the_same_stores(own_data, folder, tmp_path):
    made = config(own_data, folder, LAYERS, epochs=1, gandalf__enabled=True)
    assert launch.start(made, tmp_path / "run")["heads"]


def test_own_data_with_a_pretrained_encoder_in_one_line(own_data, folder, tmp_path):
    made = unidec.get_config(f"{own_data},encoder={folder}")
    made.epochs, made.max_minutes = 1, 0.0
    assert launch.start(made, tmp_path / "run")["heads"]
    meta = json.loads((tmp_path / "run/meta.json").read_text())["resolved"]
    assert meta["encoder"]["freeze"] == LAYERS - 1 and meta["head_dim"] == 0
    assert open_runs.open_run(tmp_path / "run").system.frozen is not None


def test_what_cannot_be_frozen(own_data, folder, tmp_path):
    for changes, said in (
        ({"freeze": LAYERS + 1}, f"has {LAYERS} layers; expected 0 .none. to {LAYERS}"),
        ({"freeze": LAYERS, "head_dim": 0}, "leaves no head to train"),
        ({"freeze": -1}, "config.encoder.freeze = -1: expected at least 0"),
    ):
        with pytest.raises(ValueError, match=said):
            launch.start(config(own_data, folder, **changes), tmp_path / "run")
        assert not (tmp_path / "run").exists()
    with pytest.raises(
        settings.PlanError, match=r"encoder.freeze = 2: a bag of tokens has none of it"
    ):
        settings.check(tiny.config(own_data, encoder__freeze=2))


def test_frozen_layers_are_one_towers(own_data, folder, tmp_path):
    said = r"config.encoder.towers = 2, config.encoder.freeze = 2: frozen layers are one tower's"
    wrong = config(own_data, folder, LAYERS, encoder__towers=2)
    with pytest.raises(settings.PlanError, match=said):
        launch.start(wrong, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_towers_of_a_pretrained_encoder(own_data, folder, tmp_path):
    """Trained whole, from the same parameters."""
    made = config(own_data, folder, 0, encoder__towers=2, epochs=1)
    assert launch.start(made, tmp_path / "run")["heads"]
    opened = open_runs.open_run(tmp_path / "run")
    assert opened.system.frozen is None and not (tmp_path / "run/frozen").exists()
    query, label = (opened.weights.params["encoder"][side] for side in ("query", "label"))
    first = pretrained.load_encoder(folder)[1]
    for a, b, c in zip(*map(jax.tree.leaves, (query, label, first)), strict=True):
        assert a.ndim < 2 or not np.array_equal(a, b)
        np.testing.assert_allclose(a, c, atol=0.5)


def test_damaged_frozen_layers_are_made_again_from_the_same_folder(own_data, folder, tmp_path):
    source = shutil.copytree(folder, tmp_path / "pretrained")
    made, run = config(own_data, source, 1, epochs=1), tmp_path / "run"
    launch.start(made, run)
    expected = predictor.load(run).predict(["red apple"])
    weights = run / "frozen" / "model.safetensors"
    read = [weights, run / "frozen" / "config.json", run / "tokenizer" / "tokenizer.json"]
    before = {path: path.read_bytes() for path in read}
    for path in read:
        damage.flip(path)
        with pytest.raises(workdir.WorkdirError, match=rf"{path.name}: found other .* once more"):
            predictor.load(run)
        path.write_bytes(before[path])
    for path in read:
        damage.flip(path)
    launch.start(made, run)
    assert {path: path.read_bytes() for path in before} == before
    assert predictor.load(run).predict(["red apple"]) == expected
    damage.flip(weights)
    other = TransformerEncoder(SHAPE)
    pretrained.save_encoder(source, other, other.init(jax.random.key(4)))
    with pytest.raises(workdir.WorkdirError, match=r"model\.safetensors: .* was made again"):
        launch.start(made, run)
