"""Search against plain NumPy and FAISS, ties, repeated labels, and mining of hard negatives."""

from __future__ import annotations

import faiss
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix, random_array

from xmc_jax.data.search import exact_search as blocks
from xmc_jax.data.search import index as indexes
from xmc_jax.data.search.exact_search import exact_search, exact_search_jax
from xmc_jax.data.search.index import Index, choose, mine

SEARCHES = [exact_search, exact_search_jax]


def plain_search(queries, labels, k):
    """All scores in float64, sorted by (-score, id)."""
    scores = queries.astype(np.float64) @ labels.astype(np.float64).T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, order, axis=1)
    lacking = ((0, 0), (0, max(0, k - len(labels))))
    return (
        np.pad(best, lacking, constant_values=-np.inf).astype(np.float32),
        np.pad(order, lacking, constant_values=-1),
    )


def whole_numbers(rng, rows, dim, top=2):
    """Vectors whose products are exact in float32, so that equal scores are really equal."""
    return rng.integers(-top, top + 1, (rows, dim)).astype(np.float32)


def near(rng, centres, rows, spread=0.6):
    """Unit rows around some of the centres."""
    x = centres[rng.integers(0, len(centres), rows)]
    x = x + spread * np.sqrt((centres**2).mean()) * rng.standard_normal(x.shape)
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def grouped(rng, rows, dim):
    """Unit rows in forty groups."""
    return near(rng, rng.standard_normal((40, dim)), rows)


def assert_same(found, wanted, atol=0.0):
    np.testing.assert_array_equal(found[1], wanted[1])
    np.testing.assert_allclose(found[0], wanted[0], atol=atol, rtol=0)
    assert found[0].dtype == np.float32 and found[1].dtype == np.int32


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("k", [1, 7, 50, 90])
def test_exact_equals_plain_with_many_ties(search, k):
    rng = np.random.default_rng(k)
    queries, labels = whole_numbers(rng, 33, 3), whole_numbers(rng, 70, 3)
    queries[5] = 0  # every label ties
    assert_same(search(queries, labels, k), plain_search(queries, labels, k))


def test_exact_in_small_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    queries, labels = whole_numbers(rng, 29, 4), whole_numbers(rng, 403, 4, top=1)
    monkeypatch.setattr(blocks, "_TILE", 70)
    monkeypatch.setattr(blocks, "_LABELS", 10)
    monkeypatch.setattr(blocks, "_QUERIES", 8)
    for k in (1, 3, 40, 500):
        wanted = plain_search(queries, labels, k)
        assert_same(exact_search(queries, labels, k), wanted)
    for k, block in ((3, 1), (20, 16), (3, 1000), (500, 31)):
        wanted = plain_search(queries, labels, k)
        assert_same(exact_search_jax(queries, labels, k, block), wanted)


def test_few_numbers_of_queries_are_compiled_for():
    labels = np.eye(37, dtype=np.float32)
    before = blocks._search_block._cache_size()
    for number in range(1, 38):
        ids = exact_search_jax(labels[:number], labels, 2)[1]
        assert ids[:, 0].tolist() == list(range(number))
    assert blocks._search_block._cache_size() - before == 7  # 1, 2, 4, ... 64


@pytest.mark.parametrize("search", SEARCHES)
def test_exact_equals_faiss(search):
    rng = np.random.default_rng(1)
    queries, labels = grouped(rng, 600, 24), grouped(rng, 20_000, 24)
    flat = faiss.IndexFlatIP(24)
    flat.add(labels)
    scores, ids = flat.search(queries, 20)
    found = search(queries, labels, 20)
    np.testing.assert_allclose(found[0], scores, atol=1e-6)
    assert (found[1] == ids).mean() > 0.999  # the rest are neighbours within rounding
    again = search(queries, labels, 20)
    np.testing.assert_array_equal(found[0], again[0])
    np.testing.assert_array_equal(found[1], again[1])


@pytest.mark.parametrize("search", SEARCHES)
def test_exact_of_nothing(search):
    scores, ids = search(np.zeros((0, 3), np.float32), np.ones((5, 3), np.float32), 2)
    assert scores.shape == ids.shape == (0, 2)


