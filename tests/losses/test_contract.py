"""The same questions to every loss. To join the library is to add one row to LOSSES."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xmc_jax import losses

# Plain loops over one row without masks, in float64: a value, or None if the row does not count.


def plain_supcon(scores, targets, normalize=True):
    total = np.logaddexp.reduce(scores) if len(scores) else -np.inf
    terms = [y * (total - s) for s, y in zip(scores, targets) if y > 0]
    mass = sum(y for y in targets if y > 0) if normalize else 1
    return sum(terms) / mass if terms else None


def plain_decoupled(scores, targets, normalize=True):
    negatives = [s for s, y in zip(scores, targets) if y <= 0]
    terms = [
        y * (np.logaddexp.reduce([s, *negatives]) - s) for s, y in zip(scores, targets) if y > 0
    ]
    mass = sum(y for y in targets if y > 0) if normalize else 1
    return sum(terms) / mass if terms else None


def plain_bce(scores, targets):
    terms = [
        y * np.logaddexp(0, -s) + (1 - y) * np.logaddexp(0, s) for s, y in zip(scores, targets)
    ]
    return sum(terms) if terms else None


def plain_triplet(scores, targets, margin=0.3):
    positives = [s for s, y in zip(scores, targets) if y > 0]
    negatives = [s for s, y in zip(scores, targets) if y <= 0]
    hinges = [max(0.0, margin - p + n) for p in positives for n in negatives]
    return sum(hinges) / len(hinges) if hinges else None


class Row(NamedTuple):
    loss: Callable
    plain: Callable


LOSSES = {
    "supcon": Row(losses.supcon_loss, plain_supcon),
    "supcon_pal": Row(
        functools.partial(losses.supcon_loss, normalize=False),
        functools.partial(plain_supcon, normalize=False),
    ),
    "decoupled_softmax": Row(losses.decoupled_softmax_loss, plain_decoupled),
    "decoupled_softmax_pal": Row(
        functools.partial(losses.decoupled_softmax_loss, normalize=False),
        functools.partial(plain_decoupled, normalize=False),
    ),
    "sigmoid_bce": Row(losses.sigmoid_bce_loss, plain_bce),
    "triplet": Row(losses.triplet_loss, plain_triplet),
}

every_loss = pytest.mark.parametrize("name", LOSSES)

Q, P = 7, 12


class Batch(NamedTuple):
    scores: np.ndarray
    targets: np.ndarray
    where: np.ndarray
    weights: np.ndarray


def make_batch(seed: int = 0) -> Batch:
    """Row 0: no positives, 1: no negatives, 2: nothing there; the others mixed, soft, masked."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(Q, P)).astype(np.float32)
    targets = np.where(rng.random((Q, P)) < 0.4, rng.uniform(0.2, 1, (Q, P)), 0).round(2)
    targets[3:5] = targets[3:5] > 0
    where = rng.random((Q, P)) < 0.8
    targets[0] = 0
    targets[1] = 1
    where[2] = False
    targets[3:, 0], where[3:, 0] = 1, True
    targets[3:, 1], where[3:, 1] = 0, True
    weights = rng.uniform(0.1, 3, Q)
    return Batch(scores, *(x.astype(np.float32) for x in (targets, where, weights)))


def plain_rows(name: str, batch: Batch) -> list[float | None]:
    return [
        LOSSES[name].plain(s[w].astype(np.float64), y[w].astype(np.float64))
        for s, y, w in zip(batch.scores, batch.targets, batch.where.astype(bool))
    ]


@functools.cache
def compiled(name: str) -> Callable:
    """(rows, gradient of their mean) as one jitted function, shared by the tests."""
    loss = LOSSES[name].loss

    def rows_and_gradient(scores, targets, where):
        rows = loss(scores, targets, where=where, reduce_fn=None)
        return rows, jax.grad(lambda s: loss(s, targets, where=where))(scores)

    return jax.jit(rows_and_gradient)


def evaluate(name: str, scores, targets, where) -> tuple[np.ndarray, np.ndarray]:
    rows, gradient = compiled(name)(scores, targets, np.asarray(where, bool))
    return np.asarray(rows), np.asarray(gradient)


def close(actual, expected, tolerance=1e-5):
    expected = np.asarray(expected, np.float64)
    atol = tolerance * max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=atol)


@every_loss
def test_rows_equal_plain_loops(name):
    b = make_batch()
    rows, _ = evaluate(name, *b[:3])
    close(rows, [0 if v is None else v for v in plain_rows(name, b)])


