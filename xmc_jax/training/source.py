"""Step batches: a pure function of (seed, epoch, step, refresh), made ahead in a thread."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from xmc_jax.contracts import BatchMaker, Made, Points, RefreshFiles, Shapes, Stage
from xmc_jax.data.batching import batches, pools
from xmc_jax.training.options import PoolOptions, TrainingOptions

AHEAD = 2  # batches made while the device works
SAMPLED_BATCHES = 16  # whose packed rows the compiled shapes are chosen for


def batch_shapes(options: PoolOptions, data: Points) -> Shapes:
    """Sizes that follow from the options and the data.

    Raises:
      ValueError: the pool is smaller than the batch.
    """
    num_rows = len(data.rows)
    levels = batches.cluster_levels(num_rows, options.batch_size)
    queries = min(options.batch_size, num_rows)
    steps = -(-num_rows // queries)
    if options.batching == "clusters":
        queries, steps = batches.batch_slots(num_rows, levels), 2**levels
    if options.pool_size < queries:
        raise ValueError(
            f"config.pool_size = {options.pool_size} is smaller than the {queries} queries of a "
            "batch, each of which needs a positive in the pool: raise pool_size or lower "
            "batch_size."
        )
    labels = min(options.pool_size, max(data.num_labels, queries))
    return Shapes(queries, labels, levels, steps)


class PoolSampler:
    """Draws the label pools of a run."""

    def __init__(self, options: PoolOptions, data: Points, shapes: Shapes) -> None:
        """Without mined negatives, until there is a refresh."""
        self._options, self._data, self._shapes = options, data, shapes
        self._hard_negatives: np.ndarray | None = None

    def use(self, refresh: RefreshFiles | None) -> None:
        """Draw hard negatives from this refresh from now on.

        Raises:
          ValueError: it has none.
        """
        self._hard_negatives = None
        if refresh is not None and self._options.hard_negatives:
            self._hard_negatives = refresh.get("hard_negatives")
            if self._hard_negatives is None:
                raise ValueError(
                    "the refresh has lost its hard_negatives.npy. Remove the newest checkpoint and "
                    "the folder refresh/ of the work directory, then run the same command again."
                )

    def draw(self, queries: np.ndarray, epoch: int, step: int) -> pools.Pool:
        """The pool of a batch, a function of (seed, epoch, step, refresh) alone."""
        options, data = self._options, self._data
        return pools.build_pool(
            np.random.default_rng([options.seed, epoch, step]),
            queries,
            data.labels,
            filters=data.filters,
            hard_negatives=self._hard_negatives,
            pool_size=self._shapes.labels,
            beta=options.beta,
            eta=options.eta if options.hard_negatives else 0,
            fill=options.fill,
            extra_positives=options.extra_positives,
            extra_size=options.extra_pool_size,
            first_text_row=data.first_text_row,
            **({} if data.first_text_row is None else {"draw": options.gandalf.draw}),
        )


class BatchSource:
    """The batches of a run: which queries stand together, and when what is made of them."""

    def __init__(
        self,
        options: TrainingOptions,
        rows: np.ndarray,
        shapes: Shapes,
        maker: BatchMaker,
    ) -> None:
        """Choose the shapes to compile for.

        Args:
          options: of the run.
          rows: points that have labels.
          shapes: of the batches.
          maker: fills them.
        """
        self._options, self._rows, self.shapes, self._maker = options, rows, shapes, maker
        self.use(None)

    def use(self, refresh: RefreshFiles | None) -> None:
        """Draw from this refresh from now on; None = random batches without mined negatives."""
        self._refresh = refresh
        self._maker.use(refresh)
        self._maker.fit([stats for _, stats, _ in self._sampled()])

    def epoch_queries(self, epoch: int) -> np.ndarray:
        """``[steps, Q]`` row numbers of an epoch, -1 = no query."""
        options, refresh, size = self._options, self._refresh, self.shapes.queries
        batching, order, offsets = "random", None, None
        if refresh is not None and options.batching != "random":
            batching = options.batching
            order, offsets = refresh.get("order"), refresh.get("offsets")
        if batching == "joined" and offsets is not None:
            cluster = batches.cluster_size(epoch, options.cluster_schedule)
            levels = batches.cluster_levels(len(self._rows), size, "joined", cluster)
            offsets = batches.coarsen(offsets, levels)
        queries = batches.epoch_queries(
            options.seed, epoch, self._rows, size, batching=batching, order=order, offsets=offsets
        )
        padded = np.full((self.shapes.steps, size), -1, np.int32)
        padded[: len(queries)] = queries
        return padded

    def ahead(self, stage: Stage, epoch: int, first_step: int) -> Iterator[Made]:
        """Batches of an epoch from a step on, made in a thread while the device works.

        Yields:
          The batch, its pool statistics, and the pool's label ids (-1 = none).
        """
        queries = self.epoch_queries(epoch)
        make = self._maker.make
        with ThreadPoolExecutor(1) as worker:
            waiting: collections.deque[Future[Made]] = collections.deque()
            todo = iter(range(first_step, len(queries)))
            try:
                while True:
                    while len(waiting) < AHEAD and (step := next(todo, None)) is not None:
                        waiting.append(worker.submit(make, queries[step], stage, epoch, step))
                    if not waiting:
                        return
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _sampled(self) -> Sequence[Made]:
        """Some batches of the refresh in use."""
        epoch = 0 if self._refresh is None else self._options.warmup_epochs
        queries = self.epoch_queries(epoch)
        last = max(1, len(queries) - 1)  # The last batch of an epoch may be short: no measure.
        drawn = np.linspace(0, last - 1, min(SAMPLED_BATCHES, last)).astype(int)
        return [self._maker.make(queries[i], Stage(0, 1), epoch, int(i)) for i in drawn]
