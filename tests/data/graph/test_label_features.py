"""Label features against plain loops: idf, TF-IDF, PIFA, the normalised graph and its rows."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from xmc_jax.data.graph import label_features, label_graph
from xmc_jax.data.tokens.token_stores import TokenStore

VOCABULARY, POINTS, LABELS = 20, 30, 12


def store_of(rng: np.random.Generator, texts: int) -> TokenStore:
    lengths = rng.integers(0, 7, texts)
    ids = rng.integers(0, VOCABULARY - 2, lengths.sum()).astype(np.uint16)  # two are in no text
    return TokenStore(ids, np.concatenate([[0], np.cumsum(lengths)]))


def texts_of(store: TokenStore) -> list[list[int]]:
    return [store.ids[a:b].tolist() for a, b in zip(store.offsets[:-1], store.offsets[1:])]


@pytest.fixture
def setting(monkeypatch):
    """Points, label texts, and labels of which one has no point; blocks of a few rows."""
    monkeypatch.setattr(label_features, "BLOCK_TEXTS", 5)
    rng = np.random.default_rng(0)
    labels = (rng.random((POINTS, LABELS)) < 0.2).astype(np.float32)
    labels[:, 3] = 0
    return store_of(rng, POINTS), store_of(rng, LABELS), csr_matrix(labels)


def plain_idf(stores) -> np.ndarray:
    texts = [text for store in stores for text in texts_of(store)]
    idf = np.zeros(VOCABULARY)
    for token in range(VOCABULARY):
        frequency = sum(token in text for text in texts)
        if frequency:
            idf[token] = 1 + np.log((1 + len(texts)) / (1 + frequency))
    return idf


def plain_rows(store, idf) -> np.ndarray:
    rows = np.zeros((len(store), VOCABULARY))
    for number, text in enumerate(texts_of(store)):
        for token in text:
            rows[number, token] += idf[token]
        rows[number] /= np.linalg.norm(rows[number]) or 1
    return rows


def test_tfidf_rows(setting):
    train, texts, _ = setting
    idf = label_features.inverse_document_frequency((train, texts), VOCABULARY)
    expected = plain_idf((train, texts))
    np.testing.assert_allclose(idf, expected, rtol=1e-6)
    assert (idf[-2:] == 0).all() and idf.dtype == np.float32
    rows = np.array([4, 0, 11])
    found = label_features.tfidf_rows(texts, rows, idf)
    assert found.dtype == np.float32 and found.has_canonical_format
    np.testing.assert_allclose(found.toarray(), plain_rows(texts, expected)[rows], atol=1e-6)


def test_pifa_vectors(setting):
    train, texts, labels = setting
    idf = label_features.inverse_document_frequency((train, texts), VOCABULARY)
    found = label_features.pifa_vectors(train, texts, labels, idf, dim=400, seed=3)
    sparse = labels.toarray().T @ plain_rows(train, idf.astype(float))
    sparse[3] = plain_rows(texts, idf.astype(float))[3]  # no points: its own text
    projection = np.random.default_rng(3).standard_normal((VOCABULARY, 400), np.float32)
    expected = sparse @ projection
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    unit = sparse / np.linalg.norm(sparse, axis=1, keepdims=True)
    assert np.abs(found @ found.T - unit @ unit.T).max() < 5 / np.sqrt(400)  # angles are kept


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_neighbour_graph_and_its_rows(degree, setting):
    train, texts, labels = setting
    graph = label_features.neighbour_graph(labels, neighbours=4, seed=2, num_threads=1)
    visits = label_graph.random_walks(labels, lambda v, own, _: v, seed=2).toarray()
    kept = np.zeros_like(visits)
    for row in range(LABELS):
        best = sorted(range(LABELS), key=lambda m, r=row: (-visits[r, m], m))[:4]
        kept[row, best] = visits[row, best]
        assert kept[row, row] > 0  # with restart 0.8 a walk visits its source
    expected = kept / np.sqrt(kept.sum(axis=1))[:, None] / np.sqrt(kept.sum(axis=0))
    np.testing.assert_allclose(graph.toarray(), expected, rtol=1e-5)
    assert graph[3].nnz == 1  # a label without points has itself alone

    idf = label_features.inverse_document_frequency((train, texts), VOCABULARY)
    options = {"tokens": 6, "degree": degree}
    blocks = list(label_features.neighbour_rows(graph, texts, idf, **options))
    ids = np.concatenate([ids for ids, _ in blocks])
    weights = np.concatenate([weights for _, weights in blocks])
    assert ids.shape == weights.shape == (LABELS, 6) and ids.dtype == np.int32
    whole = np.linalg.matrix_power(expected, degree) @ plain_rows(texts, idf.astype(float))
    for row in range(LABELS):
        best = np.sort(whole[row])[::-1][:6]
        np.testing.assert_allclose(weights[row], best, atol=1e-6)
        np.testing.assert_allclose(whole[row, ids[row]] * (weights[row] > 0), best, atol=1e-6)
