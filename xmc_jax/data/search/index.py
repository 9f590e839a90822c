"""Search over label vectors, and mining of hard negatives with it.

FAISS and JAX's device are used where a function needs them; importing this module starts neither.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from xmc_jax.data.batching.pools import contains, row_entries
from xmc_jax.data.search.exact_search import exact_search, exact_search_jax
from xmc_jax.data.search.inverted_lists import BLOCK, InvertedLists

KINDS = ("exact", "hnsw", "ivf")
_EXPANDED = 16_384  # queries whose results are widened to repeated labels at once
_SPARE = 16  # results beyond k, so that equal scores at the cut go to the lower id


def choose(
    num_queries: int,
    num_labels: int,
    dim: int,
    *,
    accelerator: bool = False,
    num_threads: int | None = None,
) -> tuple[str, float]:
    """What ``index=auto`` means: exact search while it takes minutes, else IVF.

    Exact search does ``2 N L d`` multiplications and additions; it is chosen below 1e14 on a CPU
    and below 1e17 on an accelerator.

    Args:
      num_queries: ``N``.
      num_labels: ``L``.
      dim: ``d``.
      accelerator: whether exact search runs on one.
      num_threads: of the CPU; all cores by default.

    Returns:
      The kind, and roughly how many seconds building and searching will take.
    """
    work = 2.0 * num_queries * num_labels * dim
    rate = _rate(accelerator, num_threads)
    if work < (1e17 if accelerator else 1e14):
        return "exact", work / rate
    rate = _rate(False, num_threads)
    lists = 4 * math.sqrt(num_labels)
    training = 2 * dim * lists * (10 * 40 * lists + num_labels)
    search = 2 * dim * num_queries * (lists + 4 * num_labels / 64)  # a 64th of the lists visited
    return "ivf", (training + search) / rate


def exact_seconds(num_queries: int, num_labels: int, dim: int, *, accelerator: bool) -> float:
    """Roughly how long an exact search takes; arguments as of `choose`."""
    return 2.0 * num_queries * num_labels * dim / _rate(accelerator, None)


def _rate(accelerator: bool, num_threads: int | None) -> float:
    """Multiplications and additions of a search in a second.

    Measured on two busy AVX2 cores (36 GFLOP/s a core in blocks of labels, 9 in the products of
    inverted lists); an accelerator is bound by its top-k, not by the products.
    """
    return 5e12 if accelerator else 3.5e10 * (num_threads or os.cpu_count() or 1)


Found = tuple[np.ndarray, np.ndarray]  # scores and ids
Searcher = Callable[[np.ndarray, int], Found]  # of queries and k
Groups = tuple[np.ndarray, np.ndarray, np.ndarray]  # of `_equal_rows`


class Index:
    """Labels to be found by inner product; made by `build`.

    Rows that are bit for bit equal (labels of one text) are held once and found together, so that
    rounding cannot tell them apart. Of labels of equal score the lower id comes first; with
    ``hnsw`` and ``ivf`` this holds within the candidates they return.

    Attributes:
      kind: ``exact``, ``hnsw`` or ``ivf``.
      num_labels: ``L``.
      dim: ``d``.
      nprobe: inverted lists that a query visits (``ivf`` only, else 0).
      recall: recall@20 on the sample of queries that set ``nprobe`` (``ivf`` only, else NaN).
    """

    def __init__(
        self,
        kind: str,
        shape: tuple[int, int],
        groups: Groups | None,
        searcher: Searcher,
        nprobe: int = 0,
        recall: float = math.nan,
    ) -> None:
        self.kind, (self.num_labels, self.dim) = kind, shape
        self.nprobe, self.recall = nprobe, recall
        self._groups, self._searcher = groups, searcher

    @property
    def block(self) -> int:
        """Queries that are worth searching at once."""
        return BLOCK if self.kind == "ivf" else 16_384

    @classmethod
    def build(
        cls,
        vectors: np.ndarray,
        kind: str,
        *,
        seed: int,
        bonus: np.ndarray | None = None,
        sample_queries: np.ndarray | None = None,
        accelerator: bool | None = None,
    ) -> Index:
        """Builds an index.

        ``exact`` refers to ``vectors``, without a copy unless rows repeat (on an accelerator:
        faiss-gpu where that is installed, else blocks of JAX over labels held on the device).
        ``hnsw`` (M 32, efConstruction 200, efSearch at least 128) is filled in parallel, so two
        builds differ slightly. ``ivf`` has about ``4 sqrt(L)`` lists from seeded k-means on a
        sample, and visits as many as give recall@20 of 0.95 on a sample of queries, but no more
        than a 64th (or 16): a miss there is still a near negative.

        Args:
          vectors: ``[L, d]`` float32.
          kind: one of `KINDS`.
          seed: of the sample and the k-means of ``ivf``.
          bonus: ``[L]`` float32, added to the labels' scores (``exact`` only: the others, made for
            nearest vectors, miss labels that are far away and win by their bonus).
          sample_queries: ``[m, d]``, a few hundred typical queries to set ``nprobe`` with; by
            default label vectors with noise.
          accelerator: where exact search runs; by default on JAX's device unless that is a CPU.

        Raises:
          ValueError: for an unknown kind, one that takes no bonus, or vectors that are not a matrix
            of finite numbers.
        """
        if kind not in KINDS:
            raise ValueError(
                f"index kind is {kind!r}; expected one of {', '.join(KINDS)} ('auto' is resolved"
                " before, by choose)."
            )
        if bonus is not None and kind != "exact":
            raise ValueError(f"index {kind!r}: scores with a tail weight need 'exact'.")
        vectors = np.ascontiguousarray(vectors, np.float32)
        if vectors.ndim != 2 or not len(vectors) or not np.isfinite(vectors.sum()):
            raise ValueError(
                f"label vectors have shape {vectors.shape}; expected [L, d] with L >= 1 and finite"
                " values. Values that are not finite mean that training diverged."
            )
        groups = _equal_rows(vectors) if bonus is None else None
        distinct = vectors if groups is None else vectors[groups[0]]
        num_labels, dim = vectors.shape
        if kind == "exact":
            exact = _exact_searcher(distinct, bonus, accelerator)
            return cls(kind, (num_labels, dim), groups, exact)
        if kind == "hnsw":
            return cls(kind, (num_labels, dim), groups, _hnsw_searcher(distinct))
        nprobe, recall, ivf = _ivf_searcher(distinct, seed, sample_queries)
        return cls(kind, (num_labels, dim), groups, ivf, nprobe, recall)

    @classmethod
    def of_keys(cls, vectors: np.ndarray, kind: str, *, seed: int, m: int = 50) -> Index:
        """An index of the vectors of queries, whose numbers are looked at and not their order.

        They may be of 16 bits and memory-mapped, and stay so. Equal ones are held as often as they
        are there. Inverted lists are visited until recall@m on a sample is 0.95, which may need
        more of them than labels do.

        Args:
          vectors: ``[n, d]`` float16 or float32.
          kind: one of `KINDS`.
          seed: as of `build`.
          m: neighbours that will be asked for.
        """
        number, dim = vectors.shape
        if kind == "exact":
            return cls(kind, (number, dim), None, _exact_searcher(vectors, None, None))
        if kind == "hnsw":
            return cls(kind, (number, dim), None, _hnsw_searcher(np.asarray(vectors, np.float32)))
        nprobe, recall, ivf = _ivf_searcher(vectors, seed, None, k=m, share=16)
        return cls(kind, (number, dim), None, ivf, nprobe, recall)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best labels of each query.

        Args:
          queries: ``[n, d]`` float32.
          k: at least 1.

        Returns:
          scores ``[n, k]`` float32, descending, and ids ``[n, k]`` int32; -inf and -1 where no more
          labels were found.
        """
        queries = np.ascontiguousarray(queries, np.float32)
        if k < 1 or queries.ndim != 2 or queries.shape[1] != self.dim:
            raise ValueError(
                f"search of queries {queries.shape} for k = {k}; expected [n, {self.dim}] and k of"
                " at least 1: queries and labels must come from the same head."
            )
        if self._groups is None:
            scores, ids = self._searcher(queries, min(self.num_labels, k))
            lacking = ((0, 0), (0, k - ids.shape[1]))
            return (
                np.pad(scores, lacking, constant_values=-np.inf),
                np.pad(ids, lacking, constant_values=-1),
            )
        scores, ids = self._searcher(queries, min(len(self._groups[0]), k))
        blocks = [slice(i, i + _EXPANDED) for i in range(0, max(1, len(queries)), _EXPANDED)]
        parts = [_expand(scores[rows], ids[rows], self._groups, k) for rows in blocks]
        scores, ids = (np.concatenate(arrays) for arrays in zip(*parts))
        return scores, ids


