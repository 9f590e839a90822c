"""The tail of every step: parameters, tables of both kinds, and what is left alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from xmc_jax.contracts import TrainState
from xmc_jax.tables import row_adam
from xmc_jax.training import checkpoints
from xmc_jax.training.options import Rates
from xmc_jax.training.state import make_optimizer, new_state
from xmc_jax.training.step import TableGradients, apply_gradients

OPTIMIZER = make_optimizer(Rates(encoder=0.1, heads=0.2, table=0.0))
PARAMS = {"encoder": {"x": jnp.arange(3.0)}, "head": {"kernel": jnp.ones((3, 2))}}
RATE, FACTORS = 0.05, (0.3, 1.0, 0.5, 0.1)


def draw(seed: int, rows: int = 6) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, 4)), jnp.float32)


def state_of() -> TrainState:
    tables = {name: draw(seed) for seed, name in enumerate(("rows", "dense", "idle"))}
    return new_state(PARAMS, OPTIMIZER, tables, dense=("dense", "idle"))


@jax.jit
def step(state: TrainState, gradients, of_tables, factor):
    return apply_gradients(
        state,
        OPTIMIZER,
        gradients,
        of_tables,
        factor=factor,
        table_rate=RATE,
        model_state=state.model_state,
    )


def gradients_of(number: int) -> dict[str, TableGradients]:
    ids = jnp.array([4, 1, 6])  # 6 = padding
    return {
        "rows": TableGradients(ids, draw(100 + number, 3)),
        "dense": TableGradients(None, draw(200 + number)),
    }


def assert_equal(found, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_dense_tables_move_by_adam_and_others_by_their_rows():
    state = state_of()
    first, dense, rows = state, state.tables["dense"].values, state.tables["rows"].values
    adam = optax.adam(lambda count: RATE * jnp.array(FACTORS)[count])
    moments, row_moments = adam.init(dense), row_adam.init(rows)
    for number, factor in enumerate(FACTORS):
        of_tables = gradients_of(number)
        state, _ = step(state, jax.tree.map(jnp.ones_like, PARAMS), of_tables, factor)
        updates, moments = adam.update(of_tables["dense"].values, moments)
        dense = optax.apply_updates(dense, updates)
        ids, values = of_tables["rows"]
        rows, row_moments = row_adam.update(
            rows, row_moments, ids, values, learning_rate=RATE * factor
        )
    np.testing.assert_allclose(state.tables["dense"].values, dense, atol=1e-6)
    np.testing.assert_allclose(state.tables["rows"].values, rows, atol=1e-6)
    assert_equal(state.tables["rows"].values[0], first.tables["rows"].values[0])
    assert int(state.tables["dense"].state.count) == int(state.step) == len(FACTORS)
    assert_equal(state.tables["idle"], first.tables["idle"])  # moments too


def test_tables_alone():
    """Parameters and their moments keep their bits; the norm is that of the tables' gradients."""
    state, of_tables = state_of(), gradients_of(0)
    after, norm = step(state, None, of_tables, 1.0)
    assert_equal((after.params, after.opt_state), (state.params, state.opt_state))
    total = sum(float((values**2).sum()) for _, values in of_tables.values())
    np.testing.assert_allclose(norm, np.sqrt(total), rtol=1e-6)
    assert (after.tables["dense"].values != state.tables["dense"].values).all()


def test_parameters_alone():
    state = state_of()
    after, norm = step(state, jax.tree.map(jnp.ones_like, PARAMS), {}, 0.5)
    assert_equal(after.tables, state.tables)
    np.testing.assert_allclose(after.params["encoder"]["x"], jnp.arange(3.0) - 0.05, rtol=1e-5)
    np.testing.assert_allclose(after.params["head"]["kernel"], 1 - 0.1, rtol=1e-5)
    np.testing.assert_allclose(norm, 3.0, rtol=1e-6)  # nine ones


def test_a_dense_table_is_saved_and_goes_on_the_same(tmp_path):
    state, _ = step(state_of(), None, gradients_of(0), 1.0)
    checkpoints.save(tmp_path, state, {})
    restored, _ = checkpoints.restore_latest(tmp_path, jax.eval_shape(state_of))
    assert_equal(restored, state)
    again = lambda state: step(state, None, gradients_of(1), 1.0)
    assert_equal(again(restored), again(state))
