"""Parameters of a shape, filled by NumPy: compiling the models' own init takes seconds."""

from __future__ import annotations

import jax
import numpy as np


def fill(shapes, seed: int):
    """Kernels ``[..., I, O]`` of about unit gain; nothing is 0 or 1 as it is by birth."""
    rng = np.random.default_rng(seed)

    def draw(x):
        inputs = np.prod(x.shape[:-1]) if x.ndim > 1 else 10
        return (rng.normal(size=x.shape) / np.sqrt(inputs)).astype(np.float32)

    return jax.tree.map(draw, shapes)


def fill_moving(shapes, seed: int):
    """Unit directions; running means and variances; idf."""
    rng = np.random.default_rng(seed)

    def draw(path, x):
        values = rng.normal(size=x.shape)
        name = path[-1].key
        if name in ("variance", "idf"):
            values = 0.5 + np.abs(values)
        elif name != "mean":
            values /= np.linalg.norm(values)
        return values.astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)