@every_loss
def test_reductions(name):
    b = make_batch()
    loss = functools.partial(LOSSES[name].loss, b.scores, b.targets, where=b.where)
    counted = [(v, w) for v, w in zip(plain_rows(name, b), b.weights) if v is not None]
    values, weights = np.array(counted).T
    close(loss(), values.mean())
    close(loss(reduce_fn=jnp.sum), values.sum())
    close(loss(reduce_fn=functools.partial(jnp.max, initial=0)), values.max())
    close(loss(weights=b.weights), (weights * values).sum() / weights.sum())
    close(loss(weights=b.weights, reduce_fn=jnp.sum), (weights * values).sum())
    close(loss(weights=2.0), values.mean())
    unreduced = loss(weights=b.weights, reduce_fn=None)
    close(unreduced[unreduced != 0], (weights * values)[values != 0])


@every_loss
def test_a_row_of_weight_zero_is_a_row_that_is_not_there(name):
    b = make_batch()
    loss = LOSSES[name].loss
    weights = np.where(np.arange(Q) == 4, 0, b.weights)
    kept = np.arange(Q) != 4
    value, gradient = jax.value_and_grad(
        lambda s: loss(s, b.targets, where=b.where, weights=weights)
    )(b.scores)
    close(value, loss(b.scores[kept], b.targets[kept], where=b.where[kept], weights=weights[kept]))
    assert not np.any(gradient[4])
    assert float(loss(b.scores, b.targets, where=b.where, weights=np.zeros(Q))) == 0


@every_loss
def test_masked_equals_removed(name):
    b = make_batch()
    columns = np.array([0, 1, 4, 5, 7, 8, 9, 11])
    masked = b.where.astype(bool) & np.isin(np.arange(P), columns)
    rows, gradient = evaluate(name, b.scores, b.targets, masked)
    kept = [x[:, columns] for x in b[:3]]
    expected_rows, expected_gradient = evaluate(name, *kept)
    close(rows, expected_rows, 1e-6)
    close(gradient[:, columns], expected_gradient, 1e-6)
    assert not np.any(gradient[~masked])


@every_loss
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e38])
def test_what_stands_in_masked_entries_is_never_read(name, garbage):
    b = make_batch()
    where = b.where.astype(bool)
    expected = evaluate(name, *b[:3])
    scores, targets = np.where(where, b.scores, garbage), np.where(where, b.targets, garbage)
    for actual, value in zip(evaluate(name, scores, targets, where), expected):
        np.testing.assert_array_equal(actual, value)


@every_loss
def test_a_nan_score_that_is_there_stays_visible(name):
    b = make_batch()
    for column in (0, 1):  # a positive, a negative
        scores = b.scores.copy()
        scores[3, column] = np.nan
        assert np.isnan(evaluate(name, scores, b.targets, b.where)[0][3])


@every_loss
def test_the_order_of_the_pool_does_not_matter(name):
    b = make_batch()
    b.scores[:, ::3] = 0.25  # ties
    rows, gradient = evaluate(name, *b[:3])
    order = np.random.default_rng(1).permutation(P)
    permuted_rows, permuted_gradient = evaluate(name, *(x[:, order] for x in b[:3]))
    close(permuted_rows, rows, 1e-6)
    close(permuted_gradient, gradient[:, order], 1e-6)


@every_loss
def test_more_padding_changes_nothing(name):
    b = make_batch()
    rows, gradient = evaluate(name, *b[:3])
    wide = [np.pad(x, ((0, 2), (0, 5)), constant_values=v) for x, v in zip(b[:3], (9.0, 1.0, 0))]
    wide_rows, wide_gradient = evaluate(name, *wide)
    close(wide_rows[:Q], rows, 1e-6)
    close(wide_gradient[:Q, :P], gradient, 1e-6)
    assert not np.any(wide_rows[Q:])
    assert not np.any(wide_gradient[Q:]) and not np.any(wide_gradient[:, P:])


@every_loss
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("scale", [1e4, -1e4, 1e-30])
def test_extreme_scores(name, dtype, scale):
    b = make_batch()
    scores = jnp.asarray(b.scores * scale, dtype)
    rows, gradient = evaluate(name, scores, b.targets, b.where)
    assert np.all(np.isfinite(rows)) and np.all(np.isfinite(gradient.astype(np.float32)))
    wide = b._replace(scores=np.asarray(scores, np.float64))
    close(rows, [0 if v is None else v for v in plain_rows(name, wide)])


