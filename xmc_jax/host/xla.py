"""How XLA compiles the programs that consist of large matrix products."""

from __future__ import annotations

import functools

import jax

_EIGEN = {"xla_cpu_experimental_ynn_fusion_type": ""}


@functools.cache
def compiler_options() -> dict[str, str]:
    """For ``jax.jit(..., compiler_options=...)``: on a CPU, matrix products by Eigen.

    XLA's newer kernels for CPUs (YNNPACK) are slower on the shapes of an encoder (measured:
    ``experiments/README.md``). An XLA that does not know the option, and any other device, gets
    none.
    """
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda: 0, compiler_options=_EIGEN).lower().compile()
    except jax.errors.JaxRuntimeError:  # no such option
        return {}
    return _EIGEN
