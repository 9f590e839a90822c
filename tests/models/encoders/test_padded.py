"""One padded text a row gives what the same texts give packed, for every encoder."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _filling import fill, fill_moving
from _packing import pack, random_texts

from xmc_jax import models
from xmc_jax.models.encoders import padded as module
from xmc_jax.models.encoders.bag import BagEncoder
from xmc_jax.models.encoders.padded import padded_batch
from xmc_jax.models.encoders.transformer import TransformerConfig, TransformerEncoder
from xmc_jax.models.encoders.two_towers import TwoTowers
from xmc_jax.models.frugal.bag_queries import BagQueries
from xmc_jax.models.frugal.classifier import Frugal
from xmc_jax.models.frugal.inception import InceptionQueries
from xmc_jax.models.heads.unidec import UniDEC

V, T = 40, 9
CONFIG = TransformerConfig(
    vocab_size=V, dim=16, num_layers=1, num_heads=4, mlp_dim=24, max_positions=T
)
BAG = BagEncoder(V, 16)
TRANSFORMER = TransformerEncoder(CONFIG)
ENCODERS = {
    "bag": BAG,
    "transformer": TRANSFORMER,
    "transformer, cls": dataclasses.replace(TRANSFORMER, pooling="cls"),
    "two towers": TwoTowers(TRANSFORMER, BAG),
    "unidec": UniDEC(BAG, head_dim=4),
}
QUERIES = {
    "bag": BagQueries(V, 64),
    "inception": InceptionQueries(V, 64, length=6),
    "experts": InceptionQueries(V, 64, length=6, experts=True),
}
left = pytest.mark.parametrize("left", [False, True], ids=["right padding", "left padding"])


def some_texts() -> list[np.ndarray]:
    texts = random_texts(0, 9, V, T)
    texts[4] = texts[4][:0]
    return texts


def padded(texts: list[np.ndarray], left: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ids with what no encoder may read in the padding, and the mask."""
    ids, mask = np.full((len(texts), T), 7, np.int32), np.zeros((len(texts), T), np.int32)
    for row, text in enumerate(texts):
        place = slice(T - len(text), T) if left else slice(0, len(text))
        ids[row, place], mask[row, place] = text, 1
    return ids, mask


def params_of(encoder) -> dict:
    return fill(jax.eval_shape(encoder.init, jax.random.key(0)), 1)


def assert_close(found, expected) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


@left
@pytest.mark.parametrize("name", ENCODERS)
def test_equals_packed(name, left):
    encoder, texts = ENCODERS[name], some_texts()
    params, batch = params_of(encoder), pack(texts, 16)
    run = jax.jit(encoder.apply_padded, static_argnames="side")
    for side in ("query", "label"):
        if isinstance(encoder, UniDEC):
            expected = encoder.vectors(params, batch, side=side)
        else:
            expected = encoder.apply(params, batch, side=side)
        vectors = run(params, *padded(texts, left), side=side)
        assert_close(vectors, expected)
        assert not np.asarray(vectors)[4].any()  # the empty text


@left
@pytest.mark.parametrize("name", QUERIES)
def test_features_equal_packed(name, left):
    """Of the query encoders, and of the classifier around them, without dropout."""
    model, texts = Frugal(QUERIES[name], num_clusters=3), some_texts()
    shapes = jax.eval_shape(lambda key: model.init(key, np.ones(V)), jax.random.key(0))
    moving = fill_moving(shapes.pop("moving"), 2)
    params = {**fill(shapes, 1), "moving": moving}
    expected, _ = model.features(params, pack(texts, 16))
    assert_close(jax.jit(model.apply_padded)(params, *padded(texts, left)), expected)
    shared = (params["tokens"]["embedding"], moving["idf"])
    features, kept = jax.jit(model.queries.apply_padded)(
        params["queries"], *shared, *padded(texts, left), moving["queries"]
    )
    assert_close(features, expected)
    assert_close(kept, moving["queries"])


def test_one_tower_does_not_ask_which_side():
    """The program of every side is the same one, so that models of one tower stay as they are."""
    batch = pack(some_texts(), 16)
    for encoder in (BAG, TRANSFORMER):
        assert encoder.shared
        params = params_of(encoder)
        programs = {
            str(jax.make_jaxpr(lambda p, s=side, e=encoder: e.apply(p, batch, **s))(params))
            for side in ({}, {"side": "query"}, {"side": "label"}, {"side": "both"})
        }
        assert len(programs) == 1


@left
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_hidden_states_in_place_of_ids(pooling, left):
    """Above frozen layers, a vector a token; above all of them, one a text."""
    two = dataclasses.replace(TRANSFORMER, config=dataclasses.replace(CONFIG, num_layers=2))
    table = np.random.default_rng(0).normal(size=(V, 16)).astype(np.float32)
    for start, texts in ((1, some_texts()), (2, [text[:1] for text in some_texts()])):
        encoder = dataclasses.replace(two, pooling=pooling, start=start)
        params, batch = params_of(encoder), pack(texts, 16)
        expected = encoder.apply(params, batch._replace(ids=table[batch.ids]))
        ids, mask = padded(texts, left)
        vectors = jax.jit(encoder.apply_padded)(params, table[ids], mask)
        assert_close(vectors, expected)
        assert np.asarray(vectors).any(axis=1).tolist() == [len(text) > 0 for text in texts]


def test_no_encoder_is_missing():
    """Whatever makes vectors of packed texts takes padded ones, and stands in a test above."""
    found = set()
    for info in pkgutil.walk_packages(models.__path__, "xmc_jax.models."):
        for name, kind in vars(importlib.import_module(info.name)).items():
            own = isinstance(kind, type) and kind.__module__ == info.name and name[0] != "_"
            if own and any(hasattr(kind, method) for method in ("apply", "features", "vectors")):
                found.add(kind)
    tested = {type(model) for model in (*ENCODERS.values(), *QUERIES.values())} | {Frugal}
    assert found == tested and all(hasattr(kind, "apply_padded") for kind in found)


def test_the_batch_of_padded_rows():
    batch = padded_batch(jnp.array([[5, 7, 8], [0, 0, 0]]), jnp.array([[0, 1, 1], [0, 0, 0]]))
    assert batch.ids.tolist() == [[5, 7, 8], [0, 0, 0]]
    assert batch.segment_ids.tolist() == [[0, 1, 1], [0, 0, 0]]
    assert batch.positions.tolist() == [[0, 0, 1], [0, 0, 0]]
    assert batch.text_row.tolist() == [0, 1] and batch.text_segment.tolist() == [1, 0]
    with pytest.raises(ValueError, match=r"ids \(2, 3\), mask \(2, 4\); expected both \[B, T\]"):
        padded_batch(np.zeros((2, 3)), np.ones((2, 4)))
    assert padded_batch(np.zeros((2, 0)), np.ones((2, 0))).text_segment.tolist() == [0, 0]


def test_doctest():
    assert doctest.testmod(module).failed == 0
