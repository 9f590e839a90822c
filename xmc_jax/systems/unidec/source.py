"""UniDEC's batches: one pack of query and label texts, a pool, and its targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from xmc_jax.contracts import Made, Points, RefreshFiles, Shapes, Stage, TokenBatch
from xmc_jax.data.batching import packing
from xmc_jax.systems.unidec.step import StepBatch
from xmc_jax.training.options import PoolOptions
from xmc_jax.training.source import BatchSource, PoolSampler, batch_shapes


class UniDECBatches:
    """Makes the batches of a run (`xmc_jax.contracts.BatchMaker`).

    Host batches hold small integer types; the step widens them.
    """

    def __init__(
        self,
        options: PoolOptions,
        data: Points,
        shapes: Shapes,
        *,
        max_segments: int,
        shared: bool = True,
    ) -> None:
        """Nothing is chosen yet: the source says what to draw from.

        Args:
          options: of the run.
          data: what training reads.
          shapes: of the batches.
          max_segments: texts in a packed row, at most.
          shared: whether queries and labels go through the encoder together.
        """
        self._data, self._shapes, self._shared = data, shapes, shared
        self._pools = PoolSampler(options, data, shapes)
        self._packing = {"row_length": options.row_length, "max_segments": max_segments}
        stores = (data.train_tokens, data.label_tokens)
        longest = max(int(store.lengths().max(initial=1)) for store in stores)
        worst = lambda texts: packing.worst_rows(texts, max_length=longest, **self._packing)
        self._worst = worst(shapes.queries + (shapes.labels if shared else 0))
        self._worst_labels = worst(shapes.labels)
        self._ladder: tuple[int, ...] = (self._worst,)

    def use(self, refresh: RefreshFiles | None) -> None:
        """Draw from this refresh from now on; None = pools without mined negatives."""
        self._pools.use(refresh)
        self._ladder = (self._worst,)

    def fit(self, sampled: Iterable[Mapping[str, float]]) -> None:
        """Choose the row counts to compile for.

        Sizes are multiples of a coarse unit, so that another refresh mostly meets the same ones.
        """
        counts = [int(stats["rows"]) for stats in sampled]
        multiple = max(1, self._worst // 128)
        self._ladder = packing.ladder(counts, top=self._worst, steps=4, multiple=multiple)

    def make(self, queries: np.ndarray, stage: Stage, epoch: int, step: int) -> Made:
        """A `StepBatch`, its statistics and the pool's label ids."""
        del stage
        data, size = self._data, self._shapes.labels
        pool = self._pools.draw(queries, epoch, step)
        encoded = pool.ids[:size]
        label_rows = np.where(encoded < data.num_labels, encoded, -1)
        query_ids, query_lengths = data.train_tokens.gather(queries)
        label_ids, label_lengths = data.label_tokens.gather(label_rows)
        label_tokens: TokenBatch | None = None
        if self._shared:
            flat = np.concatenate([query_ids, label_ids])
            lengths = np.concatenate([query_lengths, label_lengths])
        else:
            flat, lengths = query_ids, query_lengths
            rows = (self._worst_labels,)
            label_tokens = packing.pack(label_ids, label_lengths, num_rows=rows, **self._packing)
        tokens = packing.pack(flat, lengths, num_rows=self._ladder, **self._packing)
        stats = dict(pool.stats)
        stats["tokens"] = float(lengths.sum())
        stats["rows"] = float(packing.used_rows(tokens))
        stats["packing"] = float(lengths.sum()) / tokens.segment_ids.size
        if label_tokens is not None:
            stats["tokens"] += float(label_lengths.sum())
        batch = StepBatch(tokens, pool.ids, pool.targets, pool.where, label_tokens)
        return batch, stats, label_rows


def make_source(
    options: PoolOptions, data: Points, max_segments: int, *, shared: bool = True
) -> BatchSource:
    """The batches of a run.

    Raises:
      ValueError: the pool is smaller than the batch.
    """
    shapes = batch_shapes(options, data)
    maker = UniDECBatches(options, data, shapes, max_segments=max_segments, shared=shared)
    return BatchSource(options, data.rows, shapes, maker)
