"""Label pools against a plain-loop twin, and the rules of the pool as properties."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix, vstack

from xmc_jax.data.batching.pools import DRAWS, Pool, build_pool, contains, row_entries

PROPERTY = settings(derandomize=True, deadline=None, max_examples=50)


def random_matrix(rng, num_rows, num_labels, most):
    """Binary CSR with 0 to ``most`` distinct labels a row."""
    rows = [
        np.sort(rng.choice(num_labels, rng.integers(0, min(most, num_labels) + 1), replace=False))
        for _ in range(num_rows)
    ]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    indices = np.concatenate(rows).astype(np.int32)
    ones = np.ones(indices.size, np.float32)
    return csr_matrix((ones, indices, indptr), shape=(num_rows, num_labels))


def make_case(seed, *, num_rows=30, num_labels=60, width=8, empty_slots=True):
    """Data and queries for one pool; hard negatives may hit own positives on purpose."""
    rng = np.random.default_rng(seed)
    labels = random_matrix(rng, num_rows, num_labels, 7)
    filters = random_matrix(rng, num_rows, num_labels, 2)
    hard = np.stack([rng.permutation(num_labels)[:width] for _ in range(num_rows)])
    hard[rng.random(hard.shape) < 0.2] = -1
    queries = rng.permutation(num_rows)[:12]
    if empty_slots:
        queries[rng.random(12) < 0.2] = -1
    return queries, labels, filters, hard.astype(np.int32)


def row_set(matrix, row):
    return set(matrix.indices[matrix.indptr[row] : matrix.indptr[row + 1]].tolist())


def plain_pool(
    rng, queries, labels, *, filters, hard_negatives, pool_size, beta, eta, fill, extra_positives,
    extra_size,
):  # fmt: skip
    """The same pool with the same draws, by loops over queries, labels and pairs."""
    num_labels = labels.shape[1]
    real = [(slot, int(row)) for slot, row in enumerate(queries) if row >= 0]
    barred = [row_set(filters, row) if filters is not None else set() for _, row in real]
    own = [row_set(labels, row) for _, row in real]

    def shuffled(pairs):
        order = rng.permutation(len(pairs))
        result = [[] for _ in queries]
        for place in order:
            owner, label = pairs[place]
            result[owner].append(label)
        return result

    pairs = [(i, y) for i in range(len(real)) for y in sorted(own[i]) if y not in barred[i]]
    positives = shuffled(pairs)
    firsts = [labels_[0] for labels_ in positives if labels_]
    surplus = [y for labels_ in positives for y in labels_[1:beta]]
    negatives = []
    if hard_negatives is not None and eta:
        draws = rng.random((len(real), hard_negatives.shape[1]))
        for i, (_, row) in enumerate(real):
            found = [
                (draw, y)
                for y, draw in zip(hard_negatives[row].tolist(), draws[i])
                if y >= 0 and y not in own[i] and y not in barred[i]
            ]
            chosen = sorted(found)[:eta]
            negatives += [pair[1] for pair in found if pair in chosen]

    def add(run, candidates, room):
        for y in candidates:
            if len(run) < room and y not in run:
                run.append(y)

    pool, extra = [], []
    for group in (np.array(firsts, int), rng.permutation(surplus), rng.permutation(negatives)):
        add(pool, [int(y) for y in group], pool_size)
    missing = pool_size - len(pool)
    if missing and fill == "positives":
        further = [y for labels_ in positives for y in labels_[beta:]]
        add(pool, [int(y) for y in rng.permutation(further)], pool_size)
    elif missing and fill == "random" and num_labels <= 4 * pool_size:
        add(pool, rng.permutation(num_labels).tolist(), pool_size)
    elif missing and fill == "random":
        add(pool, rng.integers(num_labels, size=2 * missing + 64).tolist(), pool_size)

    if extra_positives and extra_size:
        by_label = sorted((y, real[i][0]) for i, y in pairs if y not in pool)
        outside = shuffled([(slot, y) for y, slot in by_label])
        sampled = [y for labels_ in outside for y in labels_[:extra_positives]]
        add(extra, [int(y) for y in rng.permutation(sampled)], extra_size)

    ids, pad = [], num_labels
    for run, size in ((sorted(pool), pool_size), (sorted(extra), extra_size)):
        ids += run
        for _ in range(size - len(run)):
            ids.append(pad)
            pad += 1
    targets = np.zeros((len(queries), len(ids)), bool)
    where = np.zeros((len(queries), len(ids)), bool)
    for i, (slot, _) in enumerate(real):
        for column, y in enumerate(ids):
            where[slot, column] = y < num_labels and y not in barred[i]
            targets[slot, column] = where[slot, column] and y in own[i]
    kept = set(pool)
    sampled = firsts + surplus
    stats = {
        "in_batch_positives": targets[:, :pool_size].sum() / max(1, len(real)),
        "pool_fill": len(pool) / pool_size,
        "dropped_negatives": sum(y not in kept for y in negatives) / max(1, len(negatives)),
        "dropped_positives": sum(y not in kept for y in sampled) / max(1, len(sampled)),
    }
    return Pool(np.array(ids), targets, where, stats)


SETTINGS = [
    dict(pool_size=40, beta=2, eta=3, fill="none"),
    dict(pool_size=14, beta=3, eta=3, fill="none"),
    dict(pool_size=12, beta=7, eta=8, fill="positives"),
    dict(pool_size=45, beta=1, eta=0, fill="positives"),
    dict(pool_size=13, beta=1, eta=0, fill="random"),
    dict(pool_size=80, beta=2, eta=2, fill="random"),
    dict(pool_size=16, beta=1, eta=2, fill="none", extra_positives=3, extra_size=20),
    dict(pool_size=16, beta=1, eta=2, fill="positives", extra_positives=9, extra_size=5),
    dict(pool_size=16, beta=1, eta=20, fill="none", extra_positives=0, extra_size=4),
]


@pytest.mark.parametrize("options", SETTINGS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("with_filters", [True, False])
def test_equals_the_plain_twin(options, with_filters):
    options = {"extra_positives": 0, "extra_size": 0} | options
    for seed in range(15):
        queries, labels, filters, hard = make_case(seed)
        shared = dict(filters=filters if with_filters else None, hard_negatives=hard, **options)
        fast = build_pool(np.random.default_rng(seed), queries, labels, **shared)
        plain = plain_pool(np.random.default_rng(seed), queries, labels, **shared)
        np.testing.assert_array_equal(fast.ids, plain.ids)
        np.testing.assert_array_equal(fast.targets, plain.targets)
        np.testing.assert_array_equal(fast.where, plain.where)
        assert fast.stats == pytest.approx(plain.stats)


def test_random_fill_from_many_labels_equals_the_twin():
    queries, labels, filters, hard = make_case(3, num_labels=500)
    options = dict(pool_size=90, beta=1, eta=1, fill="random", extra_positives=0, extra_size=0)
    shared = dict(filters=filters, hard_negatives=hard, **options)
    fast = build_pool(np.random.default_rng(0), queries, labels, **shared)
    plain = plain_pool(np.random.default_rng(0), queries, labels, **shared)
    np.testing.assert_array_equal(fast.ids, plain.ids)
    assert fast.stats["pool_fill"] == 1.0


@PROPERTY
@given(
    seed=st.integers(0, 10**6),
    pool_size=st.integers(12, 70),
    beta=st.integers(1, 8),
    eta=st.integers(0, 8),
    fill=st.sampled_from(["positives", "random", "none"]),
    extra=st.integers(0, 15),
    filtered=st.booleans(),
)
def test_rules(seed, pool_size, beta, eta, fill, extra, filtered):
    queries, labels, filters, hard = make_case(seed)
    filters = filters if filtered else None
    options = dict(filters=filters, hard_negatives=hard, pool_size=pool_size, beta=beta, eta=eta)
    options |= dict(fill=fill, extra_positives=2, extra_size=extra)
    pool = build_pool(np.random.default_rng(seed), queries, labels, **options)
    again = build_pool(np.random.default_rng(seed), queries, labels, **options)

    # Fixed shapes and types; the same seed gives the same pool.
    assert pool.ids.shape == (pool_size + extra,) and pool.ids.dtype == np.int32
    assert pool.targets.shape == pool.where.shape == (12, pool_size + extra)
    assert pool.targets.dtype == pool.where.dtype == bool
    for one, two in zip(
        (pool.ids, pool.targets, pool.where), (again.ids, again.targets, again.where)
    ):
        np.testing.assert_array_equal(one, two)

    # No repeated id, pads count on from L, both runs ascending.
    assert np.unique(pool.ids).size == pool.ids.size
    pads = pool.ids[pool.ids >= 60]
    np.testing.assert_array_equal(pads, np.arange(60, 60 + pads.size))
    assert (np.diff(pool.ids[:pool_size]) > 0).all() and (np.diff(pool.ids[pool_size:]) > 0).all()

    first = set(pool.ids[:pool_size].tolist())
    for slot, row in enumerate(queries):
        if row < 0:
            assert not pool.where[slot].any() and not pool.targets[slot].any()
            continue
        barred = row_set(filters, row) if filtered else set()
        own = row_set(labels, row) - barred
        # Targets are exact, filter pairs and pads are not there.
        there = np.array([y < 60 and y not in barred for y in pool.ids.tolist()])
        np.testing.assert_array_equal(pool.where[slot], there)
        np.testing.assert_array_equal(pool.targets[slot], [y in own for y in pool.ids.tolist()])
        # A query keeps at least one positive, and all it samples while they fit.
        assert not own or own & first
        if pool.stats["dropped_positives"] == 0:
            assert len(own & first) >= min(beta, len(own))
    if pool.stats["dropped_positives"] > 0 or pool.stats["dropped_negatives"] > 0:
        assert pool.stats["pool_fill"] == 1.0
    # Negatives go first.
    if pool.stats["dropped_positives"] > 0:
        positives = set().union(*(row_set(labels, row) for row in queries if row >= 0))
        assert first <= positives
    if fill == "random" and pool_size <= 60:
        assert pool.stats["pool_fill"] == 1.0
    # Extra positives are positives of someone, and none of the first run.
    for y in pool.ids[pool_size:][pool.ids[pool_size:] < 60].tolist():
        assert y not in first and pool.targets[:, pool.ids.tolist().index(y)].any()


@PROPERTY
@given(seed=st.integers(0, 10**6), eta=st.integers(1, 8))
def test_no_own_positive_and_no_filter_pair_among_hard_negatives(seed, eta):
    queries, labels, filters, hard = make_case(seed, empty_slots=False)
    for query in queries:  # alone in its batch: what is in the pool is the query's
        pool = build_pool(
            np.random.default_rng(seed), queries[queries == query], labels, filters=filters,
            hard_negatives=hard, pool_size=40, beta=1, eta=eta, fill="none",
        )  # fmt: skip
        barred = row_set(filters, query)
        own = row_set(labels, query) - barred
        brought = set(pool.ids[pool.ids < 60].tolist())
        negatives = brought - own
        usable = set(hard[query].tolist()) - {-1} - row_set(labels, query) - barred
        assert len(brought & own) == min(1, len(own))
        assert negatives <= usable and len(negatives) == min(eta, len(usable))


def test_choices_are_uniform_over_queries_and_labels():
    labels = csr_matrix(np.ones((6, 6), np.float32))
    hard = np.tile(np.arange(6, 18, dtype=np.int32), (6, 1))
    labels = csr_matrix((labels.data, labels.indices, labels.indptr), shape=(6, 18))
    counts = np.zeros(18)
    for seed in range(2000):
        pool = build_pool(
            np.random.default_rng(seed), np.arange(2), labels, filters=None, hard_negatives=hard,
            pool_size=8, beta=2, eta=6,
        )  # fmt: skip
        counts[pool.ids[pool.ids < 18]] += 1
    for group in (counts[:6], counts[6:]):  # no label id is preferred: within 5 sigma
        assert np.abs(group / group.mean() - 1).max() < 0.12


def test_surplus_positives_are_dropped_at_random_over_queries():
    """Twelve queries with two positives of their own, room for sixteen: four queries keep both."""
    labels = csr_matrix((np.ones(24), np.arange(24), np.arange(0, 25, 2)), shape=(12, 24))
    kept = np.zeros(12)
    for seed in range(1500):
        pool = build_pool(
            np.random.default_rng(seed), np.arange(12), labels, filters=None, hard_negatives=None,
            pool_size=16, beta=2, eta=0,
        )  # fmt: skip
        assert pool.stats["dropped_positives"] == pytest.approx(8 / 24)
        assert pool.targets.any(axis=1).all()
        kept += pool.targets.sum(axis=1) == 2
    assert np.abs(kept / 500 - 1).max() < 0.18  # 5 sigma of a binomial of 1500 x 1/3


def test_a_positive_that_is_a_filter_pair_is_neither():
    labels = csr_matrix(np.array([[1, 1, 0], [1, 0, 0]], np.float32))
    filters = csr_matrix(np.array([[1, 0, 0], [0, 0, 0]], bool))
    pool = build_pool(
        np.random.default_rng(0), np.array([0, 1]), labels, filters=filters, hard_negatives=None,
        pool_size=4, beta=2, eta=0,
    )  # fmt: skip
    np.testing.assert_array_equal(pool.ids, [0, 1, 3, 4])
    np.testing.assert_array_equal(pool.targets, [[0, 1, 0, 0], [1, 0, 0, 0]])
    np.testing.assert_array_equal(pool.where, [[0, 1, 0, 0], [1, 1, 0, 0]])


def test_batch_of_empty_slots_and_rows_without_labels():
    labels = csr_matrix((3, 5), dtype=np.float32)
    for queries in (np.full(4, -1), np.array([0, 2, -1, -1])):
        pool = build_pool(
            np.random.default_rng(0), queries, labels, filters=csr_matrix((3, 5), dtype=bool),
            hard_negatives=np.full((3, 2), -1, np.int32), pool_size=4, beta=1, eta=2,
            fill="positives", extra_positives=1, extra_size=2,
        )  # fmt: skip
        np.testing.assert_array_equal(pool.ids, np.arange(5, 11))
        assert not pool.where.any() and not pool.targets.any()
        assert pool.stats["in_batch_positives"] == pool.stats["pool_fill"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(pool_size=11), "Set pool_size to 12 or more"),
        (dict(beta=0), "beta is 0"),
        (dict(fill="zeros"), "expected one of positives, random, none"),
        (dict(draw="even"), "expected one of target, uniform"),
        (dict(filters=csr_matrix((3, 60), dtype=bool)), "filters has 3 rows, the label matrix 30"),
        (dict(hard_negatives=np.zeros((4, 2), np.int32)), "hard_negatives has 4 rows"),
        (dict(queries=np.full(12, 30)), "query row 30 is past the end"),
    ],
)
def test_errors_say_what_to_do(change, message):
    queries, labels, _, _ = make_case(0)
    options = dict(filters=None, hard_negatives=None, pool_size=20, beta=1, eta=0)
    options |= dict(queries=queries) | change
    with pytest.raises(ValueError, match=message):
        build_pool(np.random.default_rng(0), labels=labels, **options)


def test_helpers():
    matrix = csr_matrix(np.array([[0, 1, 1], [0, 0, 0], [1, 0, 0]]))
    place, label = row_entries(matrix, np.array([2, 1, 0, 0]))
    np.testing.assert_array_equal(place, [0, 2, 2, 3, 3])
    np.testing.assert_array_equal(label, [0, 1, 2, 1, 2])
    found = contains(np.array([1, 4]), np.array([[0, 1], [4, 9]]))
    np.testing.assert_array_equal(found, [[False, True], [True, False]])
    assert not contains(np.array([], int), np.array([3])).any()


def test_speed_does_not_hang_on_a_python_loop():
    """Q = 1,098, P = 3,000, 22 Zipf labels a point; the bound is generous for busy machines."""
    rng = np.random.default_rng(0)
    num_rows, num_labels = 50_000, 40_000
    indices = (rng.random(22 * num_rows) ** 3.5 * num_labels).astype(np.int32)
    labels = csr_matrix(
        (np.ones(indices.size, np.float32), indices, 22 * np.arange(num_rows + 1)),
        shape=(num_rows, num_labels),
    )
    labels.sum_duplicates()
    hard = rng.integers(0, num_labels, (num_rows, 30)).astype(np.int32)
    filters = labels[::-1]
    seconds = []
    for _ in range(9):
        queries = rng.integers(0, num_rows, 1098)
        start = time.thread_time()
        build_pool(
            rng, queries, labels, filters=filters, hard_negatives=hard, pool_size=3000, beta=2,
            eta=5, fill="positives",
        )  # fmt: skip
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.06


def gandalf_case(seed, num_points=10, num_labels=12):
    """Points with hard labels above the texts of all labels with soft ones."""
    rng = np.random.default_rng(seed)
    points = random_matrix(rng, num_points, num_labels, 4)
    soft = rng.random((num_labels, num_labels)) * (rng.random((num_labels, num_labels)) < 0.4)
    soft[np.arange(num_labels), np.arange(num_labels)] = 1
    return vstack([points, csr_matrix(soft)], "csr", np.float32)


@PROPERTY
@given(
    seed=st.integers(0, 10**6),
    draw=st.sampled_from(DRAWS),
    beta=st.integers(1, 4),
    extra=st.sampled_from([0, 6]),
)
def test_label_texts_keep_their_own_label_and_their_soft_targets(seed, draw, beta, extra):
    labels = gandalf_case(seed)
    rng = np.random.default_rng(seed)
    queries = np.append(rng.permutation(22)[:5], -1)
    pool = build_pool(
        rng, queries, labels, filters=None, hard_negatives=None, pool_size=6, beta=beta, eta=0,
        extra_positives=2, extra_size=extra, first_text_row=10, draw=draw,
    )  # fmt: skip
    assert pool.targets.dtype == np.float32 and pool.where.dtype == bool
    padded = np.zeros((23, 12 + pool.ids.size), np.float32)
    padded[:22, :12] = labels.toarray()
    np.testing.assert_array_equal(pool.targets, padded[queries][:, pool.ids])
    for row in queries[queries >= 10]:
        assert row - 10 in pool.ids[:6]


@pytest.mark.parametrize("draw", DRAWS)
def test_positives_of_a_label_text_are_drawn_by_their_targets(draw):
    """Two of own, a, b, c: own always, a second one in proportion to 0.1, 0.3, 0.6 or evenly."""
    labels = csr_matrix(np.array([[0, 0, 0, 0], [1, 0.1, 0.3, 0.6]], np.float32))
    labels = vstack([labels, csr_matrix((3, 4), dtype=np.float32)], "csr")
    counts = np.zeros(4)
    for seed in range(3000):
        pool = build_pool(
            np.random.default_rng(seed), np.array([1]), labels, filters=None, hard_negatives=None,
            pool_size=2, beta=2, eta=0, first_text_row=1, draw=draw,
        )  # fmt: skip
        counts[pool.ids] += 1
    expected = [0.1, 0.3, 0.6] if draw == "target" else [1 / 3] * 3
    assert counts[0] == 3000
    assert np.abs(counts[1:] / 3000 - expected).max() < 5 * np.sqrt(0.25 / 3000)
