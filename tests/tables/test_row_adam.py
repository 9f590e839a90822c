"""Row-sparse Adam: the steps of torch.optim.SparseAdam, in place."""

from __future__ import annotations

import doctest
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xmc_jax import losses
from xmc_jax.tables import label_pool, row_adam
from xmc_jax.tables.row_adam import RowAdamState

every_dtype = pytest.mark.parametrize("dtype", label_pool.STORAGE_DTYPES)


class PlainSparseAdam:
    """The formula over whole arrays in float64 NumPy; rows that were not touched are put back."""

    def __init__(self, table, b1=0.9, b2=0.999, eps=1e-8):
        self.table = table.astype(np.float64)
        self.m, self.v, self.t = np.zeros_like(self.table), np.zeros_like(self.table), 0
        self.b1, self.b2, self.eps = b1, b2, eps

    def step(self, ids, gradients, learning_rate):
        touched, g = np.zeros((len(self.table), 1), bool), np.zeros_like(self.table)
        for i, gradient in zip(ids, gradients):
            if i < len(self.table):
                touched[i], g[i] = True, gradient
        self.t += 1
        m = self.b1 * self.m + (1 - self.b1) * g
        v = self.b2 * self.v + (1 - self.b2) * g * g
        size = np.sqrt(1 - self.b2**self.t) / (1 - self.b1**self.t)
        new = self.table - learning_rate * size * m / (np.sqrt(v) + self.eps)
        self.table = np.where(touched, new, self.table)
        self.m, self.v = np.where(touched, m, self.m), np.where(touched, v, self.v)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("jit", [True, False])
def test_reference_values(golden, dtype, jit):
    with np.load(golden / "sparse_adam.npz") as file:
        g = {name: file[name] for name in file.files}
    with jax.enable_x64(dtype == "float64"):
        update = jax.jit(row_adam.update) if jit else row_adam.update
        table = jnp.asarray(g["W0"].astype(dtype))
        state = row_adam.init(table)
        for ids, gradients, after in zip(g["ids"], g["grads"], g["after"]):
            gradients = jnp.asarray(gradients.astype(dtype))
            table, state = update(table, state, ids, gradients, learning_rate=float(g["lr"]))
            assert table.dtype == state.m.dtype == state.v.dtype == dtype
            tolerance = {"float32": 1e-5, "float64": 1e-9}[dtype] * np.abs(after).max()
            np.testing.assert_allclose(table, after, rtol=0, atol=tolerance)
        assert int(state.step) == len(g["ids"])


def random_steps(num_labels, dim, pool, num_steps, seed=0):
    """Pools of unique ids with padding from L upwards, and gradients over many magnitudes."""
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        real = int(rng.integers(1, min(pool, num_labels) + 1))
        ids = np.concatenate(
            [rng.permutation(num_labels)[:real], num_labels + np.arange(pool - real)]
        )
        gradients = rng.normal(size=(pool, dim)) * 10.0 ** rng.integers(-3, 2, (pool, 1))
        gradients[real:] = np.nan
        yield ids.astype(np.int32), gradients.astype(np.float32), float(rng.uniform(0.001, 0.1))


def test_equals_the_plain_twin_and_drops_padding():
    start = np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32)
    plain, table = PlainSparseAdam(start), jnp.asarray(start)
    state = row_adam.init(table)
    traces = []

    @jax.jit
    def update(table, state, ids, gradients, learning_rate):
        traces.append(learning_rate)
        return row_adam.update(table, state, ids, gradients, learning_rate=learning_rate)

    for ids, gradients, learning_rate in random_steps(20, 4, pool=8, num_steps=40):
        before = np.asarray(table)
        table, state = update(table, state, ids, gradients, learning_rate)
        plain.step(ids, gradients.astype(np.float64), learning_rate)
        untouched = np.setdiff1d(np.arange(20), ids)
        np.testing.assert_array_equal(np.asarray(table)[untouched], before[untouched])
    np.testing.assert_allclose(table, plain.table, rtol=0, atol=2e-5)
    np.testing.assert_allclose(state.m, plain.m, rtol=0, atol=1e-5 * np.abs(plain.m).max())
    np.testing.assert_allclose(state.v, plain.v, rtol=0, atol=1e-5 * np.abs(plain.v).max())
    assert len(traces) == 1


