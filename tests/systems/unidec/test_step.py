"""The step: its loss against the golden objective, its row update against a dense twin."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xmc_jax.contracts import TokenBatch
from xmc_jax.losses import decoupled_softmax_loss, supcon_loss
from xmc_jax.systems.unidec.step import (
    TABLE,
    HeadLoss,
    Objective,
    StepBatch,
    make_train_step,
    objective_parts,
)
from xmc_jax.tables import label_pool, row_adam
from xmc_jax.training.options import Rates
from xmc_jax.training.state import make_optimizer, new_state, num_bytes, warmup_cosine

QUERIES, POOL, LABELS, DIM = 6, 10, 50, 8


@dataclasses.dataclass(frozen=True)
class LookUp:
    """A model whose vectors are parameters, one row a text: gradients can be read off."""

    def vectors(self, params, tokens, key=None, train=False, side="both"):
        return params["encoder"]["x"][tokens.text_row]

    def de(self, params, vectors, key=None, train=False):
        return vectors @ params["de_head"]["kernel"]

    def clf(self, params, vectors, key=None, train=False):
        return vectors @ params["clf_head"]["kernel"]


def tokens_of(num_texts: int) -> TokenBatch:
    rows = np.arange(num_texts, dtype=np.int32)
    ones = np.ones((num_texts, 1), np.uint8)
    return TokenBatch(ones, ones, 0 * ones, rows, ones[:, 0])


def batch_of(rng: np.random.Generator, pool: int = POOL, labels: int = LABELS) -> StepBatch:
    ids = np.sort(rng.choice(labels, pool - 2, replace=False)).astype(np.int32)
    ids = np.concatenate([ids, [labels, labels + 1]]).astype(np.int32)
    targets = rng.random((QUERIES, pool)) < 0.3
    targets[:, 0] = True
    where = rng.random((QUERIES, pool)) < 0.9
    where[:, -2:] = False
    return StepBatch(tokens_of(QUERIES + pool), ids, targets & where, where)


def params_of(rng: np.random.Generator, texts: int = QUERIES + POOL):
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {
        "encoder": {"x": draw(texts, DIM)},
        "de_head": {"kernel": draw(DIM, DIM)},
        "clf_head": {"kernel": draw(DIM, DIM)},
    }


def test_objective_equals_golden_values(golden):
    data = np.load(golden / "unidec_objective.npz")
    tau, lam = float(data["tau"]), float(data["lam"])
    objective = Objective(
        HeadLoss(decoupled_softmax_loss, tau, float(data["lam_d"])),
        HeadLoss(decoupled_softmax_loss, tau, float(data["lam_c"])),
        lam,
    )
    queries, labels = data["xd"].shape[0], data["zd"].shape[0]

    class Golden(LookUp):
        def de(self, params, vectors, key=None, train=False):
            unit = vectors / jnp.linalg.norm(vectors, axis=1, keepdims=True)
            return unit

        def clf(self, params, vectors, key=None, train=False):
            return params["xc"]

    params = {
        "encoder": {"x": jnp.asarray(np.concatenate([data["xd"], data["zd"]]), jnp.float32)},
        "xc": jnp.asarray(data["xc"], jnp.float32),
    }
    batch = StepBatch(tokens_of(queries + labels), np.arange(labels), data["y"], data["where"])

    def loss_of(params, psi):
        return objective_parts(objective, Golden(), params, psi, batch, jax.random.key(0))

    psi = jnp.asarray(data["psi"], jnp.float32)
    (loss, parts), (g, g_psi) = jax.value_and_grad(loss_of, (0, 1), has_aux=True)(params, psi)
    np.testing.assert_allclose(loss, data["loss"], rtol=1e-5)
    np.testing.assert_allclose(parts["loss_de"], data["loss_de"], rtol=1e-5)
    np.testing.assert_allclose(parts["loss_clf"], data["loss_clf"], rtol=1e-5)
    for found, expected in (
        (g["encoder"]["x"][:queries], data["g_xd"]),
        (g["encoder"]["x"][queries:], data["g_zd"]),
        (g["xc"], data["g_xc"]),
        (g_psi, data["g_psi"]),
    ):
        np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_row_update_equals_a_dense_table():
    """Five steps against: gradient of the whole table, Adam on the touched rows only."""
    rng = np.random.default_rng(3)
    objective = Objective(
        HeadLoss(supcon_loss, 0.5), HeadLoss(decoupled_softmax_loss, 1.0, 0.5, 0.1), 0.3
    )
    factor = lambda step: warmup_cosine(step, total_steps=10, warmup_steps=2)
    optimizer = make_optimizer(Rates(encoder=1e-2, heads=2e-2, table=0.1))
    params = params_of(rng)
    table = jnp.asarray(rng.normal(size=(LABELS, DIM)), jnp.float32)
    step = make_train_step(LookUp(), objective, optimizer, table_rate=0.1, seed=0)
    copy = lambda tree: jax.tree.map(jnp.array, tree)
    state = new_state(copy(params), optimizer, {TABLE: copy(table)})
    plain, moments, opt_state = copy(params), row_adam.init(table), optimizer.init(params)
    for number in range(5):
        batch = batch_of(rng)
        state, _ = step(state, batch, factor(number))

        def dense_loss(params, table, batch=batch):
            rows = jnp.take(table, batch.pool_ids, axis=0, mode="fill", fill_value=0)
            return objective_parts(objective, LookUp(), params, rows, batch, jax.random.key(0))[0]

        gradients, table_gradient = jax.grad(dense_loss, (0, 1))(plain, table)
        touched = batch.pool_ids[batch.pool_ids < LABELS]
        table, moments = row_adam.update(
            table,
            moments,
            touched,
            table_gradient[touched],
            learning_rate=0.1 * factor(number),
        )
        updates, opt_state = optimizer.update(gradients, opt_state, plain)
        updates = jax.tree.map(lambda u, n=number: factor(n) * u, updates)
        plain = optax.apply_updates(plain, updates)
    np.testing.assert_allclose(state.tables[TABLE].values, table, atol=2e-5)
    for found, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(plain)):
        np.testing.assert_allclose(found, expected, atol=2e-5)
    assert int(state.step) == 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_temporary_memory_does_not_depend_on_the_number_of_labels(dtype):
    objective = Objective(
        HeadLoss(decoupled_softmax_loss, 0.05), HeadLoss(decoupled_softmax_loss, 1.0)
    )
    optimizer = make_optimizer(Rates(encoder=1e-3, heads=1e-3, table=0.1))
    step = make_train_step(LookUp(), objective, optimizer, table_rate=0.1, seed=0)
    batch = batch_of(np.random.default_rng(0))
    params = params_of(np.random.default_rng(0))

    def temporary(labels: int) -> int:
        state = jax.eval_shape(
            lambda: new_state(
                params, optimizer, {TABLE: label_pool.to_storage(jnp.zeros((labels, DIM)), dtype)}
            )
        )
        analysis = step.lower(state, batch, 1.0).compile().memory_analysis()
        assert analysis.alias_size_in_bytes >= num_bytes(state.tables)
        return analysis.temp_size_in_bytes

    assert abs(temporary(1_000_000) - temporary(1_000)) < 2**16


def test_dual_encoder_alone_has_no_table():
    rng = np.random.default_rng(0)
    optimizer = make_optimizer(Rates(encoder=1e-2, heads=1e-2, table=0.1))
    objective = Objective(HeadLoss(decoupled_softmax_loss, 0.05, 1.0))
    step = make_train_step(LookUp(), objective, optimizer, table_rate=0.1, seed=0)
    batch, first = batch_of(rng), []
    state = new_state(params_of(rng), optimizer)
    for _ in range(20):
        state, parts = step(state, batch, 1.0)
        first.append(float(parts["loss"]))
    assert state.tables == {} and "loss_clf" not in parts
    assert first[-1] < 0.5 * first[0]


def test_one_shape_is_traced_once():
    rng = np.random.default_rng(0)
    optimizer = make_optimizer(Rates(encoder=1e-2, heads=1e-2, table=0.1))
    traces = []

    class Counted(LookUp):
        def vectors(self, params, tokens, key=None, train=False, side="both"):
            traces.append(1)
            return super().vectors(params, tokens)

    objective = Objective(HeadLoss(decoupled_softmax_loss, 0.05))
    step = make_train_step(Counted(), objective, optimizer, table_rate=0.1, seed=0)
    state = new_state(params_of(rng), optimizer)
    for _ in range(3):
        state, _ = step(state, batch_of(rng), 1.0)
    assert len(traces) == 1


def test_warmup_cosine_is_the_formula():
    for step in range(100):
        rising = (step + 1) / 10
        falling = 0.5 * (1 + np.cos(np.pi * (step - 10) / 90))
        expected = rising if step < 10 else falling
        assert abs(warmup_cosine(step, total_steps=100, warmup_steps=10) - expected) < 1e-12
    assert warmup_cosine(100, total_steps=100, warmup_steps=10) < 1e-12
    assert warmup_cosine(0, total_steps=1, warmup_steps=0) == 1.0


def test_rates_of_encoder_and_heads_differ():
    optimizer = make_optimizer(Rates(encoder=0.1, heads=0.2, table=0.0))
    params = {"encoder": {"x": jnp.zeros(3)}, "de_head": {"kernel": jnp.zeros(3)}}
    gradients = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_allclose(updates["encoder"]["x"], -0.1, rtol=1e-5)
    np.testing.assert_allclose(updates["de_head"]["kernel"], -0.2, rtol=1e-5)
