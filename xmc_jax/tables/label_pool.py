"""Device side of a padded label pool: rows of a table ``[L, d]`` by id, and the mask of the
padding.

Pool ids are padded with ids from L upwards (L, L + 1, ...): past the end and never repeated, so
reading gives zeros, writing does nothing, and all ids stay unique.

A 16-bit table is kept as the uint16 bit patterns of bfloat16 and converted row by row. An array of
bfloat16 would do on an accelerator, but XLA on a CPU makes a float32 copy of the whole operand of a
bfloat16 scatter: twice the table, in every step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

STORAGE_DTYPES = ("float32", "bfloat16")


def pool_mask(ids: jax.typing.ArrayLike, num_labels: int) -> jax.Array:
    """``[P]`` boolean: True where an id is a label, False where it is padding.

    >>> import jax.numpy as jnp
    >>> pool_mask(jnp.array([4, 0, 5, 6]), num_labels=5).tolist()
    [True, True, False, False]
    """
    ids = jnp.asarray(ids)
    return (ids >= 0) & (ids < num_labels)


def gather_rows(table: jax.Array, ids: jax.typing.ArrayLike) -> jax.Array:
    """Reads rows of a table; 0 for ids outside of it.

    Args:
      table: ``[L, d]`` of a float type, or uint16 bit patterns of bfloat16.
      ids: ``[P]`` integers.

    Returns:
      ``[P, d]``; float32 for every 16-bit table, else of the table's type.

    Raises:
      ValueError: the table has an integer type other than uint16.

    >>> import jax.numpy as jnp
    >>> gather_rows(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1, 2])).tolist()
    [[3.0, 4.0], [0.0, 0.0]]
    """
    rows = table.at[jnp.asarray(ids)].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return from_storage(rows)


def scatter_rows(table: jax.Array, ids: jax.typing.ArrayLike, rows: jax.Array) -> jax.Array:
    """Writes rows into a table; ids outside of it are dropped.

    In place if the table is donated to the jitted function this is called in. Rows for a 16-bit
    table are rounded to the nearest bfloat16.

    Args:
      table: ``[L, d]`` of a float type, or uint16 bit patterns of bfloat16.
      ids: ``[P]`` integers; those inside the table must be unique (repeated ids leave any of their
        rows).
      rows: ``[P, d]`` floats.

    Returns:
      The table with the rows replaced, ``[L, d]``, of the same type.

    Raises:
      ValueError: the table has an integer type other than uint16.

    >>> import jax.numpy as jnp
    >>> scatter_rows(jnp.zeros((2, 2)), jnp.array([1, 2]), jnp.ones((2, 2))).tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """
    if table.dtype == jnp.uint16:
        rows = to_storage(rows, "bfloat16")
    return table.at[jnp.asarray(ids)].set(
        rows.astype(table.dtype), mode="drop", unique_indices=True, wrap_negative_indices=False
    )


def to_storage(table: jax.Array, dtype: str) -> jax.Array:
    """Turns float32 values into what a table of this type holds; bfloat16 rounds to nearest.

    Args:
      table: floats of any shape.
      dtype: "float32" or "bfloat16".

    Returns:
      float32, or uint16 bit patterns of bfloat16, of the same shape.

    Raises:
      ValueError: another dtype.

    >>> import jax.numpy as jnp
    >>> to_storage(jnp.array([1.0]), "bfloat16")  # sign 0, exponent 127, mantissa 0
    Array([16256], dtype=uint16)
    """
    if dtype == "float32":
        return jnp.asarray(table, jnp.float32)
    if dtype == "bfloat16":
        return jax.lax.bitcast_convert_type(jnp.asarray(table).astype(jnp.bfloat16), jnp.uint16)
    raise ValueError(f"Table dtype is {dtype!r}; it must be one of {', '.join(STORAGE_DTYPES)}.")


def from_storage(table: jax.Array) -> jax.Array:
    """Turns stored values back into floats: float32 for every 16-bit type, else as they are.

    Args:
      table: of a float type, or uint16 bit patterns of bfloat16, of any shape.

    Returns:
      Floats of the same shape.

    Raises:
      ValueError: an integer type other than uint16.

    >>> import jax.numpy as jnp
    >>> from_storage(jnp.array([16256], jnp.uint16)).tolist()
    [1.0]
    """
    table = jnp.asarray(table)
    if table.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(table, jnp.bfloat16).astype(jnp.float32)
    if not jnp.issubdtype(table.dtype, jnp.floating):
        raise ValueError(
            f"Table has dtype {table.dtype}; expected a float type or the uint16 bits of bfloat16."
        )
    return table.astype(jnp.promote_types(table.dtype, jnp.float32))
