"""Heads of UniDEC, and an encoder of another library behind the same contract."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _packing import pack, random_texts
from flax import nnx

from xmc_jax.models.encoders import pooling
from xmc_jax.models.encoders.bag import BagEncoder
from xmc_jax.models.heads.unidec import UniDEC, l2norm

MODEL = UniDEC(BagEncoder(40, 6), head_dim=4)


def test_l2norm_is_safe_at_zero():
    x = jnp.array([[3.0, 4.0], [0.0, 0.0], [1e-15, 0.0]])
    np.testing.assert_allclose(l2norm(x), [[0.6, 0.8], [0, 0], [1, 0]], atol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(l2norm(x) * jnp.array([1.0, 2.0])))(x[:2])
    # d(x/|x|) = (g - y <y, g>) / |x| with y = (.6, .8), g = (1, 2)
    np.testing.assert_allclose(
        gradient, [[(1 - 0.6 * 2.2) / 5, (2 - 0.8 * 2.2) / 5], [0, 0]], atol=1e-6
    )


def test_heads_are_the_papers():
    params = MODEL.init(jax.random.key(0))
    params["de_head"]["bias"] = jnp.arange(4.0)
    assert MODEL.dim == 4
    vectors = MODEL.vectors(params, pack(random_texts(0, 7, 40, 5), 16))
    v = np.asarray(vectors, np.float64)
    h = np.tanh(v @ np.asarray(params["de_head"]["kernel"]) + np.arange(4.0))
    de, clf = MODEL.de(params, vectors), MODEL.clf(params, vectors)
    np.testing.assert_allclose(de, h / np.linalg.norm(h, axis=1, keepdims=True), atol=1e-6)
    np.testing.assert_allclose(clf, v @ np.asarray(params["clf_head"]["kernel"]), atol=1e-5)
    assert de.dtype == clf.dtype == jnp.float32
    assert MODEL.de(params, vectors[None]).shape == (1, 7, 4)


def test_parts_are_drawn_apart():
    """Also where encoder and heads are of one size, and where an encoder starts its own way."""
    model = UniDEC(BagEncoder(40, 6), head_dim=6)
    own = lambda key: {"block": model.encoder.init(key)["block"]}
    for params in (model.init(jax.random.key(0)), model.init(jax.random.key(0), own)):
        kernels = [params["encoder"]["block"]["kernel"]]
        kernels += [params[name]["kernel"] for name in ("de_head", "clf_head")]
        for i in range(3):
            assert not np.isclose(kernels[i], kernels[i - 1]).any()
    assert set(params["encoder"]) == {"block"}


def test_without_heads_the_vectors_themselves():
    model = UniDEC(MODEL.encoder, head_dim=None)
    params = model.init(jax.random.key(0))
    assert set(params) == {"encoder"} and model.dim == 6
    batch = pack(random_texts(0, 7, 40, 5), 16)
    vectors = model.vectors(params, batch)
    np.testing.assert_array_equal(vectors, MODEL.encoder.apply(params["encoder"], batch))
    np.testing.assert_array_equal(model.clf(params, vectors), vectors)
    np.testing.assert_allclose(jnp.linalg.norm(model.de(params, vectors), axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("head", ["de", "clf"])
def test_dropout_only_in_training_and_by_key(head):
    params = MODEL.init(jax.random.key(0))
    vectors = jax.random.normal(jax.random.key(1), (300, 6))

    def apply(key=None, train=False):
        return getattr(MODEL, head)(params, vectors, key, train)

    key = jax.random.key(2)
    np.testing.assert_array_equal(apply(key), apply())
    trained = apply(key, True)
    np.testing.assert_array_equal(trained, apply(key, True))
    assert 0.05 < float((trained == 0).mean()) < 0.15
    assert not np.array_equal(trained, apply(jax.random.key(3), True))
    if head == "de":
        np.testing.assert_allclose(jnp.linalg.norm(trained, axis=1), 1, rtol=1e-5)
    with pytest.raises(ValueError, match="train=True needs key"):
        apply(None, True)


def test_empty_slots_give_finite_gradients_in_both_heads():
    texts = random_texts(0, 5, 40, 5)
    texts[2] = texts[2][:0]
    batch = pack(texts, 16)
    for model in (MODEL, UniDEC(MODEL.encoder, None)):

        def loss(params, model=model):
            vectors = model.vectors(params, batch)
            return jnp.sum(model.de(params, vectors)[:, 0] + model.clf(params, vectors)[:, 1])

        gradient = jax.grad(loss)(model.init(jax.random.key(0)))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


class NnxWords(nnx.Module):
    """Someone's own encoder: a table, a linear map, dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Embed(40, 8, rngs=rngs)
        self.out = nnx.Linear(8, 6, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, ids, *, deterministic, rngs=None):
        return self.drop(self.out(self.table(ids)), deterministic=deterministic, rngs=rngs)


@dataclass(frozen=True)
class NnxEncoder:
    """The contract of an encoder, met by split and merge: parameters are a plain dict."""

    dim: int = 6

    def init(self, key):
        return nnx.to_pure_dict(nnx.split(NnxWords(nnx.Rngs(key)), nnx.Param, ...)[1])

    def apply(self, params, tokens, *, key=None, train=False, side="query"):
        shapes = nnx.eval_shape(lambda: NnxWords(nnx.Rngs(0)))
        graph, state, _ = nnx.split(shapes, nnx.Param, ...)
        nnx.replace_by_pure_dict(state, params)
        rest = nnx.split(NnxWords(nnx.Rngs(0)), nnx.Param, ...)[2]
        module = nnx.merge(graph, state, rest)
        rngs = nnx.Rngs(dropout=key) if train else None
        hidden = module(
            jnp.asarray(tokens.ids).astype(jnp.int32), deterministic=not train, rngs=rngs
        )
        return pooling.mean_pool(hidden, tokens, tokens.ids.shape[1])


def test_an_nnx_encoder_fits_the_contract():
    model = UniDEC(NnxEncoder(), head_dim=4)
    params = model.init(jax.random.key(0))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(params))
    texts = random_texts(0, 7, 40, 5)
    batch = pack(texts, 16)

    def loss(params, key, model, train):
        vectors = model.vectors(params, batch, key, train)
        return jnp.sum(model.de(params, vectors) ** 2 * jnp.arange(4.0)), vectors

    step = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=(2, 3))
    (_, vectors), gradient = step(params, None, model, False)
    table, out = params["encoder"]["table"]["embedding"], params["encoder"]["out"]
    expected = np.stack([np.asarray(table)[t].mean(0) for t in texts]) @ out["kernel"] + out["bias"]
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    assert float(jnp.abs(gradient["encoder"]["table"]["embedding"]).max()) > 0
    (_, dropped), _ = step(params, jax.random.key(1), model, True)
    assert not np.allclose(dropped, vectors)
