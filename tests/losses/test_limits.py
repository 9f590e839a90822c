"""Every loss over random shapes, masks and infinities: never NaN, the limit, gradients as told."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from losses.test_contract import LOSSES, every_loss

BIG = 1e4  # what stands for infinity where the limit is taken; its multiples are told apart
KINDS = np.array([0.0, 1.0, -1.5, 3.0, np.inf, -np.inf])
POOL = 6  # one compiled shape for each loss: rows and columns that are left over are masked


@st.composite
def rows(draw):
    """Scores with infinities, targets hard and soft, a mask that may leave nothing; weights."""
    count = draw(st.integers(1, 4))
    pick = lambda values: np.array(
        draw(st.lists(st.sampled_from(values), min_size=4 * POOL, max_size=4 * POOL))
    ).reshape(4, POOL)
    scores, targets = pick(KINDS.tolist()), pick([0.0, 0.0, 1.0, 0.25, 0.75])
    where = pick([True, True, True, False])
    where[count:] = False
    where[:, draw(st.integers(1, POOL)) :] = False
    weights = np.array(draw(st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=4, max_size=4)))
    return tuple(x.astype(np.float32) for x in (scores, targets, weights)), where


def limit(name: str, scores: np.ndarray, targets: np.ndarray) -> float:
    """The plain loop with large numbers for infinities, infinite where it grows with them."""
    if not len(scores):
        return 0.0
    near, far = (
        LOSSES[name].plain(
            np.clip(scores.astype(np.float64), -large, large), targets.astype(np.float64)
        )
        for large in (BIG, 2 * BIG)
    )
    if near is None:
        return 0.0
    return np.inf if far > near + BIG / 100 else far


def made(name: str):
    loss = LOSSES[name].loss

    def all_of(scores, targets, where, weights):
        values = loss(scores, targets, where=where, reduce_fn=None)
        mean, gradient = jax.value_and_grad(
            lambda s: loss(s, targets, where=where, weights=weights)
        )(scores)
        return values, mean, gradient

    return jax.jit(all_of)


COMPILED = {name: made(name) for name in LOSSES}


@every_loss
@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=rows())
def test_limits(name, case):
    (scores, targets, weights), where = case
    values, mean, gradient = map(np.asarray, COMPILED[name](scores, targets, where, weights))
    expected = [limit(name, s[w], y[w]) for s, y, w in zip(scores, targets, where)]
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5)
    assert not np.isnan(mean) and not np.isnan(gradient).any()
    assert np.isinf(mean) == (np.isinf(values) & (weights > 0)).any()
    assert (gradient[np.isinf(scores) | ~where] == 0).all()
    assert (gradient[weights == 0] == 0).all()


@every_loss
@settings(max_examples=10, deadline=None, derandomize=True)
@given(case=rows(), scale=st.sampled_from([1e5, 1e20, 3e38]))
def test_huge_scores_are_never_nan(name, case, scale):
    (scores, targets, weights), where = case
    scores = np.clip(scores, -1, 1).astype(np.float32) * np.float32(scale)
    for found in COMPILED[name](scores, targets, where, weights):
        assert not np.isnan(found).any()


@every_loss
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(1,), (3, 1), (2, 1, 5)])
def test_shapes_and_small_types(name, dtype, shape):
    """Leading axes are free; a pool may hold one label; 16-bit infinities are infinities."""
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.normal(size=shape), dtype).at[..., 0].set(-jnp.inf)
    targets = (rng.random(shape) < 0.5).astype(np.float32)
    values = LOSSES[name].loss(scores, targets, reduce_fn=None)
    flat = np.asarray(scores.astype(jnp.float32)).reshape(-1, shape[-1])
    expected = [limit(name, s, y) for s, y in zip(flat, targets.reshape(flat.shape))]
    assert values.shape == shape[:-1] and values.dtype == jnp.float32
    np.testing.assert_allclose(np.ravel(values), expected, rtol=1e-4)
    gradient = jax.grad(lambda s: LOSSES[name].loss(s, targets).astype(jnp.float32))(scores)
    assert gradient.shape == shape and not np.isnan(gradient.astype(jnp.float32)).any()
