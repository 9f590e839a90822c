"""Exact inner-product search over blocks of labels, on the host and on an accelerator.

FAISS's flat index breaks equal scores in no fixed order and is several times slower for batches
below about 500 queries; both functions here give equal scores to the lower id, in bounded memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np

_TILE = 1 << 22  # scores of a tile on the host: 16 MB, and a quarter of that for comparisons
_LABELS = 8192  # labels of a tile, more where k is large
_QUERIES = 1024  # queries of a block on an accelerator


def exact_search(
    queries: np.ndarray, labels: np.ndarray, k: int, bonus: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The k labels of highest inner product of each query, in blocks on the host's cores.

    Needs about 60 MB a core beside its arguments and results (``16 k`` numbers a query of a block
    where k is in the thousands). The result does not depend on the number of cores.

    Args:
      queries: ``[n, d]`` float32.
      labels: ``[L, d]`` float32, or float16, which is widened block by block.
      k: results a query.
      bonus: ``[L]`` float32, added to the labels' scores.

    Returns:
      scores ``[n, k]`` float32, descending, and ids ``[n, k]`` int32; equal scores by ascending id;
      -inf and -1 where there are fewer than k labels (or a score is NaN).
    """
    product = host_product()
    if bonus is None:
        return blocked_search(queries, len(labels), k, lambda x, a, b: product(x, labels[a:b]))
    score = lambda x, a, b: product(x, labels[a:b]) + bonus[a:b]
    return blocked_search(queries, len(labels), k, score)