@pytest.mark.parametrize("options", [{"b1": 0.0}, {"b2": 0.9, "eps": 0.1}, {"b1": 0.5, "b2": 0.0}])
def test_other_decays(options):
    start = np.zeros((6, 2), np.float32)
    plain, table = PlainSparseAdam(start, **options), jnp.asarray(start)
    state = row_adam.init(table)
    update = jax.jit(functools.partial(row_adam.update, **options))
    for ids, gradients, learning_rate in random_steps(6, 2, pool=4, num_steps=6):
        table, state = update(table, state, ids, gradients, learning_rate=learning_rate)
        plain.step(ids, gradients.astype(np.float64), learning_rate)
    np.testing.assert_allclose(table, plain.table, rtol=0, atol=1e-5)


def test_bias_correction_counts_steps_of_the_table_not_of_the_row():
    table = jnp.zeros((2, 1))
    state = row_adam.init(table)
    one = jnp.ones((1, 1))
    for _ in range(3):
        table, state = row_adam.update(table, state, jnp.array([0]), one, learning_rate=1.0)
    table, _ = row_adam.update(table, state, jnp.array([1]), one, learning_rate=1.0)
    # First touch of row 1, at t = 4: m = 0.1, v = 0.001.
    expected = -np.sqrt(1 - 0.999**4) / (1 - 0.9**4) * 0.1 / np.sqrt(0.001)
    np.testing.assert_allclose(table[1, 0], expected, rtol=1e-5)


def test_sixteen_bit_table_follows_the_float32_table():
    start = np.random.default_rng(1).normal(size=(20, 64)).astype(np.float32)
    stored = label_pool.to_storage(start, "bfloat16")
    wide = label_pool.from_storage(stored)
    states = [row_adam.init(stored), row_adam.init(wide)]
    assert states[0].v.dtype == jnp.float32
    update = jax.jit(row_adam.update)
    for ids, gradients, learning_rate in random_steps(20, 64, pool=8, num_steps=30):
        stored, states[0] = update(stored, states[0], ids, gradients, learning_rate=learning_rate)
        wide, states[1] = update(wide, states[1], ids, gradients, learning_rate=learning_rate)
    assert stored.dtype == jnp.uint16
    np.testing.assert_array_equal(states[0].v, states[1].v)
    error = np.abs(label_pool.from_storage(stored) - wide)
    assert error.max() < 0.1 and error.mean() < 0.01  # spacing at 1 is 2**-7, about 10 roundings


def test_updates_below_the_spacing_of_bfloat16_are_not_lost():
    # Spacing at 1.0 is 2**-7; to nearest, 100 steps of 2**-11 would leave 1.0.
    table = label_pool.to_storage(jnp.ones((1, 4096)), "bfloat16")
    state = row_adam.init(table)
    update = jax.jit(row_adam.update)
    gradient = jnp.full((1, 4096), -1.0)
    for _ in range(100):
        table, state = update(table, state, jnp.array([0]), gradient, learning_rate=2.0**-11)
    rows = np.asarray(label_pool.from_storage(table))
    assert abs(rows.mean() - (1 + 100 * 2.0**-11)) < 2e-3
    assert rows.std() < 0.05


def test_rounding_is_a_function_of_the_inputs():
    table = label_pool.to_storage(np.random.default_rng(0).normal(size=(4, 9)), "bfloat16")
    arguments = (table, row_adam.init(table), jnp.array([2, 0]), jnp.ones((2, 9)))
    a, _ = row_adam.update(*arguments, learning_rate=1e-3)
    b, _ = jax.jit(row_adam.update)(*arguments, learning_rate=1e-3)
    np.testing.assert_array_equal(a, b)


