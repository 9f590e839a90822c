"""Batches of queries: a pure function of seed, epoch and the last refresh; no iterator state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

BATCHINGS = ("random", "clusters", "joined")


def epoch_queries(
    seed: int,
    epoch: int,
    rows: np.ndarray,
    batch_size: int,
    *,
    batching: str = "random",
    order: np.ndarray | None = None,
    offsets: np.ndarray | None = None,
) -> np.ndarray:
    """Rows of every batch of one epoch; every row stands in exactly one batch.

    ``random``: rows shuffled, then cut. ``clusters`` (UniDEC): one cluster is one batch, batches in
    random order. ``joined`` (NGAME): clusters shuffled, joined end to end, then cut.

    Args:
      seed: the run's seed.
      epoch: from 0.
      rows: ``[n]`` training rows that have labels.
      batch_size: ``Q``, slots of a batch; for ``clusters`` see `batch_slots`.
      batching: one of the three names above.
      order: ``[n]`` places within ``rows``, cluster after cluster, from `balanced_clusters`.
      offsets: ``[clusters + 1]`` where each cluster starts in ``order``; see also `coarsen`.

    Returns:
      ``[steps, Q]`` int32, -1 in slots that hold no query (at the end of a batch).

    Raises:
      ValueError: for an unknown name, missing or foreign clusters, or clusters larger than a batch.
    """
    rows = np.asarray(rows)
    rng = np.random.default_rng([seed, epoch])
    if batching not in BATCHINGS:
        raise ValueError(f"batching is {batching!r}; expected one of {', '.join(BATCHINGS)}.")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected at least 1.")
    if batching == "random":
        return _cut(rng.permutation(rows), batch_size)
    if order is None or offsets is None:
        raise ValueError(
            f"batching {batching!r} needs order and offsets of a refresh (balanced_clusters);"
            " use 'random' before the first refresh."
        )
    if len(order) != rows.size or offsets[-1] != rows.size:
        raise ValueError(
            f"the clusters hold {len(order)} rows (offsets end at {offsets[-1]}), the epoch has"
            f" {rows.size}: they belong to other data. Delete the refresh and let it be made again."
        )
    clustered = rows[order]
    starts, sizes = np.asarray(offsets[:-1]), np.diff(offsets)
    shuffled = rng.permutation(starts.size)
    if batching == "joined":
        starts, sizes = starts[shuffled], sizes[shuffled]
        ends = np.cumsum(sizes)
        return _cut(
            clustered[np.arange(rows.size) + np.repeat(starts - ends + sizes, sizes)], batch_size
        )
    if sizes.size and sizes.max() > batch_size:
        raise ValueError(
            f"a cluster holds {sizes.max()} rows, a batch {batch_size}: with batching 'clusters'"
            " one cluster is one batch. Take batch_size = batch_slots(n, levels), or more levels."
        )
    column = np.arange(batch_size)
    place = np.minimum(starts[:, None] + column, max(0, rows.size - 1))  # [clusters, Q]
    batches = np.where(column < sizes[:, None], clustered[place], -1)
    return batches[shuffled].astype(np.int32)


def _cut(rows: np.ndarray, batch_size: int) -> np.ndarray:
    """Cuts rows into batches; the last one is filled up with -1."""
    batches = np.full(-(-rows.size // batch_size) * batch_size, -1, np.int32)
    batches[: rows.size] = rows
    return batches.reshape(-1, batch_size)


def cluster_levels(
    num_rows: int, batch_size: int, batching: str = "clusters", cluster_size: int = 1
) -> int:
    """Number of halvings k for which ``num_rows / 2^k`` is nearest (in ratio) to the wanted size.

    The wanted size is ``batch_size`` for ``clusters`` (294,805 rows and 576 wanted: k = 9) and
    ``cluster_size`` for ``joined``; ``random`` needs no clusters: 0. No cluster is left empty.
    """
    wanted = {"random": num_rows, "clusters": batch_size, "joined": cluster_size}.get(batching)
    if wanted is None:
        raise ValueError(f"batching is {batching!r}; expected one of {', '.join(BATCHINGS)}.")
    if wanted < 1:
        raise ValueError(f"the wanted cluster size is {wanted}; expected at least 1.")
    if num_rows <= wanted:
        return 0
    return min(round(math.log2(num_rows / wanted)), int(num_rows).bit_length() - 1)


def batch_slots(num_rows: int, levels: int) -> int:
    """Slots of a batch that is one of ``2^levels`` balanced clusters: their size, rounded up."""
    return -(-num_rows // 2**levels)


def coarsen(offsets: np.ndarray, levels: int) -> np.ndarray:
    """Offsets of the ``2^levels`` larger clusters that smaller ones of the same refresh form.

    `balanced_clusters` halves level by level, so every ``2^j`` neighbours are one cluster of the
    level above: one refresh serves all cluster sizes of a growing schedule.
    """
    finest = (len(offsets) - 1).bit_length() - 1
    if not 0 <= levels <= finest:
        raise ValueError(f"levels is {levels}; expected 0 to {finest}, the refresh's own.")
    return offsets[:: 2 ** (finest - levels)]


def cluster_size(epoch: int, schedule: Sequence[tuple[int, int]]) -> int:
    """Cluster size of an epoch (NGAME): it grows, so that in-batch negatives harden slowly.

    Args:
      epoch: from 0.
      schedule: pairs (first epoch, size), e.g. ``((0, 1), (10, 2), (20, 4))``; the epochs ascend,
        the first is 0 and the sizes do not fall. Size 1 is random batching.
    """
    epochs, sizes = [e for e, _ in schedule], [s for _, s in schedule]
    if not epochs or epochs[0] != 0 or epochs != sorted(set(epochs)) or sizes != sorted(sizes):
        raise ValueError(
            f"cluster schedule is {tuple(schedule)}; expected pairs (first epoch, size) that start"
            " at epoch 0, with ascending epochs and sizes that do not fall."
        )
    if sizes[0] < 1:
        raise ValueError(f"cluster schedule has size {sizes[0]}; expected at least 1.")
    return next(s for e, s in reversed(list(zip(epochs, sizes))) if e <= epoch)
