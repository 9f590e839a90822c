"""The pick-some-labels loss: both directions of a loss, weighted."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xmc_jax import losses

Q, P, D = 5, 9, 4
LABEL_LOSSES = {
    "supcon": losses.supcon_loss,
    "decoupled_softmax": losses.decoupled_softmax_loss,
    "sigmoid_bce": losses.sigmoid_bce_loss,
    "triplet": losses.triplet_loss,
}
every_label_loss = pytest.mark.parametrize("label_loss", LABEL_LOSSES.values(), ids=LABEL_LOSSES)


def make_batch(seed: int = 0):
    rng = np.random.default_rng(seed)
    x, z = (rng.normal(size=(n, D)).astype(np.float32) for n in (Q, P))
    targets = (rng.random((Q, P)) < 0.3).astype(np.float32)
    targets[:, 0], targets[0, 1:3] = 0, 1  # a label without queries; a query with positives
    where = rng.random((Q, P)) < 0.85
    where[0, 1:3] = True
    return x, z, targets, where


def both_sides(label_loss, x, z, targets, where, temperature, reduce_fn=jnp.mean):
    scores = x @ z.T / temperature
    query_side = label_loss(scores, targets, where=where, reduce_fn=reduce_fn)
    label_side = label_loss(scores.T, targets.T, where=where.T, reduce_fn=reduce_fn)
    return query_side, label_side


@every_label_loss
@pytest.mark.parametrize("query_weight", [1.0, 1, 0.7, 0.0, 0])
@pytest.mark.parametrize("reduce_fn", [jnp.mean, jnp.sum])
def test_is_the_weighted_sum_of_its_sides(label_loss, query_weight, reduce_fn):
    x, z, y, where = make_batch()
    query_side, label_side = both_sides(label_loss, x, z, y, where, 0.2, reduce_fn)
    expected = query_weight * query_side + (1 - query_weight) * label_side
    psl = functools.partial(
        losses.pick_some_labels_loss, temperature=0.2, label_loss=label_loss, reduce_fn=reduce_fn
    )
    np.testing.assert_allclose(psl(x, z, y, where=where, query_weight=query_weight), expected, 1e-6)
    traced = jax.jit(lambda w: psl(x, z, y, where=where, query_weight=w))(float(query_weight))
    np.testing.assert_allclose(traced, expected, 1e-5)


@pytest.mark.parametrize("query_weight", [1.0, 0.0])
def test_a_traced_weight_has_the_gradients_of_a_static_one(query_weight):
    x, z, y, where = make_batch()

    def gradients(weight):
        loss = functools.partial(losses.pick_some_labels_loss, temperature=0.1, where=where)
        return jax.grad(lambda x, z: loss(x, z, y, query_weight=weight), argnums=(0, 1))(x, z)

    for a, b in zip(gradients(query_weight), jax.jit(gradients)(query_weight)):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(a).max())


def test_a_side_without_weight_is_not_computed():
    shapes = []

    def label_loss(scores, targets, *, where, reduce_fn):
        assert scores.shape == targets.shape and where is None
        shapes.append(scores.shape)
        return jnp.sum(scores)

    x, z, y, _ = make_batch()
    for query_weight in (1.0, 0.0, 0.5):
        losses.pick_some_labels_loss(
            x, z, y, temperature=1.0, label_loss=label_loss, query_weight=query_weight
        )
    assert shapes == [(Q, P), (P, Q), (Q, P), (P, Q)]


def test_labels_without_queries_do_not_thin_the_label_side():
    x, z, y, _ = make_batch()
    with_hard_negative = losses.pick_some_labels_loss(x, z, y, temperature=0.2, query_weight=0.0)
    positive = y.any(0)
    assert not positive.all()
    without = losses.pick_some_labels_loss(
        x, z[positive], y[:, positive], temperature=0.2, query_weight=0.0
    )
    np.testing.assert_allclose(with_hard_negative, without, rtol=1e-6)


def test_rows_of_a_single_side():
    x, z, y, where = make_batch()
    psl = functools.partial(losses.pick_some_labels_loss, x, z, y, temperature=0.2, where=where)
    sides = both_sides(losses.decoupled_softmax_loss, x, z, y, where, 0.2, reduce_fn=None)
    np.testing.assert_allclose(psl(query_weight=1.0, reduce_fn=None), sides[0], rtol=1e-5)
    np.testing.assert_allclose(psl(query_weight=0.0, reduce_fn=None), sides[1], rtol=1e-5)
    with pytest.raises(ValueError, match="reduce_fn=None"):
        psl(reduce_fn=None)


def test_a_mask_of_the_pool_broadcasts():
    x, z, y, where = make_batch()
    psl = functools.partial(losses.pick_some_labels_loss, x, z, y, temperature=0.2)
    full = np.broadcast_to(where[0], (Q, P))
    np.testing.assert_array_equal(psl(where=where[0]), psl(where=full))


def test_leading_axes_and_vmap():
    batches = [make_batch(seed) for seed in (0, 1)]
    x, z, y, where = (np.stack(arrays) for arrays in zip(*batches))
    psl = functools.partial(losses.pick_some_labels_loss, temperature=0.2)
    values = jax.vmap(lambda x, z, y, w: psl(x, z, y, where=w))(x, z, y, where)
    for value, (x1, z1, y1, where1) in zip(values, batches):
        np.testing.assert_allclose(value, psl(x1, z1, y1, where=where1), rtol=1e-5)
    sums = [psl(*batch[:3], where=batch[3], reduce_fn=jnp.sum) for batch in batches]
    np.testing.assert_allclose(psl(x, z, y, where=where, reduce_fn=jnp.sum), sum(sums), rtol=1e-5)


def test_sixteen_bit_embeddings_give_float32_scores():
    x, z = jnp.full((2, 4096), 1 / 16, jnp.bfloat16), jnp.full((3, 4096), 1 / 16, jnp.bfloat16)
    targets = np.array([[1, 0, 0], [0, 1, 0]], np.float32)
    seen = []

    def label_loss(scores, targets, **options):
        seen.append(scores)
        return losses.decoupled_softmax_loss(scores, targets, **options)

    psl = functools.partial(losses.pick_some_labels_loss, temperature=1.0, label_loss=label_loss)
    gradient = jax.grad(lambda x: psl(x, z, targets))(x)
    assert gradient.dtype == jnp.bfloat16 and seen[0].dtype == jnp.float32
    value = losses.pick_some_labels_loss(x, z, targets, temperature=1.0)
    assert value.dtype == jnp.float32
    # All scores are 16: log 3 from queries, log 2 from the two labels that have one.
    np.testing.assert_allclose(value, (np.log(3) + np.log(2)) / 2, rtol=1e-6)


def test_inside_a_training_step():
    x, z, y, where = make_batch()

    @jax.jit
    def step(params, learning_rate):
        def loss_fn(p):
            return losses.pick_some_labels_loss(
                jnp.tanh(x @ p["w"]), jnp.tanh(z @ p["w"]), y, temperature=0.1, where=where
            )

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        return loss, jax.tree.map(lambda p, g: p - learning_rate * g, params, gradients)

    params, values = {"w": jnp.eye(D)}, []
    for _ in range(50):
        loss, params = step(params, 0.05)
        values.append(float(loss))
    assert values[-1] < 0.5 * values[0]


def test_bad_arguments():
    x, z, y, _ = make_batch()
    psl = functools.partial(losses.pick_some_labels_loss, temperature=1.0)
    with pytest.raises(ValueError, match=r"query_weight is 1\.5"):
        psl(x, z, y, query_weight=1.5)
    with pytest.raises(ValueError, match=r"targets have shape \(9, 5\)"):
        psl(x, z, y.T)
    with pytest.raises(ValueError, match="the same d"):
        psl(x[:, :3], z, y)


@pytest.mark.parametrize("temperature", [0, 0.0, -0.05, float("nan"), np.float64(0)])
def test_a_temperature_that_is_not_above_zero(temperature):
    x, z, targets, _ = make_batch()
    with pytest.raises(ValueError, match=r"temperature is .*; it must be above 0"):
        losses.pick_some_labels_loss(x, z, targets, temperature=temperature)


@every_label_loss
@pytest.mark.parametrize(("num_queries", "num_labels"), [(3, 0), (0, 4), (0, 0)])
def test_empty_pools(label_loss, num_queries, num_labels):
    x, z = jnp.zeros((num_queries, D)), jnp.zeros((num_labels, D))
    targets = jnp.zeros((num_queries, num_labels))
    loss = lambda x: losses.pick_some_labels_loss(
        x, z, targets, temperature=0.1, label_loss=label_loss
    )
    assert loss(x) == 0 and not jax.grad(loss)(x).any()
