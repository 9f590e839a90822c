"""Label pools: which labels a batch of queries is scored against, and which of them are positives.

Everything here runs on the host, once a step, over the entries of the batch's rows only: flat
arrays of (query, label) pairs, sorted and searched as 64-bit integers. Nothing depends on N or L.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix

FILLS = ("positives", "random", "none")
DRAWS = ("target", "uniform")
_Pairs = tuple[
    np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]
]
_LOW = np.int64(0xFFFFFFFF)  # the lower half of a key that holds two 32-bit numbers


@dataclass(frozen=True)
class Pool:
    """The labels of one batch and their relation to its queries.

    Attributes:
      ids: ``[P + E]`` int32. Columns ``[:P]`` are the dual encoder's: distinct labels in ascending
        order, then pads. Columns ``[P:]`` are the classifier's extra positives, disjoint from the
        first run, again ascending, then pads. Pads are ``L, L + 1, ...``, never repeated.
      targets: ``[Q, P + E]`` bool, True for every positive pair, whoever brought the label; or
        float32, the targets themselves, where they are soft.
      where: ``[Q, P + E]`` bool, False for pads, for empty query slots and for filter pairs.
      stats: ``in_batch_positives`` (mean positives a query among the first P columns),
        ``pool_fill`` (share of those columns that hold a label), ``dropped_negatives`` and
        ``dropped_positives`` (share of the sampled pairs whose label found no room).
    """

    ids: np.ndarray
    targets: np.ndarray
    where: np.ndarray
    stats: dict[str, float]


def row_entries(matrix: csr_matrix, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entries of some rows of a CSR matrix as flat pairs, in row order.

    Direct arithmetic on ``indptr``: SciPy's row slicing copies the values too and is slower.

    Args:
      matrix: ``[N, L]``.
      rows: ``[n]`` row numbers.

    Returns:
      (``place [E]``, the index into ``rows``, ascending; ``label [E]``), both int64.
    """
    place, flat = _stored_entries(matrix, rows)
    return place, matrix.indices.take(flat).astype(np.int64)


