"""The frugal family: which parts there are, what they are put together to, what moves."""

from __future__ import annotations

import functools

import _oracles
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _filling import fill, fill_moving
from _packing import pack, random_texts

from xmc_jax.models.frugal.bag_queries import BagQueries
from xmc_jax.models.frugal.classifier import Frugal
from xmc_jax.models.frugal.inception import InceptionQueries

V, D, C, P = 20, 8, 5, 6
BAG = BagQueries(V, D, dropout=0.3)
PARTS = {  # label_text, label_graph, free_weights
    "astec": (False, False, True),
    "decaf": (True, False, True),
    "eclare": (True, True, True),
    "phase-i": (True, True, False),
    "text": (True, False, False),
}


@functools.cache
def setting(name):
    """Model, parameters, z1, z2, u."""
    model = Frugal(BAG, C, *PARTS[name])
    rng = np.random.default_rng(0)
    vectors = (rng.normal(size=(P, D)).astype(np.float32) for _ in range(3))
    return model, filled(model), *vectors


def filled(model):
    """Parameters in which nothing is 0 by birth."""
    shapes = jax.eval_shape(lambda key: model.init(key, np.ones(V)), jax.random.key(0))
    moving = fill_moving(shapes.pop("moving"), 2)
    return {**fill(shapes, 1), "moving": moving}


def assert_close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


@pytest.mark.parametrize("train", [False, True])
def test_bag_features_equal_numpy(train):
    texts = random_texts(0, 7, V, 6)
    texts[3] = texts[3][:0]
    model, params, *_ = setting("astec")
    model = Frugal(BagQueries(V, D, dropout=0.0), C, dropout=0.0)
    key = jax.random.key(0)
    run = jax.jit(lambda p, tokens: model.features(p, tokens, key=key, train=train))
    p = _oracles.float64(params)
    x = _oracles.tfidf(texts, p["moving"]["idf"]) @ p["tokens"]["embedding"]
    expected, moving = [], dict(p["moving"]["queries"])
    for task in ("meta", "extreme"):
        block = p["queries"][task]
        y, moving[task] = _oracles.block(block, moving[task], x, train)
        expected.append(np.where(np.arange(7)[:, None] == 3, 0, y))
    for batch in (pack(texts, 16), pack(texts, 8)):
        features, kept = run(params, batch)
        assert_close(list(features), expected)
        assert_close(kept, {**p["moving"], "queries": moving})
    logits = model.cluster_scores(params, features[0])
    assert logits.shape == (7, C)
    assert_close(logits, expected[0] @ p["meta"]["kernel"] + p["meta"]["bias"])


@pytest.mark.parametrize(
    ("name", "train"), [*((name, False) for name in PARTS), ("text", True), ("eclare", True)]
)
def test_label_vectors_equal_numpy(name, train):
    model, params, texts, graphs, rows = setting(name)
    model = Frugal(BAG, C, *PARTS[name], label_dropout=0.0)
    key = jax.random.key(0)
    run = jax.jit(lambda p, *parts: model.label_vectors(p, *parts, key=key, train=train))
    p = _oracles.float64(params)
    for given in (rows, None) if len(model.parts) > 1 else (rows,):
        parts, moving = [], dict(p["moving"])
        for part, z in zip(("text", "graph", "free"), (texts, graphs, given)):
            if part in model.parts and part != "free":
                z, moving[part] = _oracles.block(p[part], moving[part], np.float64(z), train)
            if part in model.parts:
                parts.append(z)
        expected = parts[0]
        if len(parts) > 1:
            expected, moving["attention"] = _oracles.attend(
                p["attention"], moving["attention"], parts, train
            )
        found, kept = run(params, texts, graphs, given)
        assert_close(found, expected)
        assert_close(kept, moving)


def test_only_the_parts_that_are_on_have_parameters():
    always = {"tokens", "queries", "meta", "moving"}
    more = {
        "astec": set(),
        "text": {"text"},
        "decaf": {"text", "attention"},
        "eclare": {"text", "graph", "attention"},
        "phase-i": {"text", "graph", "attention"},
    }
    for name in PARTS:
        model, params, *_ = setting(name)
        assert set(params) == always | more[name]
        assert set(params["moving"]) == {"idf", "queries"} | more[name]
        assert model.dim == D
    assert setting("eclare")[1]["attention"]["score"]["kernel"].shape == (3 * D, 3)
    _, params, _, _, rows = setting("astec")
    found, _ = setting("astec")[0].label_vectors(params, None, None, rows)
    np.testing.assert_array_equal(found, rows)


def test_text_vectors_and_weighted_sum_share_the_table():
    model, params, *_ = setting("eclare")
    texts = random_texts(1, 5, V, 6)
    rows = _oracles.tfidf(texts, np.float64(params["moving"]["idf"]))
    expected = rows @ np.float64(params["tokens"]["embedding"])
    assert_close(jax.jit(model.text_vectors)(params, pack(texts, 12)), expected)
    ids, weights = np.tile(np.arange(V), (5, 1)), rows.astype(np.float32)
    assert_close(jax.jit(model.weighted_sum)(params, ids, weights), expected)


def step_loss(model, params, tokens, labels, z2, rows, key):
    """A step as training makes it: the query's tokens, then the labels'."""
    (meta, extreme), moving = model.features(params, tokens, key=key, train=True)
    z1 = model.text_vectors(params, labels)
    vectors, moving = model.label_vectors(
        {**params, "moving": moving}, z1, z2, rows, key=key, train=True
    )
    logits = jnp.concatenate([extreme @ vectors.T, model.cluster_scores(params, meta)], axis=1)
    return jnp.mean(jax.nn.softplus(logits)), moving


