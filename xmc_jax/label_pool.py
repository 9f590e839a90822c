"""Public names of `xmc_jax.tables.label_pool`."""

from xmc_jax.tables.label_pool import (
    STORAGE_DTYPES,
    from_storage,
    gather_rows,
    pool_mask,
    scatter_rows,
    to_storage,
)

__all__ = [
    "STORAGE_DTYPES",
    "from_storage",
    "gather_rows",
    "pool_mask",
    "scatter_rows",
    "to_storage",
]
