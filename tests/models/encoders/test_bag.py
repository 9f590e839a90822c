"""The bag encoder against a plain loop, and its hand-written gradient against autodiff's."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _packing import one_a_row, pack, random_texts

from xmc_jax.models.encoders.bag import BagEncoder, sum_of_spans

ENCODER = BagEncoder(vocab_size=40, dim=6)


def params_with_bias():
    params = ENCODER.init(jax.random.key(0))
    params["block"]["bias"] = jax.random.normal(jax.random.key(1), (6,))
    return params


def texts_with_a_gap():
    texts = random_texts(0, 17, 40, 9)
    texts[5] = texts[5][:0]
    return texts


def loop(params, texts):
    table, block = np.asarray(params["tokens"]["embedding"], np.float64), params["block"]
    vectors = []
    for text in texts:
        if len(text) == 0:
            vectors.append(np.zeros(table.shape[1]))
            continue
        x = sum(table[i] for i in text) / len(text)
        y = x @ np.asarray(block["kernel"], np.float64) + np.asarray(block["bias"], np.float64)
        vectors.append(x + [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in y])
    return np.stack(vectors)


def test_equals_a_loop():
    params, texts = params_with_bias(), texts_with_a_gap()
    for batch in (pack(texts, 16), pack(texts, 16, padding=39), pack(texts, 64)):
        vectors = ENCODER.apply(params, batch)
        assert vectors.shape == (17, ENCODER.dim) and vectors.dtype == jnp.float32
        np.testing.assert_allclose(vectors, loop(params, texts), atol=1e-6)


def test_packed_equals_one_text_a_row_gradients_too():
    params, texts = params_with_bias(), random_texts(3, 12, 40, 9)

    def loss(params, batch):
        return jnp.sum(jnp.sin(ENCODER.apply(params, batch)))

    packed, alone = jax.value_and_grad(loss), jax.value_and_grad(loss)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        packed(params, pack(texts, 20)),
        alone(params, one_a_row(texts, 9)),
    )


def test_gradient_of_sum_of_spans_is_autodiffs():
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(30, 4)), jnp.float32)
    flat_ids = jnp.asarray(rng.integers(0, 30, 50), jnp.uint16)
    start = jnp.array([0, 7, 7, 20, 49, 50], jnp.int32)
    count = jnp.array([7, 13, 1, 29, 1, 0], jnp.int32)

    def plain(table):
        place = jnp.arange(50)[None]
        inside = (place >= start[:, None]) & (place < (start + count)[:, None])
        return inside.astype(jnp.float32) @ table[flat_ids.astype(jnp.int32)]

    def fast(table):
        return sum_of_spans(table, flat_ids, start, count)

    np.testing.assert_allclose(fast(table), plain(table), atol=1e-5)
    for wrap in (lambda f: f, jax.jit):
        gradients = [
            wrap(jax.grad(lambda t, f=f: jnp.sum(jnp.sin(f(t)))))(table) for f in (fast, plain)
        ]
        np.testing.assert_allclose(*gradients, atol=1e-5)


def test_no_array_of_all_tokens_is_made():
    """Temporaries: 1,024 rows of 64 tokens at dim 128 would be 34 MB."""
    encoder = BagEncoder(100, 128, dropout=0.0)
    params = encoder.init(jax.random.key(0))
    batch = pack(random_texts(0, 128, 100, 32), 64)
    times = -(-1024 // len(batch.ids))
    batch = batch._replace(
        ids=np.tile(batch.ids, (times, 1)),
        segment_ids=np.tile(batch.segment_ids, (times, 1)),
        text_row=np.tile(batch.text_row, times),
        text_segment=np.tile(batch.text_segment, times),
    )
    step = jax.jit(jax.grad(lambda p, b: jnp.sum(encoder.apply(p, b) ** 2)))
    memory = step.lower(params, batch).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.5 * batch.ids.size * 128 * 4


def test_rows_of_a_batch_may_stand_for_the_whole_table():
    params, texts = params_with_bias(), random_texts(4, 6, 40, 5)
    unique, renumbered = np.unique(np.concatenate(texts), return_inverse=True)
    few = {**params, "tokens": {"embedding": params["tokens"]["embedding"][unique]}}
    ends = np.cumsum([len(t) for t in texts])[:-1]
    np.testing.assert_allclose(
        ENCODER.apply(few, pack(np.split(renumbered, ends), 16)),
        ENCODER.apply(params, pack(texts, 16)),
        atol=1e-6,
    )


def test_dropout_only_in_training_and_by_key():
    params, batch = params_with_bias(), pack(random_texts(5, 9, 40, 5), 16)
    apply = jax.jit(BagEncoder.apply, static_argnames=("self", "train"))
    plain = apply(ENCODER, params, batch)
    key, other = jax.random.split(jax.random.key(7))
    np.testing.assert_array_equal(apply(ENCODER, params, batch, key=key), plain)
    first = apply(ENCODER, params, batch, key=key, train=True)
    np.testing.assert_array_equal(first, apply(ENCODER, params, batch, key=key, train=True))
    assert (first != plain).mean() > 0.5
    assert (first != apply(ENCODER, params, batch, key=other, train=True)).mean() > 0.5
    with pytest.raises(ValueError, match="train=True needs key"):
        ENCODER.apply(params, batch, train=True)


def test_starts_with_unit_variance():
    table = BagEncoder(2000, 64).init(jax.random.key(0))["tokens"]["embedding"]
    assert abs(float(table.std()) - 1) < 0.01 and abs(float(table.mean())) < 0.01


def test_with_embeddings_scales_to_unit_variance():
    params = ENCODER.init(jax.random.key(0))
    table = np.random.default_rng(0).normal(0.3, 0.05, (40, 6))
    embedding = ENCODER.with_embeddings(params, table)["tokens"]["embedding"]
    np.testing.assert_allclose(np.asarray(embedding).std(), 1, rtol=1e-5)
    np.testing.assert_allclose(embedding, table / table.std(), rtol=1e-4)
    with pytest.raises(ValueError, match=r"shape \(39, 6\).*\(40, 6\)"):
        ENCODER.with_embeddings(params, table[:-1])
    with pytest.raises(ValueError, match="standard deviation 0"):
        ENCODER.with_embeddings(params, np.ones((40, 6)))
