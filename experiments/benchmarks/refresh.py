"""The parts of a refresh, each against the plain way: embedding, clustering, index and search.

Peers: sentence-transformers' ``encode`` on the same weights (it sorts by length itself; batch 32 is
its default), ``faiss.Kmeans`` with its defaults (it trains on 256 points a centre) and assignment
of all points, and FAISS's own indexes.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks import harness, problem
from experiments.benchmarks.harness import Contender, Subject
from xmc_jax.data.tokens import tokenizer as tokenizers

TEXTS, DIM, TOP, TOPICS = 2000, 256, 100, 2000
# Mining searches many queries at once, which is what our inverted lists are made for. Vectors in
# topics are found in few lists; those that lie anywhere are looked for in many.
SEARCHES = ("exact", 1024, "topics"), ("ivf", 1 << 17, "topics"), ("ivf", 1 << 17, "anywhere")


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One result a part; names for --only as in the lists below."""
    quick = options.quick
    if options.wanted("refresh embed"):
        yield embed(options, 60 if quick else TEXTS)
    for points, levels in ((4000, 4),) if quick else ((1_000_000, 10), (1_000_000, 14)):
        if options.wanted(f"refresh cluster {2**levels}"):
            yield cluster(options, points, levels)
    for kind, queries, lie in SEARCHES:
        for labels in (4000,) if quick else (73_868, 1_305_265):
            if options.wanted(f"refresh search {kind} {labels} {lie}"):
                yield search(options, kind, labels, 64 if quick else queries, lie)


def embed(options: argparse.Namespace, number: int) -> dict[str, Any]:
    """Texts a second from strings to vectors, tokenising included."""
    shape = "tiny" if options.quick else "minilm"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = "wordnet-mini" if options.quick else "wordnettitles"
        read, _, pieces = problem.read_titles(dataset, options.data, options.encoder, folder)
        problem.write_encoder(shape, folder, options.encoder)
        tokenizers.save_tokenizer(pieces, folder)
        rows = np.linspace(0, len(read.train.texts) - 1, number).astype(int)
        texts = [read.train.texts[row] for row in rows]
        contenders = [Contender("ours", our_encode, (folder, texts, options.dtype))]
        if options.peer:
            harness.require("torch", "sentence_transformers")
            contenders += [
                Contender(f"encode, batch {size}", peer_encode, (folder, texts, size))
                for size in (32, 256)
            ]
        tolerance = 1e-4 if options.dtype == "float32" else 0.05
        check = functools.partial(same_vectors, tolerance=tolerance)
        results = harness.contest(options, contenders, repeats=3, check=check)
    for found in results.values():
        found["texts_a_second"] = round(number / found["seconds"]["median"], 1)
        del found["facts"]["vectors"]
    return {
        **{"case": "refresh", "part": "embed", "encoder": shape, "texts": number},
        "dtype": options.dtype,
        "ours_is_faster": harness.ratios(results, "ours"),
        "contenders": results,
    }


def our_encode(folder: Path, texts: list[str], dtype: str) -> Subject:
    """The package's embedder, tokenising included; the dual encoder without a head."""
    from xmc_jax.data.tokens import token_stores
    from xmc_jax.models import pretrained
    from xmc_jax.models.heads.unidec import UniDEC
    from xmc_jax.systems.unidec.embedder import Embedder

    encoder, weights = pretrained.load_encoder(folder, pooling="mean", compute_dtype=dtype)
    embedder = Embedder(UniDEC(encoder), row_length=32)
    pieces = tokenizers.load_tokenizer(folder)

    def encode(texts: list[str]) -> np.ndarray:
        store = token_stores.encode(texts, pieces, max_length=problem.MAX_LENGTH)
        return embedder.de({"encoder": weights}, store)

    return Subject(lambda _: encode(texts), {"vectors": encode(texts[:20])})


