"""Batches of the frugal family: queries, a pool of labels, and the clusters of all positives."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from xmc_jax import phases
from xmc_jax.batch_source import BatchSource
from xmc_jax.data import packing
from xmc_jax.frugal_step import FrugalBatch
from xmc_jax.mining import Refresh
from xmc_jax.tokens import TokenBatch
from xmc_jax.training_data import TrainingData

LABEL_SEGMENTS = 255  # label texts in a packed row, at most


class GraphRows(NamedTuple):
    """Rows of the label graph times the labels' TF-IDF rows, the heaviest entries.

    Attributes:
      ids: ``[L, T]`` int32 tokens.
      weights: ``[L, T]`` float32, 0 = nothing there.
    """

    ids: np.ndarray
    weights: np.ndarray

    def take(self, labels: np.ndarray) -> GraphRows:
        """Rows of some labels; -1 gives weights 0."""
        there = labels >= 0
        rows = np.where(there, labels, 0)
        return GraphRows(self.ids[rows], self.weights[rows] * there[:, None])


class FrugalSource(BatchSource):
    """Makes the batches of a frugal run; what it adds to `BatchSource` is in `FrugalBatch`."""

    def __init__(
        self,
        config: ConfigDict,
        data: TrainingData,
        max_segments: int,
        *,
        num_clusters: int,
        label_text: bool,
        graph: GraphRows | None,
    ) -> None:
        """Fix shapes.

        Args:
          config: a resolved configuration.
          data: what training reads.
          max_segments: query texts in a packed row, at most.
          num_clusters: C.
          label_text: whether label texts go into the batch.
          graph: rows of all labels, or None.

        Raises:
          ValueError: the pool is smaller than the batch.
        """
        self._num_clusters, self._label_text, self._graph = num_clusters, label_text, graph
        super().__init__(config, data, max_segments)

    def use(self, refresh: Refresh | None) -> None:
        """Draw from this refresh from now on; None = random pools, and no clusters yet."""
        self._clusters = None if refresh is None else refresh.label_clusters
        super().use(refresh)

    def _make(
        self, queries: np.ndarray, epoch: int, step: int
    ) -> tuple[FrugalBatch, dict[str, float], np.ndarray]:
        data = self._data
        pool = self._pool(queries, epoch, step)
        label_rows = np.where(pool.ids < data.num_labels, pool.ids, -1)
        stats = dict(pool.stats)
        tokens, number, stats["rows"] = self._packed(data.train_tokens, queries, "queries")
        stats["tokens"] = float(number)
        label_tokens = graph = None
        if self._label_text:
            label_tokens, number, stats["label_rows"] = self._packed(
                data.label_tokens, label_rows, "labels"
            )
            stats["tokens"] += number
        if self._graph is not None:
            graph = self._graph.take(label_rows)
        batch = FrugalBatch(
            tokens=tokens,
            label_tokens=label_tokens,
            graph_ids=None if graph is None else graph.ids,
            graph_weights=None if graph is None else graph.weights,
            pool_ids=pool.ids,
            targets=pool.targets,
            where=pool.where,
            cluster_targets=self._cluster_targets(queries, pool.targets.dtype),
            free_weights=np.True_ if phases.at(self._config, epoch).free_weights else None,
        )
        return batch, stats, label_rows

    def _packed(self, store, rows: np.ndarray, name: str) -> tuple[TokenBatch, int, float]:
        """Texts in one of the shapes of the ladder, their tokens, and the rows they need."""
        flat, lengths = store.gather(rows)
        packed = packing.pack(flat, lengths, num_rows=self._ladder[name], **self._packing_of(name))
        return packed, int(lengths.sum()), float(packing.used_rows(packed))

    def _packing_of(self, name: str) -> dict[str, int]:
        return (
            self._packing
            if name == "queries"
            else {
                **self._packing,
                "max_segments": LABEL_SEGMENTS,
            }
        )

    def _cluster_targets(self, queries: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """``[Q, C]``: the largest target of the query in each cluster."""
        targets = np.zeros((len(queries), self._num_clusters), dtype)
        if self._clusters is None:
            return targets
        slots = np.flatnonzero(queries >= 0)
        own = self._data.labels[queries[slots]]
        place = np.repeat(slots, np.diff(own.indptr)), self._clusters[own.indices]
        np.maximum.at(targets, place, own.data.astype(dtype))
        return targets

    def _row_ladder(self) -> dict[str, tuple[int, ...]]:
        """Row counts to compile for, of queries and of labels; see `BatchSource`."""
        sizes = {"queries": self.batch_size, "labels": self.pool_size}
        worst = {
            name: packing.worst_rows(size, max_length=self._longest, **self._packing_of(name))
            for name, size in sizes.items()
        }
        self._ladder = {name: (rows,) for name, rows in worst.items()}
        sampled = [stats for _, stats, _ in self._sampled()]
        ladders = {}
        for name, key in (("queries", "rows"), ("labels", "label_rows")):
            counts = [int(stats.get(key, worst[name])) for stats in sampled]
            multiple = max(1, worst[name] // 128)
            # Shapes multiply, and padding of the queries costs little.
            steps = 1 if name == "queries" else 2
            ladders[name] = packing.ladder(counts, top=worst[name], steps=steps, multiple=multiple)
        return ladders
