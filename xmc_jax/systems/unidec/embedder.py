"""UniDEC's embeddings of many texts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xmc_jax.contracts import Side, TokenBatch, Tokens
from xmc_jax.host import xla
from xmc_jax.models.heads.unidec import UniDEC
from xmc_jax.systems.embedding import CHUNK_TEXTS, Chunks


class Embedder:
    """Runs a model over a token store (`xmc_jax.systems.embedding.Chunks`)."""

    def __init__(
        self,
        model: UniDEC,
        *,
        row_length: int,
        chunk_tokens: int | None = None,
        chunk_texts: int = CHUNK_TEXTS,
    ) -> None:
        """Prepare the jitted functions.

        Args:
          model: the model.
          row_length: tokens in a packed row, at least the longest text.
          chunk_tokens: tokens of a chunk, padding included; None = 4,096 on a CPU, whose caches
            then hold what a layer makes of them, else 24,576.
          chunk_texts: texts of a chunk.
        """
        self.model = model
        if chunk_tokens is None:
            chunk_tokens = 4096 if jax.default_backend() == "cpu" else 24576
        rows = max(1, chunk_tokens // row_length)
        segments = model.encoder.max_segments
        self._chunks = Chunks(rows, chunk_texts, row_length, segments, few=True)
        self._functions: dict[tuple[str, Side], Callable[..., tuple[jax.Array, ...]]] = {}

    def de(
        self, params: Any, store: Tokens, rows: np.ndarray | None = None, *, side: Side = "query"
    ) -> np.ndarray:
        """Dual-encoder embeddings of ``rows`` (default all), ``[n, d]`` float32, unit rows."""
        return self._run("de", side, params, store, rows)[0]

    def both(
        self, params: Any, store: Tokens, rows: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """DE and (not normalised) CLF embeddings of queries (default all), each ``[n, d]``."""
        de, clf = self._run("both", "query", params, store, rows)
        return de, clf

    def _run(
        self, heads: str, side: Side, params: Any, store: Tokens, rows: np.ndarray | None
    ) -> tuple[np.ndarray, ...]:
        compiled = self._compiled(heads, side)
        return self._chunks.run(
            lambda start, stop, tokens: compiled(params, tokens),
            store,
            rows,
            dim=self.model.dim,
            outputs=2 if heads == "both" else 1,
        )

    def _compiled(self, heads: str, side: Side) -> Callable[..., tuple[jax.Array, ...]]:
        if self.model.encoder.shared:
            side = "query"  # one program for both sides
        if (heads, side) not in self._functions:
            model = self.model

            def embed(params: Any, tokens: TokenBatch) -> tuple[jax.Array, ...]:
                vectors = model.vectors(params, tokens, side=side)
                de = model.de(params, vectors)
                return (de, model.clf(params, vectors)) if heads == "both" else (de,)

            jit = functools.partial(jax.jit, compiler_options=xla.compiler_options())
            self._functions[heads, side] = jit(embed)
        return self._functions[heads, side]
