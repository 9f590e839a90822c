"""Packing: every token of every text is there once, in few rows; the ladder against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmc_jax.contracts import TokenBatch
from xmc_jax.data.batching import packing

PROPERTY = settings(derandomize=True, deadline=None, max_examples=50)


@st.composite
def batches(draw):
    row_length = draw(st.integers(1, 40))
    max_segments = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(0, row_length), max_size=60))
    return np.array(lengths, np.int32), row_length, max_segments


def make_ids(lengths: np.ndarray) -> np.ndarray:
    """Token i of the batch has id i + 1: no two alike, none 0."""
    return np.arange(1, lengths.sum() + 1).astype(np.uint16)


def read_texts(batch: TokenBatch) -> list[list[int]]:
    """Plain loop: the ids of each text in the order of their positions."""
    texts = []
    for row, segment in zip(batch.text_row, batch.text_segment):
        cells = (
            batch.segment_ids[row] == segment if segment else np.zeros_like(batch.ids[row], bool)
        )
        np.testing.assert_array_equal(batch.positions[row][cells], np.arange(cells.sum()))
        texts.append(batch.ids[row][cells].tolist())
    return texts


def expected_texts(flat_ids: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    ends = np.cumsum(lengths)
    return [flat_ids[end - size : end].tolist() for size, end in zip(lengths, ends)]


@PROPERTY
@given(batches())
def test_every_token_once_in_order_and_segments_contiguous(case):
    lengths, row_length, max_segments = case
    flat_ids = make_ids(lengths)
    batch = packing.pack(flat_ids, lengths, row_length=row_length, max_segments=max_segments)

    assert read_texts(batch) == expected_texts(flat_ids, lengths)
    assert np.count_nonzero(batch.segment_ids) == lengths.sum() == np.count_nonzero(batch.ids)
    assert not batch.positions[batch.segment_ids == 0].any()
    np.testing.assert_array_equal(batch.text_segment == 0, lengths == 0)
    for row in batch.segment_ids:  # 1 1 2 3 3 0 0: no segment is torn, none is left out.
        runs = [key for key, _ in itertools.groupby(row.tolist())]
        segments = [key for key in runs if key]
        assert segments == list(range(1, len(segments) + 1))
        assert len(segments) <= max_segments
        assert runs == segments or runs == [*segments, 0]


@PROPERTY
@given(batches())
def test_row_counts_lie_between_the_bounds(case):
    lengths, row_length, max_segments = case
    options = {"row_length": row_length, "max_segments": max_segments}
    rows = packing.count_rows(lengths, **options)
    assert packing.pack(make_ids(lengths), lengths, **options).ids.shape == (rows, row_length)
    full, texts = -(-int(lengths.sum()) // row_length), np.count_nonzero(lengths)
    assert rows >= max(1, full, -(-texts // max_segments))
    longest = max(1, int(lengths.max(initial=0)))
    assert rows <= packing.worst_rows(texts, max_length=longest, **options)
    first_fit = packing._plan(np.bincount(lengths, minlength=1), row_length, max_segments, False)
    assert rows <= max(1, sum(times for times, _ in first_fit))


@PROPERTY
@given(batches())
def test_first_plan_is_first_fit_decreasing(case):
    lengths, row_length, max_segments = case
    rows: list[list[int]] = []
    for size in sorted((int(size) for size in lengths if size), reverse=True):
        for row in rows:
            if sum(row) + size <= row_length and len(row) < max_segments:
                row.append(size)
                break
        else:
            rows.append([size])
    histogram = np.bincount(lengths, minlength=1)
    plan = packing._plan(histogram, row_length, max_segments, mixed=False)
    assert [row for times, row in plan for _ in range(times)] == rows


@PROPERTY
@given(batches(), st.integers(0, 3))
def test_more_rows_are_padding_and_one_text_a_row_holds_the_same(case, extra):
    lengths, row_length, max_segments = case
    flat_ids = make_ids(lengths)
    options = {"row_length": row_length, "max_segments": max_segments}
    batch = packing.pack(flat_ids, lengths, **options)
    num_rows = len(batch.ids) + extra
    padded = packing.pack(flat_ids, lengths, **options, num_rows=num_rows)
    again = packing.pack(flat_ids.copy(), lengths.copy(), **options, num_rows=num_rows)
    for name, short, long, same in zip(TokenBatch._fields, batch, padded, again):
        np.testing.assert_array_equal(long, same)
        np.testing.assert_array_equal(long[: len(short)], short)
        if name in ("ids", "segment_ids", "positions"):
            assert long.shape == (num_rows, row_length) and not long[len(short) :].any()
    plain = packing.one_text_a_row(flat_ids, lengths, row_length=row_length)
    assert plain.ids.shape == (len(lengths), row_length)
    assert read_texts(plain) == read_texts(batch)
    np.testing.assert_array_equal(plain.text_segment == 0, batch.text_segment == 0)
    for packed, alone in zip(batch, plain):
        assert packed.dtype == alone.dtype


def test_example_dtypes_and_layout():
    lengths = np.array([2, 0, 4, 1])
    flat_ids = np.array([70_000, 2, 3, 4, 5, 6, 7], np.uint32)
    batch = packing.pack(flat_ids, lengths, row_length=5, max_segments=2)
    np.testing.assert_array_equal(batch.ids, [[3, 4, 5, 6, 7], [70_000, 2, 0, 0, 0]])
    np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 1, 1, 2], [1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 0], [0, 1, 0, 0, 0]])
    np.testing.assert_array_equal(batch.text_row, [1, 0, 0, 0])
    np.testing.assert_array_equal(batch.text_segment, [1, 0, 1, 2])
    types = [np.dtype(kind) for kind in ("uint32", "uint8", "uint16", "int32", "uint8")]
    assert [array.dtype for array in batch] == types


@pytest.mark.parametrize("sizes", [[], [0, 0, 0]])
def test_nothing_to_pack_is_one_empty_row(sizes):
    batch = packing.pack(np.empty(0, np.uint16), np.array(sizes), row_length=8, max_segments=4)
    assert batch.ids.shape == (1, 8) and not batch.segment_ids.any()
    assert batch.text_row.shape == batch.text_segment.shape == (len(sizes),)
    assert packing.count_rows(np.array(sizes), row_length=8, max_segments=4) == 1


def title_lengths(rng: np.random.Generator, kind: str) -> np.ndarray:
    if kind == "titles":  # Mean 11, special tokens included.
        return 3 + rng.poisson(8, 4100)
    if kind == "skewed":
        return np.minimum(32, 3 + rng.geometric(1 / 8.5, 4100))
    if kind == "labels":
        return 1 + rng.poisson(1.5, 4100)
    return np.where(rng.random(4100) < 0.7, rng.integers(1, 4, 4100), rng.integers(20, 33, 4100))


@pytest.mark.parametrize("kind", ["titles", "skewed", "labels", "short and long"])
@pytest.mark.parametrize(
    ("row_length", "max_segments"), [(64, 32), (128, 32), (128, 64), (256, 64)]
)
def test_few_rows_for_batches_of_titles(kind, row_length, max_segments):
    lengths = title_lengths(np.random.default_rng(5), kind)
    rows = packing.count_rows(lengths, row_length=row_length, max_segments=max_segments)
    least = max(lengths.sum() / row_length, len(lengths) / max_segments)
    assert least / rows >= 0.97


def test_full_rows_and_longest_texts():
    lengths = np.random.default_rng(1).integers(0, 257, 2000)
    flat_ids = (np.arange(lengths.sum()) % 60_000).astype(np.uint16)
    batch = packing.pack(flat_ids, lengths, row_length=256, max_segments=255)
    assert lengths.sum() / batch.ids.size > 0.97
    order = np.lexsort((batch.text_segment, batch.text_row))
    order = order[lengths[order] > 0]
    ends = np.cumsum(lengths)
    expected = np.concatenate([flat_ids[ends[b] - lengths[b] : ends[b]] for b in order])
    np.testing.assert_array_equal(batch.ids[batch.segment_ids > 0], expected)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([3, 9], {}, "text 1 of the batch has 9 tokens"),
        ([3, -1], {}, "text 1 of the batch has -1 tokens"),
        ([8, 8], {"num_rows": 1}, "need 2 rows of 8, but num_rows=1"),
        ([3], {"max_segments": 256}, "max_segments=256"),
        ([3], {"max_segments": 0}, "max_segments=0"),
        ([3], {"row_length": 70_000}, "row_length=70000"),
    ],
)
def test_bad_input(lengths, options, message):
    lengths = np.array(lengths)
    flat_ids = np.zeros(max(0, lengths.sum()), np.uint16)
    with pytest.raises(ValueError, match=message):
        packing.pack(flat_ids, lengths, **{"row_length": 8, "max_segments": 4, **options})


def test_ids_and_lengths_that_disagree():
    with pytest.raises(ValueError, match="lengths add up to 5"):
        packing.pack(np.zeros(4, np.uint16), np.array([2, 3]), row_length=8, max_segments=4)


def test_worst_rows_is_reached_by_longest_texts():
    options = {"row_length": 128, "max_segments": 32}
    worst = packing.worst_rows(1001, max_length=32, **options)
    assert worst == 251 == packing.count_rows(np.full(1001, 32), **options)
    assert packing.worst_rows(100, max_length=1, **options) == 4
    assert packing.worst_rows(0, max_length=5, **options) == 1
    with pytest.raises(ValueError, match="max_length=129"):
        packing.worst_rows(10, max_length=129, **options)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_ladder_is_the_best_of_all(steps):
    counts, top = np.array([7, 8, 8, 9, 14, 15, 15]), 24
    sizes, mass = packing._smooth(*np.unique(counts, return_counts=True), top, 1)

    def rows(choice):
        return sum(m * next(step for step in choice if step >= n) for n, m in zip(sizes, mass))

    chosen = packing.ladder(counts, top=top, steps=steps)
    assert chosen[-1] == top and len(chosen) <= steps and sorted(set(chosen)) == list(chosen)
    below = sizes[:-1].astype(int).tolist()
    best = min(rows((*rest, top)) for rest in itertools.combinations(below, steps - 1))
    np.testing.assert_allclose(rows(chosen), best, rtol=1e-12)
    np.testing.assert_allclose(mass.sum(), 1.0)


def test_ladder_pads_little_for_batches_never_seen():
    rng = np.random.default_rng(3)
    options = {"row_length": 128, "max_segments": 32}

    def sample(num):
        return [packing.count_rows(title_lengths(rng, "skewed"), **options) for _ in range(num)]

    seen, unseen = sample(16), sample(100)
    sizes = packing.ladder(seen, top=packing.worst_rows(4100, max_length=32, **options))
    assert len(sizes) <= 4 and sizes[-1] == 1025
    padded = [packing.round_up(count, sizes) for count in unseen]
    assert all(size >= count for size, count in zip(padded, unseen))
    assert np.mean(padded) < 1.03 * np.mean(unseen)


def test_ladder_of_one_number_multiples_and_limits():
    assert packing.ladder([1], top=1) == (1,)
    sizes = packing.ladder(300, top=1000, multiple=8)
    assert sizes[-1] == 1000 and all(size % 8 == 0 for size in sizes) and 300 < sizes[-2] < 330
    assert packing.ladder([10, 40], top=41, multiple=4)[-1] == 44
    assert packing.ladder(np.arange(1, 50_000, 7), top=60_000, steps=4)[-1] == 60_000


def test_round_up():
    assert [packing.round_up(n, (4, 8, 20)) for n in (0, 4, 5, 20)] == [4, 4, 8, 20]
    with pytest.raises(ValueError, match="needs 21 rows"):
        packing.round_up(21, (4, 8, 20))


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        ([], {}, "row counts are none"),
        ([5, 12], {}, "row counts are 5 to 12, expected 1 to top=10"),
        ([0], {}, "row counts are 0 to 0"),
        ([5], {"steps": 0}, "steps=0"),
        ([5], {"multiple": 0}, "multiple=0"),
    ],
)
def test_ladder_bad_input(counts, options, message):
    with pytest.raises(ValueError, match=message):
        packing.ladder(counts, top=10, **options)