def test_a_gradient_of_nan_stays_visible_in_a_sixteen_bit_table():
    table = label_pool.to_storage(jnp.ones((2, 2)), "bfloat16")
    nan = jnp.full((1, 2), jnp.nan)
    table, _ = row_adam.update(table, row_adam.init(table), jnp.array([1]), nan, learning_rate=0.1)
    assert np.all(np.isnan(label_pool.from_storage(table)[1]))


# Memory: nothing of the size of the table may be made, copied or converted in a step.

L, D, P, Q = 1_000_000, 64, 2048, 512


def compiled_step(dtype: str, step):
    """The step, compiled for a table of a million rows; nothing is allocated."""
    shape = jax.ShapeDtypeStruct
    table = shape((L, D), jnp.uint16 if dtype == "bfloat16" else jnp.float32)
    state = RowAdamState(shape((), jnp.int32), *(shape((L, D), jnp.float32),) * 2)
    arguments = table, state, shape((P,), jnp.int32)
    if step is update_only:
        arguments += (shape((P, D), jnp.float32),)
    else:
        arguments += (shape((Q, D), jnp.float32), shape((Q, P), jnp.bool_))
    arguments += (shape((), jnp.float32),)
    return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()


def update_only(table, state, ids, gradients, learning_rate):
    return row_adam.update(table, state, ids, gradients, learning_rate=learning_rate)


def gather_differentiate_update(table, state, ids, x, targets, learning_rate):
    def loss_fn(rows):
        where = label_pool.pool_mask(ids, L)
        return losses.pick_some_labels_loss(x, rows, targets, temperature=1.0, where=where)

    loss, gradients = jax.value_and_grad(loss_fn)(label_pool.gather_rows(table, ids))
    return *row_adam.update(table, state, ids, gradients, learning_rate=learning_rate), loss


@every_dtype
@pytest.mark.parametrize("step", [update_only, gather_differentiate_update])
def test_no_temporary_of_the_size_of_the_table(dtype, step):
    compiled = compiled_step(dtype, step)
    memory = compiled.memory_analysis()
    table_bytes = L * D * (2 if dtype == "bfloat16" else 4)
    moments_bytes = 2 * L * D * 4
    assert memory.alias_size_in_bytes >= table_bytes + moments_bytes
    bound = 16 * P * D * 4 if step is update_only else 16 * P * D * 4 + 12 * Q * P * 4
    assert memory.temp_size_in_bytes < bound < table_bytes
    whole = rf"= (\w+)\[{L},{D}\]\S* (\S+)\("
    operations = {op for _, op in re.findall(whole, compiled.as_text())}
    assert operations <= {"parameter", "fusion", "scatter"}, operations


@every_dtype
def test_the_donated_buffers_are_written_in_place(dtype):
    table = label_pool.to_storage(jnp.ones((50_000, 32)), dtype)
    state = row_adam.init(table)
    before = [x.unsafe_buffer_pointer() for x in (table, state.m, state.v)]
    step = jax.jit(update_only, donate_argnums=(0, 1))
    table, state = step(table, state, jnp.arange(4), jnp.ones((4, 32)), 0.1)
    assert [x.unsafe_buffer_pointer() for x in (table, state.m, state.v)] == before


def test_bad_arguments():
    table = jnp.zeros((4, 2))
    state = row_adam.init(table)
    with pytest.raises(ValueError, match=r"row_gradients have shape \(3, 2\)"):
        row_adam.update(table, state, jnp.arange(2), jnp.zeros((3, 2)), learning_rate=0.1)
    with pytest.raises(ValueError, match="b2 is 1"):
        row_adam.update(table, state, jnp.arange(2), jnp.zeros((2, 2)), learning_rate=0.1, b2=1.0)


def test_examples_run():
    result = doctest.testmod(row_adam)
    assert result.attempted > 0
    assert result.failed == 0
