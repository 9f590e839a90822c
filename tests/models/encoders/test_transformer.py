"""The transformer: equal to Hugging Face, packed equal to unpacked, padding without effect."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _packing import one_a_row, pack, random_texts

from xmc_jax.models.encoders.transformer import TransformerConfig, TransformerEncoder
from xmc_jax.models.pretrained import load_encoder

FAMILIES = pytest.mark.parametrize("family", ["bert", "distilbert"])
CASES = pytest.mark.parametrize(("family", "pooling"), [("bert", "mean"), ("distilbert", "cls")])

# Compiled once for all tests that use the same encoder and shapes.
apply = jax.jit(TransformerEncoder.apply, static_argnames=("self", "train"))


def tiny(family: str, **options) -> TransformerEncoder:
    config = TransformerConfig(
        family=family,
        vocab_size=50,
        dim=16,
        num_layers=1,  # the golden encoders have more
        num_heads=4,
        mlp_dim=24,
        max_positions=12,
        num_token_types=2 if family == "bert" else 0,
        initializer_range=0.3,
    )
    return TransformerEncoder(config, **options)


@functools.cache
def tiny_params(family: str):
    """Parameters without zeros and ones, so that every bias and scale matters."""
    leaves, tree = jax.tree.flatten(tiny(family).init(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return tree.unflatten([x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)])


def texts_of(encoder, seed=0, count=13):
    return random_texts(seed, count, encoder.config.vocab_size, encoder.config.max_positions)


def packed_golden(expected, row_length=40):
    texts = [i[m > 0] for i, m in zip(expected["input_ids"], expected["attention_mask"])]
    return pack(texts, row_length, padding=3)


def largest_error(found, expected):
    return np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()


@FAMILIES
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-5)])
def test_equals_hugging_face(golden, family, dtype, tolerance):
    folder = golden / f"encoder_{family}"
    expected = np.load(folder / "expected.npz")
    with jax.enable_x64(dtype == "float64"):
        encoder, params = load_encoder(folder, compute_dtype=dtype)
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        hidden = encoder.encode_padded(params, expected["input_ids"], expected["attention_mask"])
        assert hidden.dtype == dtype
        assert largest_error(hidden, expected["last_hidden_state"]) < tolerance
        batch = packed_golden(expected)
        for pooling, name in (("mean", "mean_pooled"), ("cls", "cls")):
            model = dataclasses.replace(encoder, pooling=pooling)
            assert largest_error(model.apply(params, batch), expected[name]) < tolerance


@CASES
def test_packed_equals_one_text_a_row_gradients_too(family, pooling):
    encoder = tiny(family, pooling=pooling)
    params, texts = tiny_params(encoder.config.family), texts_of(encoder)

    def loss(params, batch):
        vectors = encoder.apply(params, batch)
        return jnp.sum(jnp.sin(vectors)), vectors

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, packed), packed_gradient = step(params, pack(texts, 32))
    (_, alone), gradient = step(params, one_a_row(texts, 12))
    np.testing.assert_allclose(packed, alone, atol=1e-5)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), packed_gradient, gradient
    )


def test_padding_is_never_read():
    """Ids past the vocabulary, an all-padding row and an empty slot change nothing."""
    encoder = tiny("bert")
    params, texts = tiny_params(encoder.config.family), texts_of(encoder)
    texts[3] = texts[3][:0]
    clean, dirty = pack(texts, 32), pack(texts, 32, padding=60000)

    def extra_row(x):
        return np.concatenate([x, np.full_like(x[:1], 0)])

    dirty = dirty._replace(
        ids=extra_row(dirty.ids),
        segment_ids=extra_row(dirty.segment_ids),
        positions=extra_row(dirty.positions),
    )
    vectors = apply(encoder, params, dirty)
    np.testing.assert_allclose(vectors, apply(encoder, params, clean), atol=1e-6)
    np.testing.assert_array_equal(vectors[3], np.zeros(16))
    hidden = encoder.hidden(params, dirty.ids, dirty.segment_ids, dirty.positions)
    assert np.isfinite(hidden).all()
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(encoder.apply(p, dirty)))))(params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    used = np.unique(np.concatenate(texts))
    unused = np.setdiff1d(np.arange(50), used)
    assert not np.asarray(gradient["embeddings"]["word"])[unused].any()


@FAMILIES
def test_a_text_does_not_see_its_neighbours(family):
    encoder = tiny(family)
    params, texts = tiny_params(encoder.config.family), texts_of(encoder)
    vectors = apply(encoder, params, pack(texts, 32))
    texts[0] = (texts[0] + 1) % 50
    changed = apply(encoder, params, pack(texts, 32))
    np.testing.assert_array_equal(changed[1:], vectors[1:])
    assert np.abs(changed[0] - vectors[0]).max() > 1e-3


def test_padded_texts_without_any_token_stay_finite():
    encoder = tiny("bert")
    nothing = np.zeros((2, 5), int)
    hidden = encoder.encode_padded(tiny_params("bert"), nothing, nothing)
    assert np.isfinite(hidden).all()


def test_remat_changes_nothing():
    plain, remat = tiny("bert"), tiny("bert", remat=True)
    params, batch = tiny_params("bert"), pack(texts_of(plain), 32)
    shapes = jax.eval_shape(remat.init, jax.random.key(0))
    assert jax.tree.structure(shapes) == jax.tree.structure(params)

    @functools.cache
    def step(encoder):
        def loss(params):
            return jnp.sum(jnp.sin(encoder.apply(params, batch, key=jax.random.key(5), train=True)))

        return jax.jit(jax.value_and_grad(loss))(params)

    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(step(plain)[1]))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), step(plain), step(remat)
    )


@CASES
def test_sixteen_bit_compute(family, pooling):
    wide = tiny(family, pooling=pooling)
    narrow = dataclasses.replace(wide, compute_dtype="bfloat16")
    params, batch = tiny_params(family), pack(texts_of(wide), 32)
    vectors = apply(narrow, params, batch)
    assert vectors.dtype == jnp.float32
    assert largest_error(vectors, np.asarray(apply(wide, params, batch))) < 0.03
    hidden = jax.eval_shape(narrow.hidden, params, *batch[:3])
    assert hidden.dtype == jnp.bfloat16
    gradient = jax.eval_shape(jax.grad(lambda p: jnp.sum(narrow.apply(p, batch) ** 2)), params)
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}


@FAMILIES
def test_dropout_only_in_training_and_by_key(family):
    encoder = tiny(family)
    params, batch = tiny_params(encoder.config.family), pack(texts_of(encoder), 32)
    plain = apply(encoder, params, batch)
    key, other = jax.random.split(jax.random.key(2))
    np.testing.assert_array_equal(apply(encoder, params, batch, key=key), plain)
    first = apply(encoder, params, batch, key=key, train=True)
    np.testing.assert_array_equal(first, apply(encoder, params, batch, key=key, train=True))
    assert np.abs(first - plain).max() > 1e-2
    assert np.abs(first - apply(encoder, params, batch, key=other, train=True)).max() > 1e-2
    with pytest.raises(ValueError, match="train=True needs key"):
        encoder.apply(params, batch, train=True)
    none = dataclasses.replace(
        encoder, config=dataclasses.replace(encoder.config, dropout=0.0, attention_dropout=0.0)
    )
    np.testing.assert_allclose(apply(none, params, batch, key=key, train=True), plain, atol=1e-6)


def test_a_shape_is_traced_once_for_equal_encoders():
    traces = []

    def counted(encoder, params, batch):
        traces.append(encoder)
        return encoder.apply(params, batch)

    jitted = jax.jit(counted, static_argnums=0)
    params = tiny_params("bert")
    for seed in (0, 1):
        encoder = tiny("bert")
        texts = [np.full(6, seed), np.full(7, seed)]
        jitted(encoder, params, pack(texts, 32))
    assert len(traces) == 1


def test_init_follows_the_config():
    encoder = tiny("bert")
    params = encoder.init(jax.random.key(0))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
    kernel = params["layer_0"]["qkv"]["kernel"]
    assert kernel.shape == (16, 48) and abs(float(kernel.std()) - 0.3) < 0.03
    np.testing.assert_array_equal(params["layer_0"]["mlp_norm"]["scale"], np.ones(16))
    np.testing.assert_array_equal(params["layer_0"]["mlp_in"]["bias"], np.zeros(24))
    assert encoder.dim == 16 and hash(encoder) == hash(tiny("bert"))


@pytest.mark.parametrize(
    ("config", "millions"),
    [(TransformerConfig.distilbert(), 66.36), (TransformerConfig.minilm(), 22.57)],
)
def test_published_sizes(config, millions):
    """DistilBERT-base has 66,362,880 parameters, MiniLM-L6-H384 without pooler 22,565,376."""
    shapes = jax.eval_shape(TransformerEncoder(config).init, jax.random.key(0))
    assert round(sum(x.size for x in jax.tree.leaves(shapes)) / 1e6, 2) == millions


@FAMILIES
def test_config_round_trip(golden, family):
    published = json.loads((golden / f"encoder_{family}" / "config.json").read_text())
    config = TransformerConfig.from_huggingface(published)
    written = config.to_huggingface()
    assert TransformerConfig.from_huggingface(written) == config
    common = written.keys() & published.keys()
    assert len(common) >= 12
    assert {k: written[k] for k in common} == {k: published[k] for k in common}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "roberta"}, "'roberta' is not supported.*bert.*distilbert"),
        ({"model_type": None}, "None is not supported"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'.*expected 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"num_attention_heads": 7}, "not a multiple of num_heads 7"),
    ],
)
def test_configs_that_are_refused(change, message):
    config = TransformerConfig.minilm().to_huggingface() | change
    with pytest.raises(ValueError, match=message):
        TransformerConfig.from_huggingface(config)


def test_options_and_shapes_that_are_refused():
    for option in ("pooling", "compute_dtype", "attention"):
        with pytest.raises(ValueError, match=f"{option} is 'max'; expected one of"):
            tiny("bert", **{option: "max"})
    with pytest.raises(ValueError, match="'cudnn' with compute_dtype 'float32'"):
        tiny("bert", attention="cudnn")
    encoder = tiny("bert")
    params, ids = tiny_params(encoder.config.family), np.zeros((2, 13), int)
    with pytest.raises(ValueError, match="texts of 13 tokens for an encoder of 12 positions"):
        encoder.encode_padded(params, ids, ids)
    with pytest.raises(ValueError, match="expected both"):
        encoder.encode_padded(params, ids, ids[:1])
    with pytest.raises(ValueError, match="expected three arrays"):
        encoder.hidden(params, ids, ids[:1], ids)
    fused = tiny("bert", attention="cudnn", compute_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"attention_dropout 0.1: it has no dropout"):
        fused.hidden(params, ids, ids, ids, key=jax.random.key(0), train=True)
