"""Batches of the frugal family: queries, a pool of labels, and the clusters of all positives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from xmc_jax.contracts import Made, Points, RefreshFiles, Shapes, Stage, TokenBatch
from xmc_jax.data.batching import packing
from xmc_jax.data.batching.pools import Pool
from xmc_jax.systems.frugal import text_mixing
from xmc_jax.systems.frugal.step import FrugalBatch
from xmc_jax.training.options import PoolOptions
from xmc_jax.training.source import BatchSource, PoolSampler, batch_shapes

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
        known = labels >= 0
        rows = np.where(known, labels, 0)
        return GraphRows(self.ids[rows], self.weights[rows] * known[:, None])


class FrugalBatches:
    """Makes the batches of a run (`xmc_jax.contracts.BatchMaker`)."""

    def __init__(
        self,
        options: PoolOptions,
        data: Points,
        shapes: Shapes,
        *,
        max_segments: int,
        num_clusters: int,
        label_text: bool,
        graph: GraphRows | None,
    ) -> None:
        """Nothing is chosen yet: the source says what to draw from.

        Args:
          options: of the run.
          data: what training reads.
          shapes: of the batches.
          max_segments: query texts in a packed row, at most.
          num_clusters: C.
          label_text: whether label texts go into the batch.
          graph: rows of all labels, or None.
        """
        self._data, self._seed = data, options.seed
        self._num_clusters, self._label_text, self._graph = num_clusters, label_text, graph
        self._mixing = text_mixing.variant(options.gandalf)
        self._pools = PoolSampler(options, data, shapes)
        self._packing = {
            "queries": {"row_length": options.row_length, "max_segments": max_segments},
            "labels": {"row_length": options.row_length, "max_segments": LABEL_SEGMENTS},
        }
        stores = (data.train_tokens, data.label_tokens)
        longest = max(int(store.lengths().max(initial=1)) for store in stores)
        sizes = {
            "queries": shapes.queries * (2 if self._mixing == "label_mixup" else 1),
            "labels": shapes.labels + options.extra_pool_size,  # all have their texts here
        }
        self._worst = {
            name: packing.worst_rows(size, max_length=longest, **self._packing[name])
            for name, size in sizes.items()
        }

    def use(self, refresh: RefreshFiles | None) -> None:
        """Draw from this refresh from now on; None = random pools, and no clusters yet."""
        self._pools.use(refresh)
        self._clusters = None if refresh is None else refresh.get("label_clusters")
        self._synonyms = None if refresh is None else refresh.get("synonyms")
        self._ladder: dict[str, tuple[int, ...]] = {
            name: (rows,) for name, rows in self._worst.items()
        }

    def fit(self, sampled: Iterable[Mapping[str, float]]) -> None:
        """Choose the row counts to compile for, of queries and of labels."""
        sampled, ladders = list(sampled), {}
        for name, key in (("queries", "rows"), ("labels", "label_rows")):
            worst = self._worst[name]
            counts = [int(stats.get(key, worst)) for stats in sampled]
            # Shapes multiply, and padding of the queries costs little.
            steps = 1 if name == "queries" else 2
            ladders[name] = packing.ladder(
                counts, top=worst, steps=steps, multiple=max(1, worst // 128)
            )
        self._ladder = ladders

    def make(self, queries: np.ndarray, stage: Stage, epoch: int, step: int) -> Made:
        """A `FrugalBatch`, its statistics and the pool's label ids."""
        data = self._data
        pool = self._pools.draw(queries, epoch, step)
        label_rows = np.where(pool.ids < data.num_labels, pool.ids, -1)
        stats = dict(pool.stats)
        clusters = self._cluster_targets(queries, pool.targets.dtype)
        rng = np.random.default_rng([self._seed, epoch, step, 1])
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
            free_weights=np.True_ if stage.options.get("free_weights", True) else None,
        )
        if mix is not None:
            batch = batch._replace(**mix._asdict())
        return batch, stats, label_rows

    def _mix(
        self, rng: np.random.Generator, queries: np.ndarray, pool: Pool, clusters: np.ndarray
    ) -> tuple[np.ndarray, text_mixing.Mix | None]:
        """Rows of the texts to encode, and how they are mixed, if they are."""
        if self._mixing == "mixup":
            return queries, text_mixing.mixup(rng, queries, pool.targets, pool.where, clusters)
        if self._mixing != "label_mixup":
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
        packed = packing.pack(flat, lengths, num_rows=self._ladder[name], **self._packing[name])
        return packed, int(lengths.sum()), float(packing.used_rows(packed))

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


def make_source(
    options: PoolOptions,
    data: Points,
    max_segments: int,
    *,
    num_clusters: int,
    label_text: bool,
    graph: GraphRows | None,
) -> BatchSource:
    """The batches of a run; see `FrugalBatches`.

    Raises:
      ValueError: the pool is smaller than the batch.
    """
    shapes = batch_shapes(options, data)
    maker = FrugalBatches(
        options,
        data,
        shapes,
        max_segments=max_segments,
        num_clusters=num_clusters,
        label_text=label_text,
        graph=graph,
    )
    return BatchSource(options, data.rows, shapes, maker)
