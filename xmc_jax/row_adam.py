"""Public names of `xmc_jax.tables.row_adam`."""

from xmc_jax.tables.row_adam import RowAdamState, init, update

__all__ = ["RowAdamState", "init", "update"]
