"""Packs short texts into rows of fixed length, and chooses the few row counts a run compiles."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from xmc_jax.contracts import TokenBatch

_Plan = list[tuple[int, list[int]]]  # (how many rows, lengths of the texts in each of them)


def pack(
    flat_ids: np.ndarray,
    lengths: np.ndarray,
    *,
    row_length: int,
    max_segments: int,
    num_rows: int | Sequence[int] | None = None,
) -> TokenBatch:
    """Packs texts into rows, several a row, with as few rows as two greedy plans find.

    The plans are first-fit decreasing and, for when ``max_segments`` would leave rows of many short
    texts half empty, one that mixes long and short texts. Both work on the histogram of lengths, so
    time hardly depends on the number of texts. Texts of equal length are placed in batch order: the
    same input gives the same rows.

    Args:
      flat_ids: ``[sum(lengths)]`` token ids, text after text, as from ``TokenStore.gather``;
        further axes are carried along.
      lengths: ``[B]`` tokens of each text; 0 = an empty slot.
      row_length: tokens a row.
      max_segments: most texts a row, at most 255.
      num_rows: rows to return, the last ones empty; or rising sizes (a ``ladder``), of which the
        smallest that suffices is taken; by default as many as needed, at least one.

    Returns:
      A ``TokenBatch`` of NumPy arrays: ids in the dtype given, segment ids uint8, positions uint16,
      text_row int32, text_segment uint8. Padding is 0 everywhere; an empty slot has row 0,
      segment 0.

    Raises:
      ValueError: a length below 0 or above ``row_length``, lengths that do not add up to the ids,
        ``max_segments`` or ``row_length`` out of range, or texts that need more than ``num_rows``.
    """
    lengths = _check(lengths, row_length, max_segments)
    plan = _best_plan(lengths, row_length, max_segments)
    needed = _num_rows(plan)
    if num_rows is None:
        num_rows = needed
    elif isinstance(num_rows, Sequence):
        num_rows = round_up(needed, num_rows)
    elif needed > num_rows:
        raise ValueError(
            f"{len(lengths)} texts of {lengths.sum()} tokens need {needed} rows of {row_length}, "
            f"but num_rows={num_rows}: give a larger one, or a ladder of sizes"
        )
    order, text_row, text_segment = _place(lengths, plan)
    return _fill(flat_ids, lengths, order, text_row, text_segment, (num_rows, row_length))


def unpack(tokens: TokenBatch, values: np.ndarray) -> np.ndarray:
    """The inverse of ``pack`` for what a model makes of each token.

    Args:
      tokens: the batch, NumPy arrays.
      values: ``[R, T, ...]``.

    Returns:
      ``[sum(lengths), ...]``, text after text.
    """
    text_of = np.zeros((len(tokens.ids), 256), np.int64)  # of each row and segment
    texts = np.flatnonzero(tokens.text_segment)
    text_of[tokens.text_row[texts], tokens.text_segment[texts]] = texts
    row, column = np.nonzero(tokens.segment_ids)
    # The tokens of a text lie side by side, in order.
    order = np.argsort(text_of[row, tokens.segment_ids[row, column]], kind="stable")
    return values[row[order], column[order]]


def one_text_a_row(flat_ids: np.ndarray, lengths: np.ndarray, *, row_length: int) -> TokenBatch:
    """The plain twin of ``pack``: text ``b`` alone in row ``b``, for comparisons.

    Args:
      flat_ids: ``[sum(lengths)]`` token ids.
      lengths: ``[B]`` tokens of each text; 0 = an empty slot (a row of padding).
      row_length: tokens a row.

    Returns:
      A ``TokenBatch`` of ``B`` rows, dtypes as in ``pack``.

    Raises:
      ValueError: as ``pack``.
    """
    lengths = _check(lengths, row_length, 1)
    text_row = np.arange(len(lengths), dtype=np.int32)
    text_segment = (lengths > 0).astype(np.uint8)
    order, shape = np.flatnonzero(lengths), (len(lengths), row_length)
    return _fill(flat_ids, lengths, order, text_row, text_segment, shape)


def count_rows(lengths: np.ndarray, *, row_length: int, max_segments: int) -> int:
    """Rows that ``pack`` needs for texts of these lengths, at least one.

    Raises:
      ValueError: as ``pack``.
    """
    lengths = _check(lengths, row_length, max_segments)
    return _num_rows(_best_plan(lengths, row_length, max_segments))


def used_rows(tokens: TokenBatch) -> int:
    """Rows that hold the texts of a packed batch (NumPy arrays), at least one."""
    return int(tokens.text_row.max(initial=0)) + 1


def worst_rows(num_texts: int, *, max_length: int, row_length: int, max_segments: int) -> int:
    """Rows that no batch of ``num_texts`` texts of at most ``max_length`` tokens goes beyond.

    A plan closes a row when no text left over fits, so each row but the last holds
    ``min(max_segments, row_length // max_length)`` texts or more.

    Raises:
      ValueError: ``max_length`` above ``row_length`` or below 1.
    """
    if not 1 <= max_length <= row_length:
        raise ValueError(f"max_length={max_length}: expected 1 to row_length={row_length}")
    return max(1, math.ceil(num_texts / min(max_segments, row_length // max_length)))


def ladder(
    row_counts: np.ndarray | Sequence[int] | int, *, top: int, steps: int = 4, multiple: int = 1
) -> tuple[int, ...]:
    """The few row counts to compile for, chosen for the least expected padding.

    Minimises ``sum_n p(n) * (smallest step >= n)`` exactly, by dynamic programming, where ``p`` is
    the sample of row counts smoothed by a Gaussian kernel (Silverman's width, at least 1 % of the
    mean): the batch a little larger than all sampled ones should not fall to the top.

    Args:
      row_counts: ``count_rows`` of some batches of the run, or one expected number.
      top: rows that always suffice, see ``worst_rows``; the last step.
      steps: most sizes to return, at least 1.
      multiple: every size is a multiple of this (devices along the data axis).

    Returns:
      Sizes in rising order; the last is ``top`` rounded up to ``multiple``.

    Raises:
      ValueError: no counts, a count outside of 1 to ``top``, ``steps`` or ``multiple`` below 1.
    """
    counts, times = np.unique(np.atleast_1d(np.asarray(row_counts)), return_counts=True)
    if steps < 1 or multiple < 1:
        raise ValueError(f"steps={steps}, multiple={multiple}: expected at least 1")
    if not counts.size or counts[0] < 1 or counts[-1] > top:
        given = f"{counts[0]} to {counts[-1]}" if counts.size else "none"
        raise ValueError(f"row counts are {given}, expected 1 to top={top}")
    sizes, mass = _smooth(counts, times, top, multiple)
    covered = np.cumsum(mass)  # [K]
    # cost[i, j]: rows computed for batches above sizes[i] and up to sizes[j], which is a step.
    cost = sizes[None, :] * (covered[None, :] - covered[:, None])
    cost[np.tril_indices(len(sizes))] = np.inf
    best, before = [sizes * covered], [np.full(len(sizes), -1)]
    for _ in range(min(steps, len(sizes)) - 1):
        total = best[-1][:, None] + cost
        before.append(np.argmin(total, axis=0))
        best.append(np.min(total, axis=0))
    used = int(np.argmin([values[-1] for values in best]))
    chosen, at = [], len(sizes) - 1
    for previous in reversed(before[: used + 1]):
        chosen.append(int(sizes[at]))
        at = previous[at]
    return tuple(reversed(chosen))


def round_up(num_rows: int, sizes: Sequence[int]) -> int:
    """The smallest of the ladder's ``sizes`` that is not below ``num_rows``.

    Raises:
      ValueError: ``num_rows`` is above the last size.
    """
    place = bisect_left(sizes, num_rows)
    if place == len(sizes):
        raise ValueError(
            f"a batch needs {num_rows} rows, the ladder {tuple(sizes)} ends below: make it with "
            "top=worst_rows(...) for the largest batch of the run"
        )
    return sizes[place]


def _check(lengths: np.ndarray, row_length: int, max_segments: int) -> np.ndarray:
    if not 1 <= max_segments <= 255:
        raise ValueError(f"max_segments={max_segments}: expected 1 to 255")
    if not 1 <= row_length <= 65535:
        raise ValueError(f"row_length={row_length}: expected 1 to 65535")
    lengths = np.asarray(lengths, np.int64).ravel()
    bad = np.flatnonzero((lengths < 0) | (lengths > row_length))
    if bad.size:
        raise ValueError(
            f"text {bad[0]} of the batch has {lengths[bad[0]]} tokens: expected 0 to "
            f"row_length={row_length}; tokenise with a smaller max_length or take longer rows"
        )
    return lengths


def _best_plan(lengths: np.ndarray, row_length: int, max_segments: int) -> _Plan:
    histogram = np.bincount(lengths, minlength=1)
    first_fit = _plan(histogram, row_length, max_segments, mixed=False)
    texts, tokens = int(np.count_nonzero(lengths)), int(lengths.sum())
    fewest = max(-(-tokens // row_length), -(-texts // max_segments))
    # Where no row has all the texts it may have, the other plan has nothing to mend.
    most = max((len(row) for _, row in first_fit), default=0)
    if most < max_segments or _num_rows(first_fit) <= 1.005 * fewest:
        return first_fit
    mixed = _plan(histogram, row_length, max_segments, mixed=True)
    return min(first_fit, mixed, key=_num_rows)


def _num_rows(plan: _Plan) -> int:
    return max(1, sum(times for times, _ in plan))


def _plan(histogram: np.ndarray, row_length: int, max_segments: int, mixed: bool) -> _Plan:
    """Fills a row, repeats it while the lengths last, and so on: as many rows, far fewer steps."""
    sizes = [int(size) for size in np.flatnonzero(histogram) if size]
    left = {size: int(histogram[size]) for size in sizes}
    texts, tokens = sum(left.values()), sum(size * count for size, count in left.items())
    plan = []
    while sizes:
        wanted = max(1, min(max_segments, round(texts * row_length / tokens))) if mixed else 1
        taken = _fill_row(sizes, left, row_length, max_segments, wanted)
        times = min(left[size] // count for size, count in taken.items())
        row = [size for size, count in taken.items() for _ in range(count)]
        for size, count in taken.items():
            left[size] -= count * times
            if not left[size]:
                sizes.remove(size)
        texts -= times * len(row)
        tokens -= times * sum(row)
        plan.append((times, row))
    return plan


def _fill_row(
    sizes: list[int], left: dict[int, int], room: int, max_segments: int, wanted: int
) -> dict[int, int]:
    """How many texts of each length go into the next row, the longest text first.

    After that a text has at most ``room`` / (texts still wanted) tokens, or, if there is none, as
    few as possible; the last one wanted, and further ones, are the longest that fit. ``wanted=1``
    is first-fit decreasing. The row ends when it is full or nothing left over fits.
    """
    taken = {sizes[-1]: 1}
    room -= sizes[-1]
    number = 1
    while number < max_segments:
        place = _next_size(sizes, left, taken, room, room // max(1, wanted - number))
        if place is None:
            break
        size, count = sizes[place], 1
        if wanted - number <= 1:  # As many as fit: the next choice would be the same.
            count = min(left[size] - taken.get(size, 0), room // size, max_segments - number)
        taken[size] = taken.get(size, 0) + count
        room -= size * count
        number += count
    return taken


def _next_size(
    sizes: list[int], left: dict[int, int], taken: dict[int, int], room: int, share: int
) -> int | None:
    """Place of the largest size up to ``share`` that is left, else of the smallest that fits."""
    middle = bisect_right(sizes, share)
    for place in range(middle - 1, -1, -1):
        if taken.get(sizes[place], 0) < left[sizes[place]]:
            return place
    for place in range(middle, bisect_right(sizes, room)):
        if taken.get(sizes[place], 0) < left[sizes[place]]:
            return place
    return None


def _place(lengths: np.ndarray, plan: _Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The texts in the order of rows, without empty ones; row and segment of each text ``[B]``."""
    text_row = np.zeros(len(lengths), np.int32)
    text_segment = np.zeros(len(lengths), np.uint8)
    if not plan:
        return np.empty(0, np.int64), text_row, text_segment
    times, rows = zip(*plan)
    widths = np.array([len(row) for row in rows])
    kinds = np.repeat(np.arange(len(rows)), times)  # [R] which of the plan's rows
    # One slot for each text, row after row.
    slot_row = np.repeat(np.arange(len(kinds)), widths[kinds])
    first_slots = np.cumsum(widths[kinds]) - widths[kinds]
    number = np.arange(len(slot_row)) - first_slots[slot_row]  # [slots] from 0 in each row
    slot_size = np.concatenate(rows)[(np.cumsum(widths) - widths)[kinds][slot_row] + number]
    # The i-th slot of a size is for the i-th text of that length; uint16 sorts by radix.
    slots = np.argsort(slot_size.astype(np.uint16), kind="stable")
    texts = np.argsort(lengths.astype(np.uint16), kind="stable")[-len(slots) :]
    text_row[texts] = slot_row[slots]
    text_segment[texts] = number[slots] + 1
    order = np.empty(len(slots), np.int64)
    order[slots] = texts
    return order, text_row, text_segment


def _fill(
    flat_ids: np.ndarray,
    lengths: np.ndarray,
    order: np.ndarray,
    text_row: np.ndarray,
    text_segment: np.ndarray,
    shape: tuple[int, int],
) -> TokenBatch:
    """Writes the texts, in the order of rows, into the cells that are not padding."""
    flat_ids = np.asarray(flat_ids)
    if flat_ids.shape[:1] != (lengths.sum(),):
        raise ValueError(f"lengths add up to {lengths.sum()}, flat_ids has shape {flat_ids.shape}")
    used = np.bincount(text_row, weights=lengths, minlength=shape[0])  # [R] tokens
    cells = np.arange(shape[1], dtype=np.float64) < used[:, None]  # [R, T]
    sizes = lengths[order]
    starts = np.cumsum(sizes) - sizes
    sources = np.repeat((np.cumsum(lengths) - lengths)[order] - starts, sizes)
    sources += np.arange(len(sources))
    # Differences are right modulo 2^16, and smaller types are faster.
    positions = np.arange(len(sources)).astype(np.uint16)
    positions -= np.repeat(starts.astype(np.uint16), sizes)
    batch = TokenBatch(
        np.zeros((*shape, *flat_ids.shape[1:]), flat_ids.dtype),
        np.zeros(shape, np.uint8),
        np.zeros(shape, np.uint16),
        text_row,
        text_segment,
    )
    batch.ids[cells] = flat_ids.take(sources, axis=0)
    batch.segment_ids[cells] = np.repeat(text_segment[order], sizes)
    batch.positions[cells] = positions
    return batch


def _smooth(
    counts: np.ndarray, times: np.ndarray, top: int, multiple: int
) -> tuple[np.ndarray, np.ndarray]:
    """Candidate sizes ``[K]`` up to the top, and the share of batches that each is next above."""
    mean = np.average(counts, weights=times)
    std = math.sqrt(np.average((counts - mean) ** 2, weights=times))
    width = max(1.0, 0.01 * mean, 1.06 * std * times.sum() ** -0.2)
    low, high = max(1, int(counts[0] - 4 * width)), min(top, math.ceil(counts[-1] + 4 * width))
    support = np.unique(np.linspace(low, high, 1000).round().astype(np.int64))
    density = np.exp(-0.5 * ((support[:, None] - counts[None, :]) / width) ** 2) @ times
    rounded = -(-np.append(support, top) // multiple) * multiple
    sizes, where = np.unique(rounded, return_inverse=True)
    mass = np.bincount(where, weights=np.append(density / density.sum(), 0.0))
    return sizes.astype(np.float64), mass
