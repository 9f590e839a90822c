"""Losses against reference values from plain loops and PyTorch in float64 (README of that folder).

All figures of a case come from one function, run once a type: jitted, on arrays padded to a shape
that all cases share (as a training step does it), and eagerly, on the arrays as they are.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xmc_jax import losses

FOLDER = Path(__file__).parents[1] / "golden"
CASES = sorted(path.stem for path in FOLDER.glob("loss_*.npz"))
LOSSES = {
    "supcon": losses.supcon_loss,
    "decoupled_softmax": losses.decoupled_softmax_loss,
    "bce": losses.sigmoid_bce_loss,
}
SOFTMAXES = ["supcon", "decoupled_softmax"]
TOLERANCE = {"float32": 1e-5, "float64": 1e-9}  # relative to the largest entry
PADDED_SHAPE = (7, 14)

over_cases = pytest.mark.parametrize("case", CASES)
over_dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])
over_modes = pytest.mark.parametrize("mode", ["jit", "eager"])


def load(case: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{case}.npz") as file:
        return {name: file[name] for name in file.files}


def figures(g: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Every figure of a reference file, by its name there."""
    out = {}
    options = {"where": g["where"], "reduce_fn": None}
    for name, loss in LOSSES.items():
        out[f"{name}_rows"] = loss(g["scores"], g["y"], **options)
        weighted = loss(g["scores"], g["y"], where=g["where"], weights=g["row_weights"])
        out[f"{name}_weighted_mean"] = weighted

        def mean(x, z, loss=loss):
            return loss(x @ z.T / g["tau"], g["y"], where=g["where"])

        gradient = jax.value_and_grad(mean, argnums=(0, 1))(g["x"], g["z"])
        out[f"{name}_mean"], (out[f"{name}_gx"], out[f"{name}_gz"]) = gradient
    for name in SOFTMAXES:
        pal = functools.partial(LOSSES[name], normalize=False, **options)
        out[f"{name}_pal_rows"] = pal(g["scores"], g["y"])

        def psl(x, z, query_weight, name=name):
            return losses.pick_some_labels_loss(
                x,
                z,
                g["y"],
                temperature=g["tau"],
                label_loss=LOSSES[name],
                where=g["where"],
                query_weight=query_weight,
            )

        gradient = jax.value_and_grad(psl, argnums=(0, 1))(g["x"], g["z"], 0.5)
        key = f"{name}_symmetric"
        out[key], (out[f"{key}_gx"], out[f"{key}_gz"]) = gradient
        out[f"{name}_query_weight_0.25"] = psl(g["x"], g["z"], 0.25)
    triplet = functools.partial(losses.triplet_loss, margin=g["triplet_margin"], **options)
    out["triplet_rows"] = triplet(g["x"] @ g["z"].T, g["y"])
    return out


jitted_figures = jax.jit(figures)


def as_inputs(g: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """The inputs of a reference file in a float type; padding is NaN wherever it is masked."""
    rows, columns = (a - b for a, b in zip(PADDED_SHAPE, g["y"].shape))
    pad = lambda x, *widths, value=0.0: np.pad(x, widths, constant_values=value)
    return {
        "x": pad(g["x"], (0, rows), (0, 0)).astype(dtype),
        "z": pad(g["z"], (0, columns), (0, 0)).astype(dtype),
        "y": pad(g["y"], (0, rows), (0, columns), value=np.nan).astype(dtype),
        "scores": pad(g["scores"], (0, rows), (0, columns), value=np.nan).astype(dtype),
        "where": pad(g["where"], (0, rows), (0, columns), value=False),
        "row_weights": pad(g["row_weights"], (0, rows), value=np.nan).astype(dtype),
        "tau": g["tau"].astype(dtype),
        "triplet_margin": g["triplet_margin"].astype(dtype),
    }


def assert_close(name: str, actual: jax.Array, expected: np.ndarray, dtype: str) -> None:
    assert actual.dtype == dtype, name
    atol = TOLERANCE[dtype] * np.abs(expected).max()
    actual = np.asarray(actual, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, err_msg=name)


def test_all_reference_files_are_used():
    assert len(CASES) == 7


@over_cases
@over_dtypes
@over_modes
def test_every_figure_of_a_case(case, dtype, mode):
    g = load(case)
    with jax.enable_x64(dtype == "float64"):
        inputs = as_inputs(g, dtype)
        actual = (jitted_figures if mode == "jit" else figures)(jax.tree.map(jnp.asarray, inputs))
    assert set(actual) == set(g) - set(inputs)
    for name, value in actual.items():
        expected = g[name]
        if expected.ndim:
            assert not np.any(value[len(expected) :]), f"{name}: padding is not 0"
            value = value[: len(expected)]
        assert_close(name, value, expected, dtype)


@over_dtypes
@over_modes
def test_two_head_objective(dtype, mode):
    g = load("unidec_objective")
    names = ["xd", "zd", "xc", "psi"]

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def objective(xd, zd, xc, psi):
        options = {"temperature": float(g["tau"]), "where": g["where"]}
        psl = functools.partial(losses.pick_some_labels_loss, **options)
        y = jnp.asarray(g["y"])
        loss_de = psl(unit(xd), unit(zd), y, query_weight=float(g["lam_d"]))
        loss_clf = psl(xc, psi, y, query_weight=float(g["lam_c"]))
        lam = float(g["lam"])
        return lam * loss_de + (1 - lam) * loss_clf, (loss_de, loss_clf)

    step = jax.value_and_grad(objective, argnums=(0, 1, 2, 3), has_aux=True)
    with jax.enable_x64(dtype == "float64"):
        inputs = [jnp.asarray(g[name].astype(dtype)) for name in names]
        out, gradients = (jax.jit(step) if mode == "jit" else step)(*inputs)
    (value, (loss_de, loss_clf)) = out
    assert_close("loss", value, g["loss"], dtype)
    assert_close("loss_de", loss_de, g["loss_de"], dtype)
    assert_close("loss_clf", loss_clf, g["loss_clf"], dtype)
    for name, gradient in zip(names, gradients):
        assert_close(f"g_{name}", gradient, g[f"g_{name}"], dtype)


def test_float64_ends_with_its_test():
    assert jnp.ones(1).dtype == jnp.float32
