"""Retrieval at LF-AmazonTitles-1.3M's shape: its time against the base ranker's, and its memory.

Vectors of both heads lie in topics, 2 x 256 numbers a text; training points and label texts are
keys of 16 bits in memory-mapped files, as a run keeps them. Both rankers search the same queries,
turn by turn, in one process. A line of its own are the words in common: of titles, in one thread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments import synthetic
from experiments.benchmarks import harness, refresh
from experiments.benchmarks.harness import Contender, Subject
from xmc_jax.data.graph.gandalf import gandalf_targets
from xmc_jax.data.search.exact_search import exact_search
from xmc_jax.data.search.keys import Keys
from xmc_jax.data.search.lexical import TextIndex
from xmc_jax.runs.retrieval_files import DELTA, TARGETS
from xmc_jax.systems.unidec.ranking import DualRanker
from xmc_jax.training.retrieval import LEXICAL_CANDIDATES, RetrievalRanker, Setting

SETTING = Setting(neighbours=50, temperature=0.1, points=0.3, labels=0.3)
KINDS = {"exact": 512, "ivf": 1 << 14}  # queries
LEXICAL_QUERIES = 1000


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A result for each kind of index, and of words in common."""
    scale = 0.002 if options.quick else options.scale
    for kind, queries in KINDS.items():
        if not options.wanted(f"retrieval {kind}"):
            continue
        size = kind, scale, min(queries, 64) if options.quick else options.queries or queries
        found = harness.contest(options, [Contender("ours", both, size)], repeats=1)
        yield {
            **{"case": "retrieval", "kind": kind, "scale": scale, "queries": size[2]},
            **{"dim": 2 * refresh.DIM, "top": refresh.TOP},
            "contenders": found,
        }
    if options.wanted("retrieval lexical"):
        size = scale, 64 if options.quick else options.queries or LEXICAL_QUERIES
        found = harness.contest(options, [Contender("ours", lexical, size)], repeats=1)
        yield {
            **{"case": "retrieval", "kind": "lexical", "scale": scale, "queries": size[1]},
            **{"top": LEXICAL_CANDIDATES, "contenders": found},
        }


class Made:
    """An embedder of vectors that are there."""

    def __init__(self, number: int) -> None:
        """Unit rows of both heads."""
        self.vectors = [refresh.vectors(number, seed=seed) for seed in (3, 4)]

    def de(self, params: Any, tokens: Any, rows: Any = None, side: str = "query") -> np.ndarray:
        """The dual encoder's."""
        return self.vectors[0]


def both(kind: str, scale: float, queries: int) -> Subject:
    """A turn searches by the base ranker, then with retrieval."""
    labels = synthetic.label_matrix(scale)
    made = Made(labels.shape[1])
    base = DualRanker(
        made, None, made.vectors[1], range(labels.shape[1]), kind=kind, keep_indexes=True
    )
    folder = tempfile.TemporaryDirectory()
    targets = gandalf_targets(labels, delta=DELTA, depth=TARGETS)
    parts = {
        "points": Keys(keys(Path(folder.name), "points", labels.shape[0]), labels, kind=kind),
        "labels": Keys(keys(Path(folder.name), "labels", labels.shape[1]), targets, kind=kind),
    }
    ranker = RetrievalRanker(base, parts, SETTING)
    x = np.concatenate([refresh.vectors(queries, seed=seed) for seed in (1, 2)], axis=1)
    started = time.perf_counter()
    ranker.search(x[:32], ranker.head, refresh.TOP)  # indexes are built here
    facts = {
        **{"points": labels.shape[0], "labels": labels.shape[1], "pairs": labels.nnz},
        **{"targets": targets.nnz, "build_seconds": round(time.perf_counter() - started, 1)},
    }
    if kind == "ivf":
        for name, part in parts.items():
            near = part.nearest(x[:32], 50)[1]
            truth = exact_search(x[:32], part.vectors, 50)[1]
            facts[f"recall@50 of {name}"] = round(refresh.recall(near, truth), 3)
    seconds: dict[str, list[float]] = {"base": [], "retrieval": []}

    def turn(_: int) -> None:
        for name, head in (("base", "concat"), ("retrieval", ranker.head)):
            started = time.perf_counter()
            ranker.search(x, head, refresh.TOP)
            seconds[name].append(time.perf_counter() - started)

    def close() -> dict[str, Any]:
        folder.cleanup()
        last = {name: round(times[-1], 3) for name, times in seconds.items()}
        return {**last, "times_base": round(last["retrieval"] / last["base"], 2)}

    return Subject(turn, facts, close)


def lexical(scale: float, queries: int) -> Subject:
    """A turn finds the first labels of all queries by their words."""
    labels, points = synthetic.titles(scale, queries)
    started = time.perf_counter()
    index = TextIndex.of(labels)
    facts = {
        **{"labels": len(index), "terms": len(index.vocabulary)},
        "build_seconds": round(time.perf_counter() - started, 1),
    }
    some = index.vocabulary.vectors(points[:32])
    near = index.nearest(some, LEXICAL_CANDIDATES)
    whole, scores = index.search(some, LEXICAL_CANDIDATES)
    last = np.maximum(scores[:, -1], 1e-6)  # where others are as near, they are as good
    good = (near.data >= np.repeat(last, np.diff(near.indptr)) - 1e-5).sum()
    facts["recall@100"] = round(float(good / max(1, (whole >= 0).sum())), 3)

    def turn(_: int) -> None:
        index.nearest(index.vocabulary.vectors(points), LEXICAL_CANDIDATES)

    return Subject(turn, facts)


def keys(folder: Path, name: str, number: int) -> np.ndarray:
    """Vectors of 16 bits in a file, memory-mapped."""
    path, width = folder / f"{name}.npy", refresh.DIM
    made = np.lib.format.open_memmap(path, "w+", np.float16, (number, 2 * width))
    for start in range(0, number, 1 << 16):
        part = made[start : start + (1 << 16)]
        for half in range(2):
            rows = refresh.vectors(len(part), seed=10 + 2 * start + half)
            part[:, half * width : (half + 1) * width] = rows
    made.flush()
    return np.load(path, mmap_mode="r")