@pytest.mark.parametrize("kind", ["exact", "hnsw", "ivf"])
@pytest.mark.parametrize("accelerator", [False, True])
def test_repeated_labels_come_in_order_of_id(kind, accelerator, monkeypatch):
    """Labels of one text have one vector; BLAS rounds it differently from place to place."""
    monkeypatch.setattr(indexes, "_EXPANDED", 16)  # in four blocks
    rng = np.random.default_rng(2)
    distinct = grouped(rng, 900, 100)
    labels = distinct[rng.integers(0, 900, 2500)]
    queries = grouped(rng, 50, 100)
    found = Index.build(labels, kind, seed=0, accelerator=accelerator).search(queries, 40)
    for scores, ids in zip(*found):
        assert (np.diff(scores) <= 0).all() and np.unique(ids).size == 40
        equal = np.diff(scores) == 0
        assert equal.any() and (np.diff(ids)[equal] > 0).all()
        # All labels of a text stand together, unless the list ends.
        for text in ids[scores > scores[-1]]:
            same = np.flatnonzero((labels == labels[text]).all(axis=1))
            assert np.isin(same, ids).all()
    if kind == "exact":
        np.testing.assert_allclose(found[0], plain_search(queries, labels, 40)[0], atol=1e-6)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    num_labels=st.integers(1, 60),
    k=st.integers(1, 70),
    dim=st.integers(1, 3),
)
def test_repeated_labels_with_ties_between_texts(seed, num_labels, k, dim):
    rng = np.random.default_rng(seed)
    queries, labels = whole_numbers(rng, 9, dim), whole_numbers(rng, num_labels, dim, top=1)
    index = Index.build(labels, "exact", seed=0, accelerator=False)
    assert_same(index.search(queries, k), plain_search(queries, labels, k))


@pytest.mark.parametrize("kind", ["exact", "hnsw", "ivf"])
def test_all_labels_equal(kind):
    index = Index.build(np.ones((50, 4), np.float32), kind, seed=0)
    scores, ids = index.search(np.ones((2, 4), np.float32), 60)
    np.testing.assert_array_equal(ids[1], [*range(50), *[-1] * 10])
    assert (scores[:, :50] == 4).all() and np.isneginf(scores[:, 50:]).all()


@pytest.mark.parametrize("kind", ["exact", "hnsw", "ivf"])
def test_more_results_than_labels(kind):
    labels = grouped(np.random.default_rng(0), 5, 4)
    scores, ids = Index.build(labels, kind, seed=0).search(labels, 8)
    np.testing.assert_array_equal(ids[:, 0], np.arange(5))
    assert (ids[:, 5:] == -1).all() and np.isneginf(scores[:, 5:]).all()
    np.testing.assert_array_equal(np.sort(ids[:, :5], axis=1), np.tile(np.arange(5), (5, 1)))


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_recall_of_approximate_search(kind):
    rng = np.random.default_rng(3)
    centres = grouped(rng, 300, 24)
    labels, queries = near(rng, centres, 6000), near(rng, centres, 300)
    index = Index.build(labels, kind, seed=0, sample_queries=queries[:200])
    for k in (5, 20):
        truth = plain_search(queries, labels, k)[1]
        found = index.search(queries, k)[1]
        hits = [np.isin(a, b).mean() for a, b in zip(truth, found)]
        assert np.mean(hits) >= 0.94
    assert (index.nprobe > 0) == (kind == "ivf") == (index.recall >= 0.95)


def test_ivf_is_deterministic_and_stays_small():
    rng = np.random.default_rng(4)
    centres = grouped(rng, 300, 16)
    labels, queries = near(rng, centres, 10_000), near(rng, centres, 100)
    one, two = (Index.build(labels, "ivf", seed=7) for _ in range(2))
    assert one.nprobe == two.nprobe <= 32  # of 256 lists
    assert_same(one.search(queries, 30), two.search(queries, 30))


def test_faiss_gpu_is_used_where_installed(monkeypatch):
    """The call that faiss-gpu would get, answered by FAISS on the host."""
    calls = []

    def knn_gpu(resources, queries, vectors, k, metric):
        calls.append(k)
        return faiss.knn(queries, vectors, k, metric=metric)

    monkeypatch.setattr(faiss, "StandardGpuResources", lambda: None, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    monkeypatch.setattr(faiss, "knn_gpu", knn_gpu)
    rng = np.random.default_rng(5)
    queries, labels = grouped(rng, 20, 8), grouped(rng, 3000, 8)
    index = Index.build(labels, "exact", seed=0, accelerator=True)
    for k in (10, 2500):
        found, wanted = index.search(queries, k), plain_search(queries, labels, k)
        np.testing.assert_allclose(found[0], wanted[0], atol=1e-6)
        assert (found[1] == wanted[1]).mean() > 0.999
    assert calls == [26]


def plain_mine(queries, labels_matrix, own, barred, width):
    order = plain_search(queries, labels_matrix, len(labels_matrix))[1]
    result = np.full((len(queries), width), -1)
    for row, ids in enumerate(order):
        wrong = set(own[[row]].indices) | (
            set(barred[[row]].indices) if barred is not None else set()
        )
        kept = [y for y in ids if y not in wrong][:width]
        result[row, : len(kept)] = kept
    return result


def mining_case(seed, num_queries=60, num_labels=150):
    rng = np.random.default_rng(seed)
    queries, vectors = whole_numbers(rng, num_queries, 5), whole_numbers(rng, num_labels, 5)
    own = random_array((num_queries, num_labels), density=0.05, rng=rng).tolil()
    own[3, :] = 1  # every label is its own
    own[4, : num_labels - 7] = 1
    barred = random_array((num_queries, num_labels), density=0.01, rng=rng)
    return queries, vectors, csr_matrix(own), csr_matrix(barred)


@pytest.mark.parametrize("with_filters", [True, False])
@pytest.mark.parametrize("accelerator", [False, True])
def test_mining_equals_plain(with_filters, accelerator):
    queries, vectors, own, barred = mining_case(0)
    barred = barred if with_filters else None
    index = Index.build(vectors, "exact", seed=0, accelerator=accelerator)
    for width, block in ((10, 7), (200, 1000)):
        found = mine(queries, index, labels=own, filters=barred, width=width, block=block)
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, plain_mine(queries, vectors, own, barred, width))


