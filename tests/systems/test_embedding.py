"""Vectors made in chunks of one shape against one text at a time."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from xmc_jax.data.batching import packing
from xmc_jax.models.encoders.bag import BagEncoder
from xmc_jax.models.heads.unidec import UniDEC
from xmc_jax.systems.unidec.embedder import Embedder


class Store:
    """A token store of random texts in memory; row -1 is an empty text."""

    def __init__(self, lengths: list[int]) -> None:
        rng = np.random.default_rng(0)
        self._texts = [rng.integers(0, 50, size).astype(np.uint16) for size in [*lengths, 0]]

    def __len__(self) -> int:
        return len(self._texts) - 1

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        return np.array([len(self._texts[row]) for row in rows], np.int32)

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.concatenate([self._texts[row] for row in rows]), self.lengths(rows)


@pytest.mark.parametrize("row_length", [12, 16])
def test_chunks_equal_one_text_at_a_time(row_length):
    # Texts of 7 fill rows of 12 and 16 badly: fewer fit than the number of tokens promises.
    store = Store([7] * 40 + [1, 12, 3, 0, 9] * 8)
    model = UniDEC(BagEncoder(50, 8), 4)
    params = model.init(jax.random.key(0))
    embedder = Embedder(model, row_length=row_length, chunk_tokens=100, chunk_texts=30)
    found = embedder.both(params, store)
    one = jax.jit(lambda tokens: model.vectors(params, tokens))
    for row in range(len(store)):
        flat, lengths = store.gather(np.array([row]))
        vector = one(packing.one_text_a_row(flat, lengths, row_length=12))
        np.testing.assert_allclose(found[0][row], model.de(params, vector)[0], atol=1e-6)
        np.testing.assert_allclose(found[1][row], model.clf(params, vector)[0], atol=1e-6)
    np.testing.assert_array_equal(embedder.de(params, store, np.array([5, 41])), found[0][[5, 41]])


def test_few_texts_have_a_small_shape():
    store = Store([5] * 200)
    model = UniDEC(BagEncoder(50, 8), 4)
    params = model.init(jax.random.key(0))
    embedder = Embedder(model, row_length=16, chunk_tokens=32 * 64, chunk_texts=32 * 6)
    every = embedder.de(params, store)
    shapes = []
    usual = embedder._functions["de", "query"]
    embedder._functions["de", "query"] = lambda params, tokens: (
        shapes.append((len(tokens.ids), len(tokens.text_row))) or usual(params, tokens)
    )
    for rows in (np.arange(6), np.arange(7), np.arange(200)):
        np.testing.assert_allclose(embedder.de(params, store, rows), every[rows], atol=1e-6)
    # Six texts fit two rows, and are as many as the small shape takes; 200 need two chunks.
    assert shapes == [(4, 6), (128, 192), (128, 192), (128, 192)]
