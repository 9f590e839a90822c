"""From texts to their top 100 labels: texts a second and latency, exact search and HNSW.

The parts of ``xmc_jax.predictor`` in its order (tokenise, embed with both heads, search), with an
encoder that is not trained. Texts have a topic's words, labels three to five of them, queries nine:
vectors have neighbours, as a trained run's have. ``bag`` is the encoder of a run on a CPU.
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
from experiments.benchmarks.refresh import best, recall
from xmc_jax.data.search.index import Index
from xmc_jax.data.tokens import token_stores
from xmc_jax.data.tokens import tokenizer as tokenizers
from xmc_jax.models.encoders.bag import BagEncoder
from xmc_jax.models.encoders.transformer import TransformerEncoder
from xmc_jax.models.heads.unidec import UniDEC
from xmc_jax.systems.unidec import ranking
from xmc_jax.systems.unidec.embedder import Embedder

TOP, VOCABULARY, TOPICS, TOPIC_WORDS = 100, 2000, 6000, 16


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One result for each encoder and number of labels; the kinds of index take turns."""
    for shape in options.shapes or (["bag"] if options.quick else ["bag", "minilm"]):
        for labels in (3000,) if options.quick else (73_868, 1_305_265):
            names = {kind: f"predict {shape} {labels} {kind}" for kind in ("exact", "hnsw")}
            kinds = [kind for kind, name in names.items() if options.wanted(name)]
            if kinds:
                yield measure(options, shape, kinds, labels)


def measure(
    options: argparse.Namespace, shape: str, kinds: list[str], labels: int
) -> dict[str, Any]:
    """A turn is one text and then 1,000; each kind of index has a process of its own."""
    sizes = (1, 100) if options.quick else (1, 1000)
    contenders = [
        Contender(kind, predictor, (shape, kind, labels, sizes, options.dtype)) for kind in kinds
    ]
    return {
        **{"case": "predict", "encoder": shape, "labels": labels, "top": TOP},
        **{"head": "concat", "dim": 2 * options.head_dim, "dtype": options.dtype},
        "contenders": harness.contest(options, contenders, repeats=5),
    }


def predictor(shape: str, kind: str, labels: int, sizes: tuple[int, ...], dtype: str) -> Subject:
    """A turn predicts for each number of texts."""
    rng = np.random.default_rng(0)
    words = [f"{a}{b}{c}" for a in "bdfgklmprt" for b in "aeiou" for c in "bdfgklmnprst"]
    topics = rng.integers(0, len(words), (TOPICS, TOPIC_WORDS))
    texts = texts_of(rng, topics, words, max(sizes), 9, 9)
    label_texts = texts_of(rng, topics, words, labels, 3, 5)
    with tempfile.TemporaryDirectory() as folder:
        pieces = tokenizers.train_wordpiece(words, vocab_size=VOCABULARY, folder=folder)
    encoder: Any = BagEncoder(VOCABULARY, 512)
    if shape != "bag":
        encoder = TransformerEncoder(problem.SHAPES[shape], compute_dtype=dtype)
    model = UniDEC(encoder, 256)
    params = model.init(jax.random.key(0))
    embedder = Embedder(model, row_length=32)

    def vectors_of(some: list[str]) -> np.ndarray:
        store = token_stores.encode(some, pieces, max_length=problem.MAX_LENGTH)
        return ranking.query_vectors(embedder, params, store, None, "concat")

    vectors = vectors_of(label_texts)
    started = time.perf_counter()
    index = Index.build(vectors, kind, seed=0)
    facts = {"build_seconds": round(time.perf_counter() - started, 2)}
    few = vectors_of(texts[:32])
    facts["recall"] = round(recall(index.search(few, TOP)[1], best(few, vectors, TOP)), 4)
    seconds: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}

    def turn(_: int) -> None:
        for size, spent in seconds.items():
            begun = time.perf_counter()
            queries = vectors_of(texts[:size])
            embedded = time.perf_counter()
            index.search(queries, TOP)
            spent.append((embedded - begun, time.perf_counter() - embedded))

    def close() -> dict[str, Any]:
        return {f"texts {size}": medians(size, spent) for size, spent in seconds.items()}

    return Subject(turn, facts, close)


def texts_of(
    rng: np.random.Generator, topics: np.ndarray, words: list[str], number: int, low: int, high: int
) -> list[str]:
    """Texts of ``low`` to ``high`` different words of a topic each."""
    places = rng.random((number, TOPIC_WORDS), np.float32).argsort(axis=1)
    own = np.take_along_axis(topics[rng.integers(0, TOPICS, number)], places, axis=1)
    lengths = rng.integers(low, high + 1, number)
    return [" ".join([words[i] for i in row[:n]]) for row, n in zip(own.tolist(), lengths)]


def medians(size: int, spent: list[tuple[float, float]]) -> dict[str, float]:
    """Seconds of embedding and search after the first turn, and texts a second."""
    embed, search = np.median(spent[1:], axis=0).tolist()
    total = float(np.median(np.sum(spent[1:], axis=1)))
    rate = {"texts_a_second": round(size / total, 1)}
    return {"embed_seconds": embed, "search_seconds": search, **rate}