def test_own_positives_never_use_up_the_list():
    """Query 0 has 90 positives, nearer than everything else, and still gets ten negatives."""
    angles = np.linspace(0, 1, 150)
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    own = csr_matrix((np.ones(90), np.arange(90), [0, 90]), shape=(1, 150))
    index = Index.build(vectors, "exact", seed=0)
    found = mine(vectors[:1], index, labels=own, filters=None, width=10)
    np.testing.assert_array_equal(found[0], np.arange(90, 100))


def test_mining_writes_into_a_memory_map(tmp_path):
    queries, vectors, own, barred = mining_case(1)
    index = Index.build(vectors, "exact", seed=0)
    np.save(tmp_path / "queries.npy", queries)
    mapped = np.load(tmp_path / "queries.npy", mmap_mode="r")
    out = np.lib.format.open_memmap(tmp_path / "out.npy", "w+", np.int32, (len(queries), 6))
    done = []
    options = dict(labels=own, filters=barred, width=6)
    assert mine(mapped, index, block=32, out=out, progress=done.append, **options) is out
    out.flush()
    assert sum(done) == len(queries) and len(done) > 3
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), mine(queries, index, **options))


def test_choose():
    # 2 N L d: 294,805 x 131,073 x 384 = 3.0e13 and 2,248,619 x 1,305,265 x 256 = 1.5e15.
    small, large = (294_805, 131_073, 384), (2_248_619, 1_305_265, 256)
    assert choose(*small)[0] == "exact" and choose(*large)[0] == "ivf"
    assert choose(*large, accelerator=True)[0] == "exact"
    one, two = (choose(*small, num_threads=n)[1] for n in (1, 2))
    assert one == pytest.approx(2 * two) and 100 < two < 3000
    exact_seconds = 2.0 * large[0] * large[1] * large[2] / 5e10
    assert choose(*large, num_threads=2)[1] < exact_seconds / 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda v: Index.build(v, "auto", seed=0), "expected one of exact, hnsw, ivf"),
        (lambda v: Index.build(v[:0], "exact", seed=0), r"expected \[L, d\] with L >= 1"),
        (lambda v: Index.build(v * np.nan, "exact", seed=0), "training diverged"),
        (lambda v: Index.build(v, "exact", seed=0).search(v, 0), "k of at least 1"),
        (lambda v: Index.build(v, "exact", seed=0).search(v[:, :2], 1), r"expected \[n, 4\]"),
        (
            lambda v: mine(
                v[:3], Index.build(v, "exact", seed=0), labels=csr_matrix((2, 9)), filters=None,
                width=2,
            ),
            "labels has 2 rows for 3 query vectors",
        ),
        (
            lambda v: mine(
                v[:3], Index.build(v, "exact", seed=0), labels=csr_matrix((3, 9)), filters=None,
                width=2, out=np.zeros((3, 2)),
            ),
            "expected int32",
        ),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(call, message):
    vectors = whole_numbers(np.random.default_rng(0), 9, 4)
    with pytest.raises(ValueError, match=message):
        call(vectors)


def test_host_search_without_a_cpu_backend_of_jax(monkeypatch):
    def none(backend):
        raise RuntimeError(backend)

    monkeypatch.setattr(jax, "local_devices", none)
    rng = np.random.default_rng(0)
    queries, labels = whole_numbers(rng, 9, 3), whole_numbers(rng, 70, 3)
    assert_same(exact_search(queries, labels, 7), plain_search(queries, labels, 7))


def test_one_compilation_serves_blocks_of_any_length():
    labels = grouped(np.random.default_rng(0), 64, 4)
    held = jax.device_put(labels)
    exact_search_jax(labels[:8], held, 3)
    before = blocks._search_block._cache_size()
    exact_search_jax(labels[8:16], held, 3)
    assert blocks._search_block._cache_size() == before