@every_loss
def test_digits_survive_a_large_common_offset(name):
    b = make_batch()
    scores = (b.scores * 8).round() / 8  # exact in float32 at an offset of 1e4
    if name == "sigmoid_bce":
        scores = np.abs(scores)  # sure and correct: log(1 + exp(-1e4 - s)) = 0 without cancellation
        rows, _ = evaluate(name, scores + 1e4, np.ones((Q, P), np.float32), b.where)
        assert not np.any(rows)
    else:
        rows, _ = evaluate(name, scores, *b[1:3])
        close(evaluate(name, scores + 1e4, *b[1:3])[0], rows, 1e-6)


@every_loss
def test_rows_that_do_not_count(name):
    b = make_batch()
    loss = LOSSES[name].loss
    nothing = np.zeros((Q, P), np.float32)
    cases = {"all masked": (b.targets, nothing)}
    if name != "sigmoid_bce":
        cases["no positives"] = (nothing, b.where)
    if name == "triplet":
        cases["no negatives"] = (nothing + 1, b.where)
    for case, (targets, where) in cases.items():
        for reduce_fn in (jnp.mean, jnp.sum, functools.partial(jnp.mean, keepdims=True)):
            for weights in (None, b.weights):
                reduced = lambda s, r=reduce_fn, t=targets, w=where, v=weights: jnp.sum(
                    loss(s, t, where=w, weights=v, reduce_fn=r)
                )
                value, gradient = jax.value_and_grad(reduced)(b.scores)
                assert value == 0 and not np.any(gradient), case
        assert not np.any(loss(b.scores, targets, where=where, reduce_fn=None)), case


def test_one_versus_all_counts_rows_without_positives():
    b = make_batch()
    rows, gradient = evaluate("sigmoid_bce", *b[:3])
    assert rows[0] > 0 and np.any(gradient[0])


def test_a_positive_without_negatives_has_no_decoupled_loss_but_counts():
    b = make_batch()
    rows, gradient = evaluate("decoupled_softmax", *b[:3])
    assert rows[1] == 0 and not np.any(gradient[1])
    with_row = losses.decoupled_softmax_loss(b.scores[:2], b.targets[:2])
    one = losses.decoupled_softmax_loss(b.scores[1:4:2], b.targets[1:4:2])
    alone = losses.decoupled_softmax_loss(b.scores[3:4], b.targets[3:4])
    assert with_row == 0
    close(one, alone / 2)


@every_loss
def test_an_empty_pool_is_zero(name):
    rows, _ = evaluate(name, *(np.zeros((3, 0), np.float32),) * 3)
    np.testing.assert_array_equal(rows, np.zeros(3))


@every_loss
def test_leading_axes_and_a_mask_that_broadcasts(name):
    b = make_batch()
    loss = LOSSES[name].loss
    flat = [x[1:] for x in b]
    expected = loss(*flat[:2], where=flat[2], weights=flat[3], reduce_fn=None)
    scores, targets, where = (x.reshape(2, 3, P) for x in flat[:3])
    options = {"where": where, "weights": flat[3].reshape(2, 3)}
    close(loss(scores, targets, reduce_fn=None, **options), expected.reshape(2, 3), 1e-6)
    close(loss(scores, targets, **options), loss(*flat[:2], where=flat[2], weights=flat[3]), 1e-6)
    one = loss(b.scores[3], b.targets[3], where=b.where[3])
    close(one, LOSSES[name].loss(*(x[3:4] for x in b[:2]), where=b.where[3:4]), 1e-6)
    full = np.broadcast_to(b.where[3], (Q, P))
    close(loss(*b[:2], where=b.where[3]), loss(*b[:2], where=full), 1e-6)


@every_loss
def test_vmap_is_a_loop(name):
    b = make_batch()
    loss = LOSSES[name].loss
    stacked = [np.stack([x, x[::-1]]) for x in b[:3]]
    function = jax.value_and_grad(lambda s, y, w: loss(s, y, where=w))
    values, gradients = jax.vmap(function)(*stacked)
    for i in range(2):
        value, gradient = function(*(x[i] for x in stacked))
        close(values[i], value, 1e-6)
        close(gradients[i], gradient, 1e-6)


