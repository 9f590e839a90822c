"""Any shapes, masks, weights and infinite scores: the limit of growing finite ones, never NaN."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from losses.test_contract import LOSSES, close, every_loss

PROPERTY = settings(derandomize=True, deadline=None, max_examples=40)
SHAPE = (2, 3, 5)
FINITE = 1e4  # stands for infinity where gradients are compared
cases = given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(5,), (4, 1), SHAPE]),
    share=st.sampled_from([0.0, 0.2, 0.6, 1.0]),  # of infinite scores
    soft=st.booleans(),
)


@functools.cache
def compiled(name: str):
    """(rows, gradient of their sum, weighted mean, its gradient), jitted."""
    loss = LOSSES[name].loss

    def everything(scores, targets, where, weights):
        def total(scores):
            rows = loss(scores, targets, where=where, reduce_fn=None)
            return jnp.sum(rows), rows

        def mean(scores):
            return loss(scores, targets, where=where, weights=weights)

        (_, rows), gradient = jax.value_and_grad(total, has_aux=True)(scores)
        return rows, gradient, *jax.value_and_grad(mean)(scores)

    return jax.jit(everything)


def make_batch(seed, shape, share, soft, signs=(-1, 1)):
    """Scores on a grid that no margin of 0.3 meets, some of them infinite."""
    rng = np.random.default_rng(seed)
    scores = (rng.integers(-64, 64, shape) / 16).astype(np.float32)
    infinite = (rng.random(shape) < share) & (rng.random((*shape[:-1], 1)) < 0.8)
    sign = np.where(rng.random((*shape[:-1], 1)) < 0.3, rng.choice(signs), rng.choice(signs, shape))
    scores = np.where(infinite, sign * np.inf, scores).astype(np.float32)
    targets = (rng.random(shape) < rng.choice([0.2, 0.5, 1])).astype(np.float32)
    if soft:
        targets *= rng.choice([0.25, 0.5, 0.75, 1], shape).astype(np.float32)
    where = rng.random(shape) < rng.choice([0.5, 0.9, 1])
    where[rng.random(shape[:-1]) < 0.1] = False
    weights = rng.choice([0, 0.5, 2], shape[:-1]).astype(np.float32)
    return scores, targets, where, weights


def plain_rows(name, scores, targets, where) -> tuple[np.ndarray, np.ndarray]:
    """Rows by plain loops in float64, and which of them count."""
    rows = [
        LOSSES[name].plain(s[w].astype(np.float64), y[w].astype(np.float64))
        for s, y, w in zip(*(x.reshape(-1, x.shape[-1]) for x in (scores, targets, where)))
    ]
    counted = np.array([row is not None for row in rows]).reshape(scores.shape[:-1])
    return np.array([row or 0.0 for row in rows]).reshape(scores.shape[:-1]), counted


def grown(scores, to):
    return np.where(np.isinf(scores), np.sign(scores) * to, scores)


def check(name, scores, targets, where, weights, tolerance=1e-5):
    rows, gradient, mean, mean_gradient = compiled(name)(scores, targets, where, weights)
    scores = np.asarray(scores, np.float32)
    wide = scores.astype(np.float64)
    at_1e9, counted = plain_rows(name, grown(wide, 1e9), targets, where)
    at_2e9, _ = plain_rows(name, grown(wide, 2e9), targets, where)
    expected = np.where(at_2e9 > at_1e9 + 1e6, np.inf, at_1e9)
    np.testing.assert_array_equal(np.isinf(rows), np.isinf(expected))
    close(np.where(np.isinf(rows), 0, rows), np.where(np.isinf(expected), 0, expected), 1e-5)
    mass = counted * weights
    products = np.where(mass > 0, mass, 1) * np.where(mass > 0, expected, 0)
    np.testing.assert_allclose(mean, products.sum() / (mass.sum() or 1), 1e-5)
    finite = compiled(name)(grown(scores, FINITE), targets, where, weights)
    close(gradient, finite[1], tolerance)
    close(mean_gradient, finite[3], tolerance)
    for g, there in ((gradient, where & counted[..., None]), (mean_gradient, mass[..., None] > 0)):
        assert not np.any(np.where(there, 0, g))


@every_loss
@PROPERTY
@cases
def test_infinite_scores_give_the_limit_and_its_gradient(name, seed, shape, share, soft):
    check(name, *make_batch(seed, shape, share, soft))


@every_loss
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_infinite_scores_of_sixteen_bits(name, dtype):
    for seed in range(10):
        scores, *others = make_batch(seed, SHAPE, 0.3, soft=True)
        check(name, jnp.asarray(scores, dtype), *others, tolerance=2**-8)


@every_loss
@settings(PROPERTY, max_examples=15)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1e4, 1e20, 1e37, 3.4e38]),
    st.sampled_from([0.0, 0.2]),
)
def test_huge_scores_are_never_nan(name, seed, scale, share):
    scores, targets, where, weights = make_batch(seed, SHAPE, share, soft=True)
    scores = np.where(np.isinf(scores), scores, scores / 4 * np.float32(scale))
    rows, gradient, mean, mean_gradient = compiled(name)(scores, targets, where, weights)
    assert not np.isnan(rows).any() and not np.isnan(mean)
    assert np.isfinite(gradient).all() and np.isfinite(mean_gradient).all()
    if share == 0 and scale < 1e38:
        close(rows, plain_rows(name, scores, targets, where)[0])


LIMITS = {  # (scores, targets, value)
    "supcon": [
        ([-np.inf, 0], [1, 0], np.inf),
        ([np.inf, 0], [1, 0], 0),
        ([0, -np.inf], [1, 0], 0),
        ([np.inf, np.inf, 0], [1, 0, 0], np.log(2)),
        ([-np.inf, -np.inf], [1, 0], np.log(2)),
        ([np.inf, 0], [1, 1], np.inf),
    ],
    "decoupled_softmax": [
        ([np.inf, 0], [1, 1], 0),
        ([-np.inf, 0], [1, 1], 0),
        ([-np.inf, 0], [1, 0], np.inf),
        ([-np.inf, -np.inf], [1, 0], np.log(2)),
        ([np.inf, np.inf], [1, 0], np.log(2)),
        ([0, 0, -np.inf], [1, 0, 0], np.log(2)),
    ],
    "sigmoid_bce": [
        ([np.inf, -np.inf], [1, 0], 0),
        ([-np.inf, -np.inf], [1, 0], np.inf),
        ([np.inf, np.inf], [1, 0], np.inf),
        ([np.inf, -np.inf], [0.5, 0], np.inf),
        ([-np.inf, np.inf], [0.5, 1], np.inf),
        ([-np.inf, 0], [0, 0], np.log(2)),
    ],
    "triplet": [
        ([-np.inf, 0], [1, 0], np.inf),
        ([np.inf, 0], [1, 0], 0),
        ([np.inf, np.inf], [1, 0], 0.3),
        ([-np.inf, -np.inf], [1, 0], 0.3),
        ([np.inf, 0, -np.inf], [1, 1, 0], 0),
        ([np.inf, 0, 0], [1, 1, 0], 0.15),
    ],
}


@pytest.mark.parametrize("name", LIMITS)
def test_known_limits(name):
    scores, targets, where = (np.zeros((6, SHAPE[-1]), np.float32) for _ in range(3))
    for i, (s, y, _) in enumerate(LIMITS[name]):
        scores[i, : len(s)], targets[i, : len(s)], where[i, : len(s)] = s, y, 1
    batch = (x.reshape(SHAPE) for x in (scores, targets, where > 0))
    rows = compiled(name)(*batch, np.ones(SHAPE[:-1], np.float32))[0]
    np.testing.assert_allclose(rows.reshape(-1), [v for *_, v in LIMITS[name]], 1e-6, 1e-6)