def _stored_entries(matrix: csr_matrix, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same, with places among the stored values instead of labels."""
    starts = matrix.indptr[rows].astype(np.int64)
    return _ranges(starts, matrix.indptr[rows + 1] - starts)


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The integers of several ranges, one range after the other; and the range each is from."""
    owner = np.repeat(np.arange(lengths.size), lengths)
    first = starts - np.cumsum(lengths) + lengths
    return owner, np.arange(owner.size) + first.take(owner)


def contains(sorted_keys: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """For each key, whether it stands in ``sorted_keys`` (ascending); shape of ``keys``, bool."""
    if sorted_keys.size == 0:
        return np.zeros(keys.shape, bool)
    place = np.searchsorted(sorted_keys, keys)
    np.minimum(place, sorted_keys.size - 1, out=place)
    return sorted_keys[place] == keys


def build_pool(
    rng: np.random.Generator,
    queries: np.ndarray,
    labels: csr_matrix,
    *,
    filters: csr_matrix | None,
    hard_negatives: np.ndarray | None,
    pool_size: int,
    beta: int,
    eta: int,
    fill: str = "none",
    extra_positives: int = 0,
    extra_size: int = 0,
    first_text_row: int | None = None,
    draw: str = "target",
) -> Pool:
    """Builds the label pool of a batch (preprint section 3.1, figure 2).

    ``L_B = union over i of (P^_i and H^_i)`` with ``P^_i`` at most ``beta`` sampled positives of
    query i and ``H^_i`` at most ``eta`` of its mined hard negatives; then ``P_i^B`` = all positives
    of i within ``L_B``. Where the union is larger than the pool, a query's first sampled positive
    is kept in any case, then surplus positives enter in random order over queries, then hard
    negatives in random order.

    Args:
      rng: the only source of randomness; the same state gives the same pool.
      queries: ``[Q]`` rows of ``labels``; -1 = no query in this slot.
      labels: ``[N, L]``, an entry is a positive.
      filters: ``[N, L]``, an entry is a pair that is neither positive nor negative, or None.
      hard_negatives: ``[N, W]`` label ids, -1 = none, or None. May be memory-mapped.
      pool_size: ``P``, at least ``Q``.
      beta: sampled positives a query, at least 1.
      eta: sampled hard negatives a query.
      fill: what takes the room that is left: further ``"positives"`` of the batch's queries,
        ``"random"`` labels, or ``"none"``.
      extra_positives: positives a query for the classifier alone (POS-CLF), none of them among
        the first P columns.
      extra_size: ``E``, the room for them.
      first_text_row: None, or the row of label 0's text: rows from there on are label texts with
        soft targets (Gandalf), and ``targets`` are what ``labels`` stores. A text's own label is
        its first positive in any case.
      draw: other positives of a label text are drawn without replacement in proportion to their
        ``"target"``, or ``"uniform"``.

    Returns:
      A `Pool`.

    Raises:
      ValueError: for sizes that cannot work, an unknown ``fill``, or a row number past the end.
    """
    queries = np.asarray(queries)
    _check(queries, labels, filters, hard_negatives, pool_size, beta, fill, draw)
    num_labels = labels.shape[1]
    slots = np.flatnonzero(queries >= 0)
    rows = queries[slots].astype(np.int64)
    query, label, flat, barred_query, barred_label, known = _pairs(labels, filters, rows)
    odds, target = None, np.True_
    if first_text_row is not None:
        target = labels.data[flat]
        odds = target if draw == "target" else np.ones_like(target)
        odds = np.where(label == rows[query] - first_text_row, np.inf, odds)

    entry, rank = _shuffle_within(rng, query, odds)
    firsts, surplus = label[entry[rank == 0]], label[entry[(rank > 0) & (rank < beta)]]
    negatives = _sample_negatives(rng, hard_negatives, rows, known, num_labels, eta)
    wanted = [firsts, rng.permutation(surplus), rng.permutation(negatives)]
    pool = _first_distinct(np.concatenate(wanted), pool_size)
    missing = pool_size - pool.size
    if missing and fill != "none":
        further = label[entry[rank >= beta]]
        wanted.append(_filling(rng, fill, further, num_labels, missing, pool_size))
        pool = _first_distinct(np.concatenate(wanted), pool_size)

    positives, filtered = _by_label(label), _by_label(barred_label)
    extra = _sample_extra(rng, positives, query, odds, pool, extra_positives, extra_size)
    ids = _padded(pool, pool_size, extra, extra_size, num_labels)
    targets = np.zeros((queries.size, ids.size), bool if odds is None else np.float32)
    where = np.empty(targets.shape, bool)
    where[:] = ids < num_labels  # [Q, P + E]
    where[queries < 0] = False
    marked = []  # how many positive pairs each run has
    for run in (slice(0, pool_size), slice(pool_size, ids.size)):
        marked.append(_mark(targets[:, run], ids[run], positives, slots[query], target))
        _mark(where[:, run], ids[run], filtered, slots[barred_query], np.False_)
    stats = {
        "in_batch_positives": marked[0] / max(1, rows.size),
        "pool_fill": pool.size / pool_size,
        "dropped_negatives": _share_outside(pool, negatives),
        "dropped_positives": _share_outside(pool, np.concatenate([firsts, surplus])),
    }
    return Pool(ids, targets, where, stats)


def _check(
    queries: np.ndarray,
    labels: csr_matrix,
    filters: csr_matrix | None,
    hard_negatives: np.ndarray | None,
    pool_size: int,
    beta: int,
    fill: str,
    draw: str,
) -> None:
    """Refuses what cannot work, with what to change."""
    if pool_size < max(1, queries.size):
        raise ValueError(
            f"pool_size is {pool_size} for {queries.size} queries: a pool must hold one positive of"
            f" every query. Set pool_size to {queries.size} or more, or make the batch smaller."
        )
    if beta < 1:
        raise ValueError(f"beta is {beta}; expected at least 1 sampled positive a query.")
    if fill not in FILLS:
        raise ValueError(f"fill is {fill!r}; expected one of {', '.join(FILLS)}.")
    if draw not in DRAWS:
        raise ValueError(f"draw is {draw!r}; expected one of {', '.join(DRAWS)}.")
    if queries.size and queries.max() >= labels.shape[0]:
        raise ValueError(
            f"query row {queries.max()} is past the end of a label matrix of {labels.shape[0]}"
            " rows: the batches and the matrix belong to different data."
        )
    for name, array in (("filters", filters), ("hard_negatives", hard_negatives)):
        if array is not None and array.shape[0] != labels.shape[0]:
            raise ValueError(
                f"{name} has {array.shape[0]} rows, the label matrix {labels.shape[0]}:"
                " one row a training point expected; refresh or rebuild it for this data."
            )


def _pairs(labels: csr_matrix, filters: csr_matrix | None, rows: np.ndarray) -> _Pairs:
    """Query, label and place of the positive pairs; query and label of the filtered pairs; the
    ascending keys of both.
    """
    query, flat = _stored_entries(labels, rows)
    label = labels.indices.take(flat).astype(np.int64)
    own = query * labels.shape[1] + label
    if filters is None:
        none = query[:0]
        return query, label, flat, none, none, (_ascending(labels, own), none)
    barred_query, barred_label = row_entries(filters, rows)
    barred = _ascending(filters, barred_query * labels.shape[1] + barred_label)
    ascending = _ascending(labels, own)
    if contains(ascending, barred).any():  # filtered is no positive, even where the matrix lists it
        kept = ~contains(barred, own)
        query, label, flat = query[kept], label[kept], flat[kept]
    return query, label, flat, barred_query, barred_label, (ascending, barred)


def _ascending(matrix: csr_matrix, keys: np.ndarray) -> np.ndarray:
    """Keys of entries in row order, sorted unless the matrix keeps its rows sorted."""
    return keys if matrix.has_sorted_indices else np.sort(keys)


def _shuffle_within(
    rng: np.random.Generator, query: np.ndarray, odds: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Shuffles the entries of each query: (entries in query order, their rank within the query).

    With odds the order is that of draws without replacement in proportion to them.
    """
    # Keys are (query, place in one random permutation): distinct, so that the order is the same on
    # every machine, and plain integers, which NumPy sorts several times faster than it argsorts.
    if odds is None:
        shuffled = rng.permutation(query.size)
    else:  # whoever rings first: the waiting time is exponential, its rate the odds
        waits = (rng.standard_exponential(query.size) / odds).astype(np.float32)
        ordered = waits.view(np.int32).astype(np.int64)  # floats >= 0 sort as their bits do
        shuffled = np.sort(ordered << 32 | np.arange(query.size)) & _LOW
    keys = np.sort(query.take(shuffled) << 32 | np.arange(query.size))
    counts = np.bincount(query)
    rank = np.arange(query.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return shuffled.take(keys & _LOW), rank


def _sample_negatives(
    rng: np.random.Generator,
    hard_negatives: np.ndarray | None,
    rows: np.ndarray,
    known: tuple[np.ndarray, np.ndarray],
    num_labels: int,
    eta: int,
) -> np.ndarray:
    """Labels of ``eta`` hard negatives a query, drawn from those that are not its own or barred."""
    if hard_negatives is None or eta == 0:
        return np.zeros(0, np.int64)
    mined = np.asarray(hard_negatives).take(rows, axis=0)  # [n, W]; faster than indexing
    draws = np.where(mined >= 0, rng.random(mined.shape), 2.0)  # the eta lowest of a row win
    while True:  # A mined list holds none of its own labels, so that once is mostly enough.
        usable = draws < 2.0
        if eta < mined.shape[1]:
            usable &= draws <= np.partition(draws, eta - 1, axis=1)[:, eta - 1 : eta]
        chosen = np.flatnonzero(usable)
        labels = mined.take(chosen).astype(np.int64)
        keys = chosen // mined.shape[1] * num_labels + labels
        wrong = contains(known[0], keys) | contains(known[1], keys)
        if not wrong.any():
            return labels
        draws.reshape(-1)[chosen[wrong]] = 2.0


def _sample_extra(
    rng: np.random.Generator,
    positives: np.ndarray,
    query: np.ndarray,
    odds: np.ndarray | None,
    pool: np.ndarray,
    extra_positives: int,
    extra_size: int,
) -> np.ndarray:
    """Positives outside the pool, ``extra_positives`` a query, as many as there is room for."""
    if not (extra_positives and extra_size):
        return pool[:0]
    outside = positives[~contains(pool, positives >> 32)]
    pair = outside & _LOW
    entry, rank = _shuffle_within(rng, query[pair], None if odds is None else odds[pair])
    sampled = outside[entry[rank < extra_positives]] >> 32
    return _first_distinct(rng.permutation(sampled), extra_size)


def _filling(
    rng: np.random.Generator,
    fill: str,
    further: np.ndarray,
    num_labels: int,
    missing: int,
    pool_size: int,
) -> np.ndarray:
    """Candidates, in random order, for ``missing`` free places (may repeat what the pool has)."""
    if fill == "positives":
        return rng.permutation(further)
    if num_labels <= 4 * pool_size:
        return rng.permutation(num_labels)
    # Three draws in four at least are new, so twice the need and a margin is enough.
    return rng.integers(num_labels, size=2 * missing + 64)


def _first_distinct(labels: np.ndarray, capacity: int) -> np.ndarray:
    """The first ``capacity`` distinct labels of a list of candidates, ascending."""
    keys = np.sort(labels << 32 | np.arange(labels.size))
    distinct, place = keys >> 32, keys & _LOW
    new = np.ones(keys.size, bool)
    new[1:] = distinct[1:] != distinct[:-1]
    distinct, place = distinct[new], place[new]
    if distinct.size > capacity:
        last = np.partition(place, capacity - 1)[capacity - 1]
        distinct = distinct[place <= last]
    return distinct


def _padded(
    pool: np.ndarray, pool_size: int, extra: np.ndarray, extra_size: int, num_labels: int
) -> np.ndarray:
    """Both runs with their pads, int32 ``[P + E]``; each run is ascending, pads count on."""
    pads = np.arange(num_labels, num_labels + pool_size + extra_size - pool.size - extra.size)
    gap = pool_size - pool.size
    return np.concatenate([pool, pads[:gap], extra, pads[gap:]]).astype(np.int32)


def _by_label(label: np.ndarray) -> np.ndarray:
    """Keys (label, number of the pair), ascending."""
    return np.sort(label << 32 | np.arange(label.size))


def _mark(
    matrix: np.ndarray,
    ids: np.ndarray,
    pairs: np.ndarray,
    slot: np.ndarray,
    value: np.ndarray | np.bool_,
) -> int:
    """Sets ``matrix[slot, column of label]`` to the value of each pair whose label is in ids.

    ``pairs`` ascend by label, so that those of an id lie side by side: the ids are looked up among
    the pairs, of which there are far more. Returns how many were set.
    """
    bounds = np.searchsorted(pairs, ids.astype(np.int64)[:, None] + np.arange(2) << 32)  # [P, 2]
    column, place = _ranges(bounds[:, 0], bounds[:, 1] - bounds[:, 0])
    pair = pairs[place] & _LOW
    matrix[slot[pair], column] = value[pair] if isinstance(value, np.ndarray) else value
    return pair.size


def _share_outside(pool: np.ndarray, labels: np.ndarray) -> float:
    """Share of labels (with repetition) that the pool does not hold; 0 for none."""
    return float(np.mean(~contains(pool, np.sort(labels)))) if labels.size else 0.0