@every_loss
def test_jit_equals_eager(name):
    b = make_batch()
    rows, gradient = evaluate(name, *b[:3])
    loss = LOSSES[name].loss
    close(rows, loss(*b[:2], where=b.where, reduce_fn=None), 1e-6)
    close(gradient, jax.grad(lambda s: loss(s, b.targets, where=b.where))(b.scores), 1e-6)


@every_loss
def test_gradient_is_the_slope_of_the_plain_loops(name):
    b = make_batch()
    wide = b._replace(scores=b.scores.astype(np.float64), targets=b.targets.astype(np.float64))
    with jax.enable_x64(True):
        rows, gradient = evaluate(name, *wide[:3])
    assert rows.dtype == gradient.dtype == np.float64
    num_counted = sum(v is not None for v in plain_rows(name, b))
    step, numerical = 1e-6, np.zeros((Q, P))
    for index in np.ndindex(Q, P):
        values = []
        for sign in (1, -1):
            moved = wide.scores.copy()
            moved[index] += sign * step
            value = plain_rows(name, wide._replace(scores=moved))[index[0]]
            values.append(0 if value is None else value)
        numerical[index] = (values[0] - values[1]) / (2 * step) / num_counted
    close(gradient, numerical, 1e-8)


@every_loss
def test_forward_mode_agrees_with_reverse_mode(name):
    b = make_batch()
    loss = LOSSES[name].loss
    direction = np.random.default_rng(2).normal(size=(Q, P)).astype(np.float32)
    _, slope = jax.jvp(lambda s: loss(s, b.targets, where=b.where), (b.scores,), (direction,))
    close(slope, np.sum(evaluate(name, *b[:3])[1] * direction))


@every_loss
def test_targets_have_a_finite_gradient(name):
    b = make_batch()
    gradient = jax.grad(lambda y: LOSSES[name].loss(b.scores, y, where=b.where))(b.targets)
    assert np.all(np.isfinite(gradient))


@every_loss
def test_hard_targets_of_any_type(name):
    b = make_batch()
    hard = b.targets > 0
    expected, _ = evaluate(name, b.scores, hard.astype(np.float32), b.where)
    for dtype in (bool, np.int32):
        np.testing.assert_array_equal(
            evaluate(name, b.scores, hard.astype(dtype), b.where)[0], expected
        )


@every_loss
def test_sixteen_bit_scores_are_accumulated_in_float32(name):
    # 4,096 equal terms: a bfloat16 sum stands still at 256.
    scores = np.full((1, 4097), 0.5, np.float32)
    targets = np.zeros((1, 4097), np.float32)
    targets[0, 0] = 1
    rows, gradient = evaluate(name, jnp.asarray(scores, jnp.bfloat16), targets, targets == targets)
    assert rows.dtype == np.float32
    assert gradient.dtype == jnp.bfloat16
    close(rows, [LOSSES[name].plain(scores[0].astype(np.float64), targets[0])])
    half = jnp.asarray(make_batch().scores, jnp.bfloat16)
    for a, b in zip(
        evaluate(name, half, *make_batch()[1:3]),
        evaluate(name, half.astype(jnp.float32), *make_batch()[1:3]),
    ):
        close(a, b, 2**-8 if a.dtype == jnp.bfloat16 else 1e-6)


@every_loss
def test_shapes_that_do_not_fit(name):
    loss = LOSSES[name].loss
    with pytest.raises(ValueError, match=r"scores have shape \(2, 3\) and targets \(2, 4\)"):
        loss(np.zeros((2, 3)), np.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"where has shape \(4,\)"):
        loss(np.zeros((2, 3)), np.zeros((2, 3)), where=np.ones(4, bool))
    with pytest.raises(ValueError, match=r"weights has shape \(3,\)"):
        loss(np.zeros((2, 3)), np.zeros((2, 3)), weights=np.ones(3))


@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (0, 0), (0,), (2, 0, 3), (2, 3, 0)])
@pytest.mark.parametrize("reduce_fn", [jnp.mean, jnp.sum, None])
@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_pool_or_batch_gives_zero(name, reduce_fn, shape):
    scores = jnp.zeros(shape)
    loss = lambda scores: LOSSES[name].loss(scores, jnp.zeros(shape), reduce_fn=reduce_fn)
    value = loss(scores)
    assert value.shape == (shape[:-1] if reduce_fn is None else ()) and not value.any()
    assert jax.grad(lambda scores: loss(scores).sum())(scores).shape == shape
