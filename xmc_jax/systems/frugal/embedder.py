"""Features of queries, and vectors of labels, of a frugal classifier."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from xmc_jax.contracts import TokenBatch, Tokens, Weights
from xmc_jax.models.frugal.classifier import Frugal
from xmc_jax.models.frugal.inception import InceptionQueries
from xmc_jax.systems.embedding import CHUNK_TEXTS, Chunks
from xmc_jax.systems.frugal.source import LABEL_SEGMENTS, GraphRows
from xmc_jax.systems.frugal.step import TABLE
from xmc_jax.tables import label_pool

INCEPTION_TEXTS = 256  # whose features need an array [texts, words, D], also for empty places
CHUNK_TOKENS = 24_576  # padding included


def whole(weights: Weights) -> Any:
    """Parameters with the model state among them, as the model takes them."""
    return {**weights.params, **weights.model_state}


class FrugalEmbedder:
    """Runs the parts of a frugal model over token stores (`xmc_jax.systems.embedding.Chunks`)."""

    def __init__(self, model: Frugal, *, row_length: int) -> None:
        """Prepare the jitted functions.

        Args:
          model: the model.
          row_length: tokens in a packed row, at least the longest text.
        """
        self.model = model
        of_words = isinstance(model.queries, InceptionQueries)
        query_texts = INCEPTION_TEXTS if of_words else CHUNK_TEXTS
        rows = lambda texts: max(1, min(CHUNK_TOKENS // row_length, texts))
        segments = model.queries.max_segments
        self._queries = Chunks(rows(query_texts), query_texts, row_length, segments)
        self._labels = Chunks(rows(CHUNK_TEXTS), CHUNK_TEXTS, row_length, LABEL_SEGMENTS)
        self._features = jax.jit(lambda params, tokens: model.features(params, tokens)[0])
        self._texts = jax.jit(model.text_vectors)
        self._vectors = jax.jit(self._label_vectors)

    def both(
        self, weights: Weights, store: Tokens, rows: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Meta and extreme features of ``rows`` (default all), each ``[n, D]``."""
        params = whole(weights)
        run = lambda start, stop, tokens: self._features(params, tokens)
        meta, extreme = self._queries.run(run, store, rows, dim=self.model.dim, outputs=2)
        return meta, extreme

    def texts(self, weights: Weights, store: Tokens) -> np.ndarray:
        """z1 of all label texts, ``[L, D]``."""
        params = whole(weights)
        run = lambda start, stop, tokens: (self._texts(params, tokens),)
        return self._labels.run(run, store, None, dim=self.model.dim)[0]

    def label_vectors(self, weights: Weights, store: Tokens, graph: GraphRows | None) -> np.ndarray:
        """Vectors of all labels, ``[L, D]`` float32.

        Args:
          weights: the free weights are read in a phase that has them.
          store: label texts.
          graph: rows of all labels where the model has that part.
        """
        params = whole(weights)
        free = bool(params["phase"]["free_weights"])
        if self.model.parts == ("free",):
            return np.asarray(label_pool.from_storage(weights.tables[TABLE]))

        def run(start: int, stop: int, tokens: TokenBatch) -> tuple[jax.Array]:
            labels = np.full(CHUNK_TEXTS, -1)
            labels[: stop - start] = np.arange(start, stop)
            rows = graph.take(labels) if graph is not None and self.model.label_graph else None
            own = None
            if free:
                ids = np.where(labels < 0, len(store), labels)
                own = label_pool.gather_rows(weights.tables[TABLE], ids)
            return (self._vectors(params, tokens, rows, own),)

        return self._labels.run(run, store, None, dim=self.model.dim)[0]

    def _label_vectors(self, params: Any, tokens: TokenBatch, graph: Any, own: Any) -> jax.Array:
        texts = self.model.text_vectors(params, tokens)
        graphs = None
        if graph is not None:
            graphs = self.model.weighted_sum(params, graph.ids, graph.weights)
        return self.model.label_vectors(params, texts, graphs, own)[0]