def blocked_search(
    queries: np.ndarray,
    num_labels: int,
    k: int,
    score: Callable[[np.ndarray, int, int], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """`exact_search` with any score.

    Args:
      queries: ``[n, d]`` float32.
      num_labels: L.
      k: results a query.
      score: ``(queries [q, d], a, b) -> [q, b - a]`` float32, scores of labels a to b - 1; called
        from several threads.

    Returns:
      As `exact_search`.
    """
    queries = np.ascontiguousarray(queries, np.float32)
    width = min(num_labels, max(_LABELS, 4 * k))
    step = max(1, min(_TILE // max(1, width), 512))
    scores = np.full((len(queries), k), -np.inf, np.float32)
    ids = np.full((len(queries), k), -1, np.int32)

    def job(start: int) -> None:
        block = queries[start : start + step]
        number = len(block)
        if number < step:  # few sizes, few compilations
            block = _padded(block, min(step, 1 << (number - 1).bit_length()))
        best = scores[start : start + step], ids[start : start + step]
        for first in range(0, num_labels, width):
            s = score(block, first, min(first + width, num_labels))[:number]
            _improve(*best, s, first)

    with ThreadPoolExecutor(os.cpu_count() or 1) as workers:
        list(workers.map(job, range(0, len(queries), step)))
    return scores, ids


def host_product() -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """``(a, b) -> a @ b.T`` in the type of a, by XLA on the CPU.

    BLAS wastes most of a busy machine in spinning.
    """
    on_host = host_device()
    if on_host is None:  # JAX was told to use an accelerator and nothing else
        return lambda a, b: a @ b.T.astype(a.dtype)

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        with on_host():
            return np.asarray(_product(a, b))

    return product


def host_device() -> Callable[[], AbstractContextManager[None]] | None:
    """Makes contexts in which JAX computes on the CPU; None where JAX has no CPU."""
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
    return lambda: jax.default_device(cpu)


@jax.jit
def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b.astype(a.dtype).T, precision=jax.lax.Precision.HIGHEST)


def _improve(scores: np.ndarray, ids: np.ndarray, s: np.ndarray, first: int) -> None:
    """Merges ``s [n, w]``, scores of the labels from ``first`` on, into the best so far."""
    k = scores.shape[1]
    # A later label replaces an earlier one only by a higher score: ties stay with the lower id.
    above = s > scores[:, -1:]
    if first == 0 and k < s.shape[1]:
        above = s >= np.partition(s, -k, axis=1)[:, -k, None]
    row, column = np.divmod(np.flatnonzero(above), s.shape[1])
    merge(scores, ids, row, s[row, column], first + column)


def merge(
    scores: np.ndarray,
    ids: np.ndarray,
    row: np.ndarray,
    new_scores: np.ndarray,
    new_ids: np.ndarray,
) -> None:
    """Merges further results into the best so far; of equal scores the earlier ones stay first.

    Args:
      scores: ``[n, k]`` float32, descending; changed.
      ids: ``[n, k]`` int32; changed.
      row: ``[m]``, ascending: whose result it is.
      new_scores: ``[m]``.
      new_ids: ``[m]``.
    """
    if row.size == 0:
        return
    k = scores.shape[1]
    counts = np.bincount(row, minlength=len(scores))
    touched = np.flatnonzero(counts)
    rank = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
    merged = np.full((touched.size, k + counts.max()), -np.inf, np.float32)
    merged_ids = np.full(merged.shape, -1, np.int32)
    merged[:, :k], merged_ids[:, :k] = scores[touched], ids[touched]
    at = np.repeat(np.arange(touched.size), counts[touched]), k + rank
    merged[at], merged_ids[at] = new_scores, new_ids
    order = np.argsort(-merged, axis=1, kind="stable")[:, :k]
    scores[touched] = np.take_along_axis(merged, order, axis=1)
    ids[touched] = np.take_along_axis(merged_ids, order, axis=1)


def exact_search_jax(
    queries: np.ndarray,
    labels: np.ndarray | jax.Array,
    k: int,
    block: int = 32_768,
    bonus: np.ndarray | jax.Array | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`exact_search` on the default device of JAX, in float32 (never TF32).

    The labels stay on the device; beside them it needs ``1024 x block`` scores (128 MB).

    Args:
      queries: ``[n, d]`` float32.
      labels: ``[L, d]`` float32; give a device array to spare the copy of every call.
      k: results a query.
      block: labels scored at once.
      bonus: ``[L]`` float32, added to the labels' scores.

    Returns:
      As `exact_search`.
    """
    labels = jnp.asarray(labels, jnp.float32)
    bonus = jnp.zeros(len(labels)) if bonus is None else jnp.asarray(bonus, jnp.float32)
    size = min(_QUERIES, 1 << max(0, len(queries) - 1).bit_length())  # few sizes, few compilations
    results = [
        _search_block(
            _padded(queries[start : start + size], size), labels, bonus, k, min(block, len(labels))
        )
        for start in range(0, len(queries), size)
    ]
    if not results or len(labels) == 0:
        shape = (len(queries), k)
        return np.full(shape, -np.inf, np.float32), np.full(shape, -1, np.int32)
    scores, ids = (np.concatenate([np.asarray(part) for part in parts]) for parts in zip(*results))
    return scores[: len(queries)], ids[: len(queries)]


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
    """Rows of zeros up to ``size``, so that one compilation serves the last block too."""
    rows = np.asarray(rows, np.float32)
    return np.pad(rows, ((0, size - len(rows)), (0, 0)))


@functools.partial(jax.jit, static_argnames=("k", "block"))
def _search_block(
    queries: jax.Array, labels: jax.Array, bonus: jax.Array, k: int, block: int
) -> tuple[jax.Array, jax.Array]:
    num_labels = labels.shape[0]

    def step(i: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # The last block starts early to be whole; what it shares with the one before is masked.
        first = jnp.minimum(i * block, num_labels - block)
        part = jax.lax.dynamic_slice_in_dim(labels, first, block)
        s = jnp.matmul(queries, part.T, precision=jax.lax.Precision.HIGHEST)  # [q, block]
        s = s + jax.lax.dynamic_slice_in_dim(bonus, first, block)
        ids = first + jnp.arange(block)
        s = jnp.where((ids >= i * block) & ~jnp.isnan(s), s, -jnp.inf)
        top, at = jax.lax.top_k(s, min(k, block))  # equal scores: lower position first
        merged = jnp.concatenate([best[0], top], axis=1)
        merged_ids = jnp.concatenate([best[1], ids[at]], axis=1)
        top, at = jax.lax.top_k(merged, k)
        return top, jnp.take_along_axis(merged_ids, at, axis=1)

    start = (
        jnp.full((queries.shape[0], k), -jnp.inf, jnp.float32),
        jnp.full((queries.shape[0], k), -1, jnp.int32),
    )
    steps = -(-num_labels // block)
    scores, ids = jax.lax.fori_loop(0, steps, step, start)
    return scores, jnp.where(jnp.isneginf(scores), -1, ids)
