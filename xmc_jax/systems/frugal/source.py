"""Batches of the frugal family: queries, a pool of labels, and the clusters of all positives."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from xmc_jax.contracts import TokenBatch
from xmc_jax.data.batching import packing
from xmc_jax.data.batching.pools import Pool
from xmc_jax.systems.frugal import text_mixing
from xmc_jax.systems.frugal.step import FrugalBatch
from xmc_jax.training import stages
from xmc_jax.training.refresh import Refresh
from xmc_jax.training.source import BatchSource
from xmc_jax.training.training_data import TrainingData

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
        self._rival = text_mixing.variant(config)
        super().__init__(config, data, max_segments)

    def use(self, refresh: Refresh | None) -> None:
        """Draw from this refresh from now on; None = random pools, and no clusters yet."""
        self._clusters = None if refresh is None else refresh.label_clusters
        self._synonyms = None if refresh is None else refresh.synonyms
        super().use(refresh)

    def _make(
        self, queries: np.ndarray, epoch: int, step: int
    ) -> tuple[FrugalBatch, dict[str, float], np.ndarray]:
        data = self._data
        pool = self._pool(queries, epoch, step)
        label_rows = np.where(pool.ids < data.num_labels, pool.ids, -1)
        stats = dict(pool.stats)
        clusters = self._cluster_targets(queries, pool.targets.dtype)
        rng = np.random.default_rng([self._config.seed, epoch, step, 1])
        texts, mix = self._mix(rng, queries, pool, clusters)
        flat, lengths = data.train_tokens.gather(texts)
        if self._synonyms is not None:
            flat = text_mixing.replace(rng, flat, self._synonyms)
        tokens, number, stats["rows"] = self._packed(flat, lengths, "queries")
        stats["tokens"] = float(number)
        label_tokens = graph = None
        if self._label_text:
            label_tokens, number, stats["label_rows"] = self._packed(
                *data.label_tokens.gather(label_rows), "labels"
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
            cluster_targets=clusters,
            free_weights=np.True_ if stages.at(self._config, epoch).free_weights else None,
        )
        if mix is not None:
            batch = batch._replace(**mix._asdict())
        return batch, stats, label_rows

    def _mix(
        self, rng: np.random.Generator, queries: np.ndarray, pool: Pool, clusters: np.ndarray
    ) -> tuple[np.ndarray, text_mixing.Mix | None]:
        """Rows of the texts to encode, and how they are mixed, if they are."""
        if self._rival == "mixup":
            return queries, text_mixing.mixup(rng, queries, pool.targets, pool.where, clusters)
        if self._rival != "label_mixup":
            return queries, None
        labels = np.minimum(pool.ids, self._data.num_labels - 1)  # of empty columns: any
        of_columns = np.zeros_like(labels) if self._clusters is None else self._clusters[labels]
        mix, columns = text_mixing.label_mixup(rng, pool.targets, pool.where, clusters, of_columns)
        texts = np.where(columns >= 0, self._data.labels.shape[0] + labels[columns], -1)
        return np.concatenate([queries, texts]), mix

    def _packed(
        self, flat: np.ndarray, lengths: np.ndarray, name: str
    ) -> tuple[TokenBatch, int, float]:
        """Texts in one of the shapes of the ladder, their tokens, and the rows they need."""
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
        texts = self.batch_size * (2 if self._rival == "label_mixup" else 1)
        labels = self.pool_size + self._config.extra_pool_size  # all have their texts here
        sizes = {"queries": texts, "labels": labels}
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
