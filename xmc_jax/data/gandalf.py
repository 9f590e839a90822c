"""Public names of `xmc_jax.data.graph.gandalf`."""

from xmc_jax.data.graph.gandalf import (
    VARIANTS,
    gandalf_targets,
    glas_targets,
    neighbours_held,
    self_targets,
    symmetric_targets,
    targets,
    walk_targets,
)

__all__ = [
    "VARIANTS",
    "gandalf_targets",
    "glas_targets",
    "neighbours_held",
    "self_targets",
    "symmetric_targets",
    "targets",
    "walk_targets",
]
