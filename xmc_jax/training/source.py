"""Step batches: a pure function of (seed, epoch, step, refresh), made ahead in a thread."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from ml_collections import ConfigDict

from xmc_jax.data.batching import batches, packing, pools
from xmc_jax.systems.unidec.step import StepBatch
from xmc_jax.training.refresh import Refresh
from xmc_jax.training.training_data import TrainingData

AHEAD = 2  # batches made while the device works
SAMPLED_BATCHES = 16  # whose packed rows the compiled shapes are chosen for


class BatchSource:
    """Makes the batches of a run.

    Host batches hold small integer types; the step widens them.
    """

    def __init__(self, config: ConfigDict, data: TrainingData, max_segments: int) -> None:
        """Fix shapes.

        Args:
          config: a resolved configuration.
          data: what training reads.
          max_segments: texts in a packed row, at most.

        Raises:
          ValueError: the pool is smaller than the batch.
        """
        self._config, self._data, self._max_segments = config, data, max_segments
        self._rows = data.rows
        self._packing = {"row_length": config.row_length, "max_segments": max_segments}
        stores = (data.train_tokens, data.label_tokens)
        self._longest = max(int(store.lengths().max(initial=1)) for store in stores)
        self.levels = batches.cluster_levels(len(self._rows), config.batch_size)
        self.batch_size = min(config.batch_size, len(self._rows))
        if config.batching == "clusters":
            self.batch_size = batches.batch_slots(len(self._rows), self.levels)
        if config.pool_size < self.batch_size:
            raise ValueError(
                f"config.pool_size = {config.pool_size} is smaller than the {self.batch_size} "
                "queries of a batch, each of which needs a positive in the pool: raise pool_size "
                "or lower batch_size."
            )
        self.pool_size = min(config.pool_size, max(data.num_labels, self.batch_size))
        self.use(None)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch; the same for every epoch."""
        if self._config.batching == "clusters":
            return 2**self.levels
        return -(-len(self._rows) // self.batch_size)

    def use(self, refresh: Refresh | None) -> None:
        """Draw from this refresh from now on; None = random batches without mined negatives."""
        self._refresh = refresh
        self._ladder = self._row_ladder()

    def epoch_queries(self, epoch: int) -> np.ndarray:
        """``[steps, Q]`` row numbers of an epoch, -1 = no query."""
        config, refresh = self._config, self._refresh
        batching, order, offsets = "random", None, None
        if refresh is not None and config.batching != "random":
            batching, order, offsets = config.batching, refresh.order, refresh.offsets
        if batching == "joined":
            size = batches.cluster_size(epoch, config.cluster_schedule)
            levels = batches.cluster_levels(len(self._rows), self.batch_size, "joined", size)
            offsets = batches.coarsen(offsets, levels)
        queries = batches.epoch_queries(
            config.seed,
            epoch,
            self._rows,
            self.batch_size,
            batching=batching,
            order=order,
            offsets=offsets,
        )
        padded = np.full((self.steps_per_epoch, self.batch_size), -1, np.int32)
        padded[: len(queries)] = queries
        return padded

    def ahead(
        self, epoch: int, first_step: int
    ) -> Iterator[tuple[StepBatch, dict[str, float], np.ndarray]]:
        """Batches of an epoch from a step on, made in a thread while the device works.

        Yields:
          The batch, its pool statistics, and the pool's label ids (-1 = none).
        """
        queries = self.epoch_queries(epoch)
        with ThreadPoolExecutor(1) as worker:
            waiting: collections.deque[Future] = collections.deque()
            todo = iter(range(first_step, len(queries)))
            try:
                while True:
                    while len(waiting) < AHEAD and (step := next(todo, None)) is not None:
                        waiting.append(worker.submit(self._make, queries[step], epoch, step))
                    if not waiting:
                        return
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _pool(self, queries: np.ndarray, epoch: int, step: int) -> pools.Pool:
        config, data = self._config, self._data
        mined = self._refresh.hard_negatives if self._refresh is not None else None
        return pools.build_pool(
            np.random.default_rng([config.seed, epoch, step]),
            queries,
            data.labels,
            filters=data.filters,
            hard_negatives=mined if config.hard_negatives else None,
            pool_size=self.pool_size,
            beta=config.beta,
            eta=config.eta if config.hard_negatives else 0,
            fill=config.fill,
            extra_positives=config.extra_positives,
            extra_size=config.extra_pool_size,
            first_text_row=data.first_text_row,
            **({} if data.first_text_row is None else {"draw": config.gandalf.draw}),
        )

    def _make(
        self, queries: np.ndarray, epoch: int, step: int
    ) -> tuple[StepBatch, dict[str, float], np.ndarray]:
        data = self._data
        pool = self._pool(queries, epoch, step)
        encoded = pool.ids[: self.pool_size]
        label_rows = np.where(encoded < data.num_labels, encoded, -1)
        query_ids, query_lengths = data.train_tokens.gather(queries)
        label_ids, label_lengths = data.label_tokens.gather(label_rows)
        flat = np.concatenate([query_ids, label_ids])
        lengths = np.concatenate([query_lengths, label_lengths])
        tokens = packing.pack(flat, lengths, num_rows=self._ladder, **self._packing)
        stats = dict(pool.stats)
        stats["tokens"] = float(lengths.sum())
        stats["rows"] = float(packing.used_rows(tokens))
        stats["packing"] = float(lengths.sum()) / tokens.segment_ids.size
        return StepBatch(tokens, pool.ids, pool.targets, pool.where), stats, label_rows

    def _row_ladder(self) -> tuple[int, ...]:
        """Row counts to compile for, from some batches of the refresh in use and the worst case.

        Sizes are multiples of a coarse unit, so that another refresh mostly meets the same ones.
        """
        worst = packing.worst_rows(
            self.batch_size + self.pool_size, max_length=self._longest, **self._packing
        )
        self._ladder = (worst,)
        counts = [int(stats["rows"]) for _, stats, _ in self._sampled()]
        return packing.ladder(counts, top=worst, steps=4, multiple=max(1, worst // 128))

    def _sampled(self) -> list[tuple[StepBatch, dict[str, float], np.ndarray]]:
        """Some batches of the refresh in use."""
        epoch = 0 if self._refresh is None else self._config.warmup_epochs
        queries = self.epoch_queries(epoch)
        last = max(1, len(queries) - 1)  # The last batch of an epoch may be short: no measure.
        drawn = np.linspace(0, last - 1, min(SAMPLED_BATCHES, last)).astype(int)
        return [self._make(queries[i], epoch, i) for i in drawn]
