"""From texts to their top 100 labels: texts a second and latency, exact search and HNSW.

The parts of ``xmc_jax.predictor`` in its order (tokenise, embed with both heads, search), with
random label vectors in place of a trained run's. ``bag`` is the encoder of a run on a CPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from experiments.benchmarks import harness, problem
from experiments.benchmarks.harness import Contender, Subject
from xmc_jax import evaluation
from xmc_jax.data import corpus
from xmc_jax.data import tokenizer as tokenizers
from xmc_jax.data.index import Index
from xmc_jax.embedding import Embedder
from xmc_jax.models.bag import BagEncoder
from xmc_jax.models.transformer import TransformerEncoder
from xmc_jax.models.unidec import UniDEC

TOP, VOCABULARY, WORDS = 100, 2000, 9


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One result for each encoder, kind of index and number of labels."""
    for shape in options.shapes or (["bag"] if options.quick else ["bag", "minilm"]):
        for labels in (3000,) if options.quick else (73_868, 1_305_265):
            for kind in ("exact", "hnsw"):
                if options.wanted(f"predict {shape} {kind} {labels}"):
                    yield measure(options, shape, kind, labels)


def measure(options: argparse.Namespace, shape: str, kind: str, labels: int) -> dict[str, Any]:
    """Turns of one text and of 1,000; each in a process with its own index."""
    sizes = (1, 100) if options.quick else (1, 1000)
    contenders = [
        Contender(f"batch {size}", predictor, (shape, kind, labels, size, options.dtype))
        for size in sizes
    ]
    results = harness.contest(options, contenders, repeats=5)
    for size, found in zip(sizes, results.values()):
        found["texts_a_second"] = round(size / found["seconds"]["median"], 1)
    return {
        **{"case": "predict", "encoder": shape, "index": kind, "labels": labels, "top": TOP},
        **{"head": "concat", "dim": 2 * options.head_dim, "dtype": options.dtype},
        "contenders": results,
    }


def predictor(shape: str, kind: str, labels: int, size: int, dtype: str) -> Subject:
    """A turn predicts for ``size`` texts of nine words."""
    rng = np.random.default_rng(0)
    words = [f"{a}{b}{c}" for a in "bdfgklmprt" for b in "aeiou" for c in "bdfgklmnprst"]
    texts = [" ".join(rng.choice(words, WORDS)) for _ in range(size)]
    with tempfile.TemporaryDirectory() as folder:
        pieces = tokenizers.train_wordpiece(words, vocab_size=VOCABULARY, folder=folder)
    encoder: Any = BagEncoder(VOCABULARY, 512)
    if shape != "bag":
        encoder = TransformerEncoder(problem.SHAPES[shape], compute_dtype=dtype)
    model = UniDEC(encoder, 256)
    params = model.init(jax.random.key(0))
    embedder = Embedder(model, row_length=32)
    vectors = evaluation.l2norm(rng.standard_normal((labels, 2 * 256), np.float32))
    started = time.perf_counter()
    index = Index.build(vectors, kind, seed=0)
    facts = {"build_seconds": round(time.perf_counter() - started, 2)}
    seconds: dict[str, list[float]] = {"embed": [], "search": []}

    def turn(_: int) -> None:
        begun = time.perf_counter()
        store = corpus.encode(texts, pieces, max_length=problem.MAX_LENGTH)
        queries = evaluation.query_vectors(embedder, params, store, None, "concat")
        embedded = time.perf_counter()
        index.search(queries, TOP)
        seconds["embed"].append(embedded - begun)
        seconds["search"].append(time.perf_counter() - embedded)

    def close() -> dict[str, Any]:
        return {f"{name}_seconds": float(np.median(v[1:])) for name, v in seconds.items()}

    return Subject(turn, facts, close)
