"""A refresh of UniDEC: clusters of the queries and mined hard negatives, from the dual encoder.

refresh/<epoch>/order.npy, offsets.npy      clustered order of the training rows
refresh/<epoch>/hard_negatives.npy          [N, eta * refresh_epochs] int32, -1 = none
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from xmc_jax.contracts import Points
from xmc_jax.data.batching import batches
from xmc_jax.data.search import clustering
from xmc_jax.data.search import index as indexes
from xmc_jax.systems.unidec.embedder import Embedder
from xmc_jax.systems.unidec.options import UniDECOptions
from xmc_jax.systems.unidec.ranking import choose_index
from xmc_jax.training.refresh import lap, write_blocks

BLOCK_ROWS = 1 << 17  # training rows whose negatives are in memory at once


def write(
    folder: Path,
    epoch: int,
    options: UniDECOptions,
    data: Points,
    embedder: Embedder,
    params: Any,
    levels: int,
) -> dict[str, Any]:
    """Clusters and hard negatives of all rows, into a folder; returns what took how long.

    Args:
      folder: gets the arrays.
      epoch: seeds the refresh, together with the run's seed.
      options: of the run.
      data: what training reads.
      embedder: of the model.
      params: current parameters.
      levels: of the clusters that are batches; joined batching clusters deeper.
    """
    started = time.perf_counter()
    rows = data.rows
    queries = embedder.de(params, data.train_tokens, rows, side="query")
    times: dict[str, Any] = {"embed_queries": lap(started)}
    if options.batching == "joined":
        smallest = options.cluster_schedule[0][1]
        levels = batches.cluster_levels(len(rows), options.batch_size, "joined", smallest)
    if options.batching != "random":
        started = time.perf_counter()
        order, offsets = clustering.balanced_clusters(
            queries, levels, seed=options.seed + 7919 * epoch
        )
        times["cluster"] = lap(started)
    else:
        order, offsets = np.arange(len(rows)), np.array([0, len(rows)])
    np.save(folder / "order.npy", order)
    np.save(folder / "offsets.npy", offsets)
    if options.hard_negatives:
        times.update(_mine(folder, options, data, embedder, params, rows, queries))
    return times


def _mine(
    folder: Path,
    options: UniDECOptions,
    data: Points,
    embedder: Embedder,
    params: Any,
    rows: np.ndarray,
    queries: np.ndarray,
) -> dict[str, Any]:
    """Hard negatives of all rows, into ``hard_negatives.npy``."""
    started = time.perf_counter()
    labels = embedder.de(params, data.label_tokens, side="label")
    times: dict[str, Any] = {"embed_labels": lap(started)}
    started = time.perf_counter()
    kind = choose_index(options.index, len(rows), *labels.shape)
    typical = queries[:: max(1, len(queries) // 500)]
    index = indexes.Index.build(labels, kind, seed=options.seed, sample_queries=typical)
    times["index"], times["build"] = kind, lap(started)
    if kind == "ivf":
        times["nprobe"], times["recall"] = index.nprobe, round(index.recall, 4)
    started = time.perf_counter()
    shape = (data.labels.shape[0], options.eta * options.refresh_epochs)

    def blocks() -> Iterator[np.ndarray]:
        for first in range(0, shape[0], BLOCK_ROWS):
            size = min(BLOCK_ROWS, shape[0] - first)
            begin, end = np.searchsorted(rows, [first, first + size])
            part = rows[begin:end]
            block = np.full((size, shape[1]), -1, "<i4")
            block[part - first] = indexes.mine(
                queries[begin:end],
                index,
                labels=data.labels[part],
                filters=None if data.filters is None else data.filters[part],
                width=shape[1],
            )
            yield block

    write_blocks(folder / "hard_negatives.npy", blocks(), shape)
    times["search"] = lap(started)
    return times