def peer_encode(folder: Path, texts: list[str], batch_size: int) -> Subject:
    """``SentenceTransformer.encode``."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(harness.cores())
    model = SentenceTransformer(str(folder))
    model.max_seq_length = problem.MAX_LENGTH

    def encode(texts: list[str]) -> np.ndarray:
        options = {"batch_size": batch_size, "show_progress_bar": False}
        return model.encode(texts, normalize_embeddings=True, **options)

    return Subject(lambda _: encode(texts), {"vectors": encode(texts[:20])})


def same_vectors(facts: dict[str, Any], tolerance: float) -> None:
    """All contenders give the same vectors.

    Raises:
      ContenderError: they do not.
    """
    first = facts["ours"]["vectors"]
    for name, found in facts.items():
        apart = float(np.abs(found["vectors"] - first).max())
        if not apart <= tolerance:
            raise harness.ContenderError(f"{name}: vectors differ from ours by {apart}")


def cluster(options: argparse.Namespace, points: int, levels: int) -> dict[str, Any]:
    """Balanced clusters against ``faiss.Kmeans``; that only for 1,024 (16,384 take it hours)."""
    contenders = [Contender("ours", our_clusters, (points, levels))]
    if levels <= 10:
        contenders.append(Contender("faiss.Kmeans", peer_clusters, (points, 2**levels)))
    results = harness.contest(options, contenders, repeats=1, warmup=0)
    return {
        **{"case": "refresh", "part": "cluster", "points": points, "dim": DIM},
        "clusters": 2**levels,
        "ours_is_faster": harness.ratios(results, "ours"),
        "contenders": results,
    }


def vectors(number: int, *, lie: str = "topics", seed: int = 0) -> np.ndarray:
    """Unit rows, around `TOPICS` random directions as embeddings of topics lie, or "anywhere"."""
    directions = np.random.default_rng(0).standard_normal((TOPICS, DIM), np.float32)
    rng = np.random.default_rng(seed + 1)
    x = np.empty((number, DIM), np.float32)
    for start in range(0, number, 1 << 16):
        part = x[start : start + (1 << 16)]
        rng.standard_normal(dtype=np.float32, out=part)
        if lie == "topics":
            part += directions[rng.integers(0, TOPICS, len(part))]
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return x


def our_clusters(points: int, levels: int) -> Subject:
    """`balanced_clusters`."""
    from xmc_jax.data.search import clustering

    x, sizes = vectors(points), []

    def turn(number: int) -> None:
        offsets = clustering.balanced_clusters(x, levels, seed=number)[1]
        sizes.append(np.diff(offsets))

    return Subject(turn, {}, lambda: smallest_and_largest(sizes[-1]))


def peer_clusters(points: int, number: int) -> Subject:
    """``faiss.Kmeans`` with its defaults, then the nearest centre of every point."""
    import faiss

    x, sizes = vectors(points), []

    def turn(seed: int) -> None:
        kmeans = faiss.Kmeans(DIM, number, seed=seed)
        kmeans.train(x)
        sizes.append(np.bincount(kmeans.index.search(x, 1)[1][:, 0], minlength=number))

    return Subject(turn, {}, lambda: smallest_and_largest(sizes[-1]))


def smallest_and_largest(sizes: np.ndarray) -> dict[str, int]:
    """How balanced clusters are."""
    return {"smallest": int(sizes.min()), "largest": int(sizes.max())}


def search(
    options: argparse.Namespace, kind: str, labels: int, queries: int, lie: str
) -> dict[str, Any]:
    """Top 100 of some queries; index built in the set-up, its seconds are among the facts."""
    size = (kind, labels, queries, lie)
    contenders = [Contender("ours", our_index, size), Contender("faiss", peer_index, size)]
    results = harness.contest(options, contenders, repeats=3 if kind == "exact" else 1)
    return {
        **{"case": "refresh", "part": "search", "kind": kind, "labels": labels, "dim": DIM},
        **{"vectors": lie, "queries": queries, "top": TOP},
        "ours_is_faster": harness.ratios(results, "ours"),
        "contenders": results,
    }


def our_index(kind: str, labels: int, queries: int, lie: str) -> Subject:
    """`Index`."""
    from xmc_jax.data.search.index import Index

    x, started = vectors(labels, lie=lie), time.perf_counter()
    built = Index.build(x, kind, seed=0, sample_queries=vectors(500, lie=lie, seed=2))
    facts = {"build_seconds": time.perf_counter() - started, "nprobe": built.nprobe}
    return searched(x, vectors(queries, lie=lie, seed=1), built.search, facts)


def peer_index(kind: str, labels: int, queries: int, lie: str) -> Subject:
    """FAISS's flat index, or its inverted lists: as many as ours, and the rule of ours for visits.

    That is recall@20 of 0.95 on a sample of queries, but no more than a 64th of the lists (or 16).
    """
    import faiss

    x, started = vectors(labels, lie=lie), time.perf_counter()
    index = faiss.IndexFlatIP(DIM)
    if kind == "ivf":
        lists = max(1, min(round(4 * np.sqrt(labels)), labels // 39))
        index = faiss.IndexIVFFlat(index, DIM, lists, faiss.METRIC_INNER_PRODUCT)
        index.train(x)
    index.add(x)
    if kind == "ivf":
        sample = vectors(500, lie=lie, seed=2)
        truth, most = best(sample, x, 20), max(1, min(lists, 16), lists // 64)
        index.nprobe = min(8, most)
        while recall(index.search(sample, 20)[1], truth) < 0.95 and index.nprobe < most:
            index.nprobe = min(most, index.nprobe * 3 // 2)
    facts = {"build_seconds": time.perf_counter() - started, "nprobe": getattr(index, "nprobe", 0)}
    return searched(x, vectors(queries, lie=lie, seed=1), index.search, facts)


def searched(x: np.ndarray, q: np.ndarray, search: Callable, facts: dict[str, Any]) -> Subject:
    """A turn searches all queries; recall is that of a few against a plain product."""
    few = q[:32]
    facts |= {"recall": round(recall(search(few, TOP)[1], best(few, x, TOP)), 4)}
    return Subject(lambda _: search(q, TOP), facts)


def best(queries: np.ndarray, x: np.ndarray, k: int) -> np.ndarray:
    """Rows of ``x`` with the k highest inner products."""
    from xmc_jax.data.search.exact_search import exact_search

    return exact_search(queries, x, k)[1]


def recall(found: np.ndarray, truth: np.ndarray) -> float:
    """Share of the true rows that were found."""
    return float(np.mean([np.isin(t, f).mean() for f, t in zip(found, truth)]))
