"""Two towers: each side goes through its own encoder, and moves that one alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _packing import pack, random_texts

from xmc_jax.models.encoders.bag import BagEncoder
from xmc_jax.models.encoders.transformer import TransformerConfig, TransformerEncoder
from xmc_jax.models.encoders.two_towers import TwoTowers
from xmc_jax.models.heads.unidec import UniDEC

BAG = BagEncoder(40, 6)
TOWERS = TwoTowers(BAG, BAG)
QUERIES, LABELS = pack(random_texts(0, 7, 40, 5), 16), pack(random_texts(1, 9, 40, 5), 16)


def test_towers_are_drawn_apart_and_of_one_size():
    params = TOWERS.init(jax.random.key(0))
    assert set(params) == {"query", "label"}
    kernels = [params[side]["block"]["kernel"] for side in params]
    assert not np.isclose(*kernels).any()
    shape = TransformerConfig(vocab_size=40, dim=6, num_layers=1, num_heads=2, mlp_dim=4)
    mixed = TwoTowers(BAG, TransformerEncoder(shape))
    assert mixed.dim == 6 and mixed.max_segments == 32 and not mixed.shared
    assert hash(mixed) == hash(TwoTowers(BAG, TransformerEncoder(shape)))
    with pytest.raises(ValueError, match="vectors of 6 numbers a query and 8 a label"):
        TwoTowers(BAG, BagEncoder(40, 8))


def test_every_side_has_its_tower():
    params = TOWERS.init(jax.random.key(0))
    key = jax.random.key(1)
    for side in ("query", "label"):
        for options in ({}, {"key": key, "train": True}):
            np.testing.assert_array_equal(
                TOWERS.apply(params, QUERIES, side=side, **options),
                BAG.apply(params[side], QUERIES, **options),
            )
    np.testing.assert_array_equal(
        TOWERS.apply(params, QUERIES), TOWERS.apply(params, QUERIES, side="query")
    )
    alone = (QUERIES.ids, QUERIES.segment_ids == 1)
    np.testing.assert_array_equal(
        TOWERS.apply_padded(params, *alone, "label"), BAG.apply_padded(params["label"], *alone)
    )
    with pytest.raises(ValueError, match=r"side is 'both'.* in two calls"):
        TOWERS.apply(params, QUERIES, side="both")
    with pytest.raises(ValueError, match=r"side is 'both'.* in two calls"):
        TOWERS.apply_padded(params, *alone, "both")
    with pytest.raises(ValueError, match="train=True needs key"):
        TOWERS.apply(params, QUERIES, train=True)


def test_gradients_are_those_of_each_tower_alone():
    model = UniDEC(TOWERS, head_dim=4)
    params = model.init(jax.random.key(0))
    one = UniDEC(BAG, head_dim=4)

    def scores(params):
        queries = model.de(params, model.vectors(params, QUERIES, side="query"))
        labels = model.de(params, model.vectors(params, LABELS, side="label"))
        return jnp.sum(jnp.sin(queries @ labels.T))

    def apart(query, label, params):
        queries = one.de(params, one.vectors({"encoder": query}, QUERIES))
        labels = one.de(params, one.vectors({"encoder": label}, LABELS))
        return jnp.sum(jnp.sin(queries @ labels.T))

    gradient = jax.grad(scores)(params)
    encoder = params["encoder"]
    query, label = jax.grad(apart, (0, 1))(encoder["query"], encoder["label"], params)
    expected = {"query": query, "label": label}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient["encoder"], expected
    )
    half = jax.grad(lambda p: jnp.sum(model.vectors(p, QUERIES, side="query") ** 2))(params)
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(half["encoder"]["label"]))
    assert any((np.asarray(x) != 0).any() for x in jax.tree.leaves(half["encoder"]["query"]))


def test_unidec_refuses_a_batch_of_both_sides():
    model = UniDEC(TOWERS, head_dim=4)
    with pytest.raises(ValueError, match="in two calls"):
        model.vectors(model.init(jax.random.key(0)), QUERIES)