def mine(
    query_vectors: np.ndarray,
    index: Index,
    *,
    labels: csr_matrix,
    filters: csr_matrix | None,
    width: int,
    block: int | None = None,
    out: np.ndarray | None = None,
    progress: Callable[[int], Any] | None = None,
) -> np.ndarray:
    """Hard negatives (preprint section 3.1): the nearest labels that are not the query's own.

    ``H_i = top_width(index, x_i)`` without the positives and the filter pairs of i. A query with
    many of these is searched deeper, so that they never use up its list.

    Args:
      query_vectors: ``[N, d]`` float32; may be memory-mapped.
      index: of the labels.
      labels: ``[N, L]``, positives.
      filters: ``[N, L]``, filter pairs, or None.
      width: ``W``, hard negatives a query.
      block: queries searched at once (fewer where the search is deep); default: the index's own.
      out: ``[N, W]`` int32 to write into, block by block; may be memory-mapped.
      progress: called with the number of queries done since the last call.

    Returns:
      ``out`` (or a new array): label ids, best first, -1 where there are no more.
    """
    num_queries, block = len(query_vectors), block or index.block
    for name, matrix in (("labels", labels), ("filters", filters)):
        if matrix is not None and matrix.shape[0] != num_queries:
            raise ValueError(
                f"{name} has {matrix.shape[0]} rows for {num_queries} query vectors; expected one"
                " row a query, in the same order."
            )
    out = np.empty((num_queries, width), np.int32) if out is None else out
    if out.shape != (num_queries, width) or out.dtype != np.int32:
        raise ValueError(f"out is {out.dtype} {out.shape}; expected int32 {(num_queries, width)}.")
    need = width + np.diff(labels.indptr)
    if filters is not None:
        need = need + np.diff(filters.indptr)
    # Depths are rounded up to powers of two: a handful of searches, each compiled once on a device.
    depth = np.minimum(
        2 ** np.ceil(np.log2(np.maximum(1, need))).astype(np.int64), index.num_labels
    )
    for deep in np.unique(depth):
        rows = np.flatnonzero(depth == deep)
        step = max(1, min(block, 64 * block // int(deep)))
        for start in range(0, rows.size, step):
            part = rows[start : start + step]
            nearest = index.search(query_vectors[part], int(deep))[1]
            out[part] = _without_own(nearest, labels, filters, part, width)
            if progress is not None:
                progress(part.size)
    return out


def _without_own(
    ids: np.ndarray,
    labels: csr_matrix,
    filters: csr_matrix | None,
    rows: np.ndarray,
    width: int,
) -> np.ndarray:
    """The first ``width`` of each row's results that are neither its positives nor filtered."""
    keys = [
        place * labels.shape[1] + label
        for matrix in (labels, filters)
        if matrix is not None
        for place, label in [row_entries(matrix, rows)]
    ]
    own = np.sort(np.concatenate(keys))
    kept = (ids >= 0) & ~contains(own, np.arange(rows.size)[:, None] * labels.shape[1] + ids)
    rank = np.cumsum(kept, axis=1) - 1
    kept &= rank < width
    result = np.full((rows.size, width), -1, np.int32)
    result[np.nonzero(kept)[0], rank[kept]] = ids[kept]
    return result


def _exact_searcher(
    vectors: np.ndarray, bonus: np.ndarray | None, accelerator: bool | None
) -> Searcher:
    """Function (queries, k) -> (scores, ids) over distinct rows, on host or device."""
    import jax

    if accelerator is None:
        accelerator = jax.default_backend() != "cpu"
    if not accelerator:
        return lambda queries, k: exact_search(queries, vectors, k, bonus)
    import faiss

    gpu = hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0
    if bonus is not None or not gpu:
        held = jax.device_put(vectors), bonus if bonus is None else jax.device_put(bonus)
        return lambda queries, k: exact_search_jax(queries, held[0], k, bonus=held[1])
    resources = faiss.StandardGpuResources()

    def knn(queries: np.ndarray, k: int) -> Found:
        return faiss.knn_gpu(resources, queries, vectors, k, metric=faiss.METRIC_INNER_PRODUCT)

    ordered = _ordered(knn, len(vectors))

    def search(queries: np.ndarray, k: int) -> Found:  # faiss-gpu returns 2,048 results at the most
        if k + _SPARE <= 2048:
            return ordered(queries, k)
        return exact_search_jax(queries, vectors, k)

    return search


def _ordered(find: Searcher, number: int) -> Searcher:
    """Search whose equal scores go to the lower id, from a FAISS search that promises no order."""

    def search(queries: np.ndarray, k: int) -> Found:
        scores, ids = find(queries, min(number, k + _SPARE))
        scores = np.where(ids < 0, -np.inf, scores).astype(np.float32)
        order = np.lexsort((ids, -scores), axis=-1)[:, :k]
        scores, ids = (np.take_along_axis(array, order, axis=1) for array in (scores, ids))
        return scores, ids.astype(np.int32)

    return search


def _hnsw_searcher(vectors: np.ndarray) -> Searcher:
    import faiss

    index = faiss.IndexHNSWFlat(vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 200
    index.add(vectors)

    def find(queries: np.ndarray, k: int) -> Found:
        return index.search(queries, k, params=faiss.SearchParametersHNSW(efSearch=max(k, 128)))

    return _ordered(find, len(vectors))


def _ivf_searcher(
    vectors: np.ndarray,
    seed: int,
    sample_queries: np.ndarray | None,
    *,
    k: int = 20,
    share: int = 64,
) -> tuple[int, float, Searcher]:
    """(lists visited, recall, search function); k-means sees at most 40 rows a list.

    As many lists as a recall@k of 0.95 needs, but at most one in ``share``: of labels a 64th, for
    the vectors of the first refreshes spread over all lists, and near misses are hard negatives as
    well.
    """
    number, dim = vectors.shape
    lists = max(1, min(round(4 * math.sqrt(number)), number // 39))
    rng = np.random.default_rng(seed)
    sample = np.asarray(vectors[np.sort(rng.permutation(number)[: 40 * lists])], np.float32)
    held = InvertedLists.build(vectors, sample, lists, seed=seed)

    def find(queries: np.ndarray, k: int, nprobe: int) -> Found:
        deep = -(-4 * k * lists // number)  # so many lists hold about 4 k labels
        return held.search(queries, k, max(nprobe, deep))

    if sample_queries is None:
        sample_queries = sample[rng.permutation(len(sample))[:256]]
        noise = rng.standard_normal(sample_queries.shape)
        lengths = np.linalg.norm(sample_queries, axis=1, keepdims=True)
        sample_queries = sample_queries + 0.75 * lengths * noise / math.sqrt(dim)
    queries = np.ascontiguousarray(sample_queries[:512], np.float32)
    k, most = min(k, number), max(1, min(lists, 16), lists // share)
    truth = exact_search(queries, vectors, k)[1]
    nprobe = min(8, most)
    while (recall := _recall(find(queries, k, nprobe)[1], truth)) < 0.95 and nprobe < most:
        nprobe = min(most, nprobe * 3 // 2)
    return nprobe, recall, _ordered(lambda queries, k: find(queries, k, nprobe), number)


def _recall(ids: np.ndarray, truth: np.ndarray) -> float:
    """Share of the true ids that were found in the same row."""
    row = np.arange(len(truth))[:, None] << 32
    return float(np.mean(np.isin(row + truth, row + ids)))


def _equal_rows(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Groups of rows that are bit for bit equal; None where all rows differ.

    Returns:
      ``first [U]``, the lowest row of each group, ascending; ``members [L]``, rows group by group,
      ascending; ``starts [U + 1]``, where each group starts in ``members``.
    """
    odd = np.random.default_rng(0).integers(0, 2**63, vectors.shape[1], np.uint64) * 2 + 1
    hashes = np.empty(len(vectors), np.uint64)
    for start in range(0, len(vectors), 4096):
        bits = vectors[start : start + 4096].view(np.uint32).astype(np.uint64)
        hashes[start : start + 4096] = bits @ odd  # modulo 2^64
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]]) + 1
    if same.size == 0:
        return None
    opens = np.ones(len(vectors), bool)
    for start in range(0, same.size, 4096):  # a hash may lie: compare the rows
        at = same[start : start + 4096]
        opens[at] = (vectors[order[at]] != vectors[order[at - 1]]).any(axis=1)
    if opens.all():
        return None
    first = order[opens]
    members = order[np.lexsort((order, first[np.cumsum(opens) - 1]))]
    sizes = np.diff(np.append(np.flatnonzero(opens), len(vectors)))
    by_row = np.argsort(first)
    return first[by_row], members, np.concatenate([[0], np.cumsum(sizes[by_row])])


def _expand(scores: np.ndarray, numbers: np.ndarray, groups: Groups, k: int) -> Found:
    """Results over groups of equal labels -> results over labels, ``[n, k]`` each."""
    _, members, starts = groups
    sizes = np.where(numbers >= 0, starts[numbers + 1] - starts[numbers], 0)
    before = np.cumsum(sizes, axis=1) - sizes
    # Groups of equal score share their places: one is left out only if those above it fill k.
    run = np.ones(numbers.shape, bool)
    run[:, 1:] = scores[:, 1:] != scores[:, :-1]
    opened = np.maximum.accumulate(np.where(run, np.arange(numbers.shape[1]), 0), axis=1)
    taken = np.where(np.take_along_axis(before, opened, axis=1) < k, np.minimum(sizes, k), 0)
    flat = taken.reshape(-1)
    rank = np.arange(flat.sum()) - np.repeat(np.cumsum(flat) - flat, flat)
    label = members[np.repeat(starts[numbers].reshape(-1), flat) + rank]
    score = np.repeat(scores.reshape(-1), flat)
    row = np.repeat(np.arange(len(numbers)), taken.sum(axis=1))
    order = np.lexsort((label, -score, row))
    counts = taken.sum(axis=1)
    place = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
    row, label, score = row[order], label[order], score[order]
    out_scores = np.full((len(numbers), k), -np.inf, np.float32)
    out_ids = np.full((len(numbers), k), -1, np.int32)
    kept = place < k
    out_scores[row[kept], place[kept]] = score[kept]
    out_ids[row[kept], place[kept]] = label[kept]
    return out_scores, out_ids