@pytest.mark.parametrize("queries", [BAG, InceptionQueries(V, 64, 6, experts=True)])
def test_gradients_are_finite_with_empty_texts_and_none_moves_what_moves(queries):
    model = Frugal(queries, C, True, True, True)
    params = filled(model)
    texts, labels = random_texts(0, 7, V, 6), random_texts(1, P, V, 6)
    texts[3], labels[0] = texts[3][:0], labels[0][:0]
    zeros = jnp.zeros((P, queries.dim))
    grad = jax.grad(functools.partial(step_loss, model), has_aux=True)
    gradient, moving = jax.jit(grad)(
        params, pack(texts, 16), pack(labels, 16), zeros, zeros, jax.random.key(1)
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(gradient["moving"]))
    assert float(jnp.abs(gradient["tokens"]["embedding"]).max()) > 0
    assert jax.tree.structure(moving) == jax.tree.structure(params["moving"])
    same = jax.tree.map(
        lambda a, b: a.shape == b.shape and a.dtype == b.dtype, moving, params["moving"]
    )
    assert all(jax.tree.leaves(same))
    np.testing.assert_array_equal(moving["idf"], params["moving"]["idf"])
    for part in ("text", "graph", "attention", "queries"):
        changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), moving, params["moving"])
        assert any(jax.tree.leaves(changed[part]))


def test_gradients_equal_finite_differences():
    model, params, _, graphs, rows = setting("eclare")
    tokens, labels = pack(random_texts(0, 7, V, 6), 16), pack(random_texts(1, P, V, 6), 16)
    moving = jax.tree.map(np.float64, params["moving"])
    state = jax.tree.map(np.float64, {k: v for k, v in params.items() if k != "moving"})
    state["rows"], z2 = np.float64(rows), np.float64(graphs)
    with jax.enable_x64(True):

        @jax.jit
        def loss(state):
            params = {**state, "moving": moving}
            (meta, extreme), _ = model.features(params, tokens)
            z1 = model.text_vectors(params, labels)
            vectors, _ = model.label_vectors(params, z1, z2, state["rows"])
            scores = model.cluster_scores(params, meta)
            return jnp.sum(jnp.sin(extreme @ vectors.T)) + jnp.sum(jnp.sin(scores))

        gradient = jax.device_get(jax.jit(jax.grad(loss))(state))
        rng = np.random.default_rng(3)
        for name, part in gradient.items():
            step = jax.tree.map(lambda x: rng.normal(size=x.shape), part)
            move = lambda h, n=name, d=step: {
                **state,
                n: jax.tree.map(lambda a, b: a + h * b, state[n], d),
            }
            expected = float(loss(move(1e-6)) - loss(move(-1e-6))) / 2e-6
            found = sum(jax.tree.leaves(jax.tree.map(lambda g, d: np.sum(g * d), part, step)))
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_dropout_only_in_training_and_by_key():
    model, params, *parts = setting("eclare")
    tokens = pack(random_texts(0, 7, V, 6), 16)
    features = jax.jit(Frugal.features, static_argnames=("self", "train"))
    labels = jax.jit(Frugal.label_vectors, static_argnames=("self", "train"))
    for run in (
        lambda **options: features(model, params, tokens, **options)[0][1],
        lambda **options: labels(model, params, *parts, **options)[0],
    ):
        key = jax.random.key(4)
        np.testing.assert_array_equal(run(key=key), run())
        first = run(key=key, train=True)
        np.testing.assert_array_equal(first, run(key=key, train=True))
        assert (first != run(key=jax.random.key(5), train=True)).mean() > 0.3
        with pytest.raises(ValueError, match="train=True needs key"):
            run(train=True)


def test_starts_at_the_scale_told_and_unseen_tokens_at_zero():
    idf = np.ones(2000)
    idf[7] = 0
    model = Frugal(BagQueries(2000, 16), C, token_scale=0.25)
    table = np.asarray(model.init(jax.random.key(0), idf)["tokens"]["embedding"])
    assert (table[7] == 0).all() and abs(table.std() - 0.25) < 0.01 and abs(table.mean()) < 0.01
    words = np.random.default_rng(0).normal(0.3, 0.05, (2000, 16))
    params = model.with_embeddings(model.init(jax.random.key(0), idf), words)
    np.testing.assert_allclose(params["tokens"]["embedding"], 0.25 * words / words.std(), rtol=1e-4)
    with pytest.raises(ValueError, match=r"shape \(1999, 16\).*\(2000, 16\)"):
        model.with_embeddings(params, words[1:])
    with pytest.raises(ValueError, match="standard deviation 0"):
        model.with_embeddings(params, np.ones((2000, 16)))


def test_a_new_classifier_over_clusters():
    model = Frugal(BAG, 4000)
    made = model.init_meta(jax.random.key(0))
    assert made["kernel"].shape == (D, 4000) and (made["bias"] == 0).all()
    again = model.init_meta(jax.random.key(1))
    assert not np.array_equal(made["kernel"], again["kernel"])


def test_bad_input_gets_one_clear_error():
    with pytest.raises(ValueError, match="at least one"):
        Frugal(BAG, C, label_text=False, label_graph=True, free_weights=False)
    model, params, texts, _, rows = setting("eclare")
    for idf in (np.ones(V - 1), -np.ones(V), np.full(V, np.nan)):
        with pytest.raises(ValueError, match=r"idf of shape.*shape \(20,\)"):
            model.init(jax.random.key(0), idf)
    with pytest.raises(ValueError, match="part 'graph' is on"):
        model.label_vectors(params, texts, None, rows)
    with pytest.raises(ValueError, match="part 'free' is on"):
        setting("astec")[0].label_vectors(setting("astec")[1], None, None, None)
