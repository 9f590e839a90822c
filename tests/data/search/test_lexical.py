"""The TF-IDF index of texts: plain loops, bounded work, packed queries, texts that join."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from xmc_jax.data.search import lexical
from xmc_jax.data.search.lexical import TextIndex

TEXTS = ["red", "Apple pie", "car", "???", "red", "naïve apple", "a chart", "XK-47/b", "x" * 300]
FURTHER = ["a red, red apple", "pie chart of cars"]
QUERIES = ["The red car", "apple apple pie", "", "Ünïcode naïve", "xk 47", "unknown", "x" * 120]


def terms(text: str) -> list[str]:
    """Words and pieces of 3 to 5 characters, boundaries included."""
    words = [word[:100] for word in re.findall(r"\w+", text.lower())]
    padded = [f" {word} " for word in words]
    pieces = [
        "#" + word[i : i + n]
        for word in padded
        for n in (3, 4, 5)
        for i in range(len(word) - n + 1)
    ]
    return words + pieces


def loops() -> np.ndarray:
    """Cosines as the textbook has them, ``[Q, L]``."""
    seen = [set(terms(text)) for text in TEXTS + FURTHER]

    def vector(text: str) -> dict[str, float]:
        made = {}
        for term, count in Counter(terms(text)).items():
            if df := sum(term in one for one in seen):
                idf = 1 + math.log((1 + len(seen)) / (1 + df))
                made[term] = (1 + math.log(count)) * idf
        length = math.sqrt(sum(x * x for x in made.values())) or 1.0
        return {term: x / length for term, x in made.items()}

    table = [vector(text) for text in TEXTS]
    return np.array(
        [[sum(x * y.get(t, 0) for t, x in vector(q).items()) for y in table] for q in QUERIES]
    )


@pytest.mark.parametrize("block", [1, 10**6])
@pytest.mark.parametrize("characters", [9, 1 << 18])
def test_equals_loops(block, characters, monkeypatch, tmp_path):
    monkeypatch.setattr(lexical, "_BLOCK_CHARACTERS", characters)
    monkeypatch.setattr(lexical, "_MERGED", characters)
    expected = loops()
    made = TextIndex.of(TEXTS, FURTHER)
    made.write(tmp_path / "kept")
    for index in (made, TextIndex.read(tmp_path / "kept")):
        queries = index.vocabulary.vectors(QUERIES)
        for budget in (None, 10**6):
            ids, scores = index.search(queries, len(TEXTS), budget=budget, block=block)
            for row, found, score in zip(expected, ids, scores):
                order = sorted(np.flatnonzero(row), key=lambda y: (-round(row[y], 6), y))
                assert found.tolist() == order + [-1] * (len(TEXTS) - len(order))
                np.testing.assert_allclose(score[: len(order)], row[order], rtol=2e-6)
        rows, every = (x.ravel() for x in np.indices(expected.shape))
        packed = index.unpack(index.pack(queries))
        for some in (queries, packed):
            scores = index.scores(some, rows, every).reshape(expected.shape)
            np.testing.assert_allclose(scores, expected, rtol=2e-6, atol=1e-7)
        assert index.scores(queries, rows[:2], np.array([-1, 0])).tolist()[0] == 0
        near = index.nearest(packed, 3)
        assert near.shape == expected.shape and (np.diff(near.indptr) <= 3).all()


def synthetic(number: int, seed: int = 0) -> list[str]:
    """Texts of four of 20,000 words, frequent ones first, and a part number."""
    rng = np.random.default_rng(seed)
    letters = rng.integers(97, 123, (20_000, 7)).astype(np.uint8)
    words = [bytes(row[: 3 + i % 5]).decode() for i, row in enumerate(letters)]
    drawn = (20_000 * rng.random((number, 4)) ** 4).astype(int)
    return [
        " ".join(words[i] for i in row) + f" {n * 7919 % 100_000}" for n, row in enumerate(drawn)
    ]


def test_bounded_work_finds_nearly_what_is_there():
    texts = synthetic(8_000)
    index = TextIndex.of(texts)
    queries = index.vocabulary.vectors([text.partition(" ")[2] for text in texts[:200]])
    whole, all_scores = index.search(queries, 20)
    ids, scores = index.search(queries, 20, budget=800)
    read = index._rarest(queries, 800)
    postings = np.add.reduceat(index._postings[read.indices], read.indptr[:-1])
    everything = np.add.reduceat(index._postings[queries.indices], queries.indptr[:-1])
    assert postings.max() <= 800 and everything.mean() > 4 * 800
    recall = np.mean([len(set(a) & set(b)) / 20 for a, b in zip(whole, ids)])
    assert recall > 0.9 and (ids[:, 0] == whole[:, 0]).mean() > 0.99
    same = ids == whole
    np.testing.assert_allclose(scores[same], all_scores[same], rtol=1e-5)  # of all terms


def test_texts_join_with_terms_of_their_own():
    index = TextIndex.of(TEXTS, FURTHER)
    joined = index.joined(["qq-815", "red apple"])
    queries = joined.vocabulary.vectors([*QUERIES, "qq 815"])
    ids, scores = joined.search(queries, 3)
    assert ids[-1, 0] == len(TEXTS) and scores[-1, 0] == pytest.approx(1, abs=1e-6)
    assert len(joined) == len(TEXTS) + 2 and len(index) == len(TEXTS)
    rows, every = (x.ravel() for x in np.indices((len(QUERIES), len(TEXTS))))
    np.testing.assert_allclose(
        joined.scores(queries, rows, every).reshape(-1, len(TEXTS)), loops(), atol=1e-6
    )
    flat = joined.scores(queries, np.repeat(np.arange(len(ids)), 3), ids.ravel())
    np.testing.assert_allclose(flat.reshape(ids.shape), scores, rtol=1e-6)


def test_long_queries_keep_their_heaviest_terms():
    index = TextIndex.of(["word " + " ".join(map(str, range(1000, 1200))), "word"])
    queries = index.vocabulary.vectors(["word " + " ".join(map(str, range(1000, 1200)))])
    kept = index.unpack(index.pack(queries))
    assert kept.nnz == lexical.PACKED < queries.nnz
    assert kept.data.min() >= np.sort(queries.data)[-lexical.PACKED] - 1e-7


def test_blocks_bound_the_product() -> None:
    """No block has more than the bound, rows come once and in order, a heavy row stands alone."""
    vectors = csr_matrix(np.array([[1, 0], [0, 1], [1, 1], [0, 0], [1, 0], [1, 0]], np.float32))
    found = list(lexical._row_blocks(vectors, np.array([4, 3]), 6))
    assert [(rows.start, rows.stop) for rows in found] == [(0, 1), (1, 2), (2, 3), (3, 5), (5, 6)]
    whole = list(lexical._row_blocks(vectors, np.array([4, 3]), 10**6))
    assert [(rows.start, rows.stop) for rows in whole] == [(0, 6)]
