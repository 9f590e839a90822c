"""Vectors of texts, chunk by chunk, in one compiled shape for many and one for few."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from xmc_jax.contracts import TokenBatch
from xmc_jax.data.batching import packing
from xmc_jax.data.tokens.token_stores import TokenStore
from xmc_jax.host import xla

CHUNK_TEXTS = 2048
FEW = 32  # a call of a 32nd of a chunk, or less, has a shape of its own


class Embedder:
    """Runs a model over a token store.

    One chunk is at most ``chunk_texts`` texts in rows of ``chunk_tokens`` tokens in all, so that
    one shape is compiled for all stores, whatever their lengths; and one of a 32nd of that, for
    calls with so few texts, which then do not wait for rows of padding.
    """

    def __init__(
        self,
        model: Any,
        *,
        row_length: int,
        chunk_tokens: int | None = None,
        chunk_texts: int = CHUNK_TEXTS,
    ) -> None:
        """Prepare the jitted function.

        Args:
          model: a ``models.unidec.UniDEC``.
          row_length: tokens in a packed row, at least the longest text.
          chunk_tokens: tokens of a chunk, padding included; None = 4,096 on a CPU, whose caches
            then hold what a layer makes of them, else 24,576.
          chunk_texts: texts of a chunk.
        """
        self.model = model
        self._texts = chunk_texts
        self._packing = {"row_length": row_length, "max_segments": model.encoder.max_segments}
        if chunk_tokens is None:
            chunk_tokens = 4096 if jax.default_backend() == "cpu" else 24576
        self._rows = max(1, chunk_tokens // row_length)
        jit = functools.partial(jax.jit, compiler_options=xla.compiler_options())
        self._heads: dict[str, Callable[..., jax.Array]] = {
            "de": jit(lambda p, tokens: model.de(p, model.vectors(p, tokens))),
            "clf": jit(lambda p, tokens: model.clf(p, model.vectors(p, tokens))),
        }
        self._both = jit(self._two_heads)

    def _two_heads(self, params: Any, tokens: Any) -> tuple[jax.Array, jax.Array]:
        vectors = self.model.vectors(params, tokens)
        return self.model.de(params, vectors), self.model.clf(params, vectors)

    def de(self, params: Any, store: TokenStore, rows: np.ndarray | None = None) -> np.ndarray:
        """Dual-encoder embeddings of ``rows`` (default all), ``[n, d]`` float32, unit rows."""
        return self._run(self._heads["de"], params, store, rows, 1)[0]

    def both(
        self, params: Any, store: TokenStore, rows: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """DE and (not normalised) CLF embeddings of ``rows`` (default all), each ``[n, d]``."""
        return self._run(self._both, params, store, rows, 2)

    def _run(
        self, function: Any, params: Any, store: TokenStore, rows: np.ndarray | None, outputs: int
    ) -> tuple[np.ndarray, ...]:
        rows = np.arange(len(store)) if rows is None else np.asarray(rows)
        found = tuple(np.zeros((len(rows), self.model.dim), np.float32) for _ in range(outputs))
        bar = tqdm(total=len(rows), desc="embedding", unit=" texts", delay=2, leave=False)
        with bar:
            parts = chunks(store, rows, *self._chunk(store, rows), **self._packing)
            for start, stop, tokens in parts:
                result = function(params, tokens)
                for array, part in zip(found, result if outputs > 1 else (result,)):
                    array[start:stop] = np.asarray(part)[: stop - start]
                bar.update(stop - start)
        return found

    def _chunk(self, store: TokenStore, rows: np.ndarray) -> tuple[int, int]:
        """Packed rows and texts of a chunk."""
        few_rows, few_texts = max(1, self._rows // FEW), max(1, self._texts // FEW)
        if len(rows) <= few_texts:
            if packing.count_rows(store.lengths(rows), **self._packing) <= few_rows:
                return few_rows, few_texts
        return self._rows, self._texts


def chunks(
    store: TokenStore, rows: np.ndarray, num_rows: int, num_texts: int, **options: int
) -> Iterator[tuple[int, int, TokenBatch]]:
    """Consecutive ranges ``start, stop`` of ``rows`` that fit, each packed into the one shape.

    Args:
      store: the texts.
      rows: ``[n]`` which of them.
      num_rows: packed rows of a chunk.
      num_texts: texts of a chunk, at most.
      **options: ``row_length`` and ``max_segments`` of ``packing.pack``.
    """
    lengths = np.asarray(store.lengths(rows), np.int64)
    ends = np.cumsum(lengths)
    capacity = num_rows * options["row_length"]
    start = 0
    while start < len(rows):
        before = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, before + capacity, side="right"))
        stop = min(max(stop, start + 1), start + num_texts, len(rows))
        while (needed := packing.count_rows(lengths[start:stop], **options)) > num_rows:
            stop = start + (stop - start) * num_rows // needed
        padded = np.full(num_texts, -1, np.int64)
        padded[: stop - start] = rows[start:stop]
        flat, sizes = store.gather(padded)
        yield start, stop, packing.pack(flat, sizes, num_rows=num_rows, **options)
        start = stop
