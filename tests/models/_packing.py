"""A plain-loop packer for the tests of the models: first fit in order of the texts."""

from __future__ import annotations

import numpy as np

from xmc_jax.contracts import TokenBatch


def random_texts(seed: int, count: int, vocab_size: int, max_length: int) -> list[np.ndarray]:
    """Texts of 1 to max_length random token ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, rng.integers(1, max_length + 1)) for _ in range(count)]


def pack(texts: list[np.ndarray], row_length: int, padding: int = 0) -> TokenBatch:
    """Several texts a row; an empty text gets segment 0; padding is filled with ``padding``."""
    rows: list[list[np.ndarray]] = []
    text_row, text_segment = [], []
    for text in texts:
        if len(text) == 0:
            text_row.append(0)
            text_segment.append(0)
            continue
        fits = [r for r, row in enumerate(rows) if sum(map(len, row)) + len(text) <= row_length]
        r = fits[0] if fits else len(rows)
        if r == len(rows):
            rows.append([])
        rows[r].append(text)
        text_row.append(r)
        text_segment.append(len(rows[r]))
    ids = np.full((len(rows), row_length), padding, np.uint32)
    segment_ids = np.zeros((len(rows), row_length), np.uint8)
    positions = np.full((len(rows), row_length), padding, np.uint16)
    for r, row in enumerate(rows):
        start = 0
        for s, text in enumerate(row, start=1):
            end = start + len(text)
            ids[r, start:end] = text
            segment_ids[r, start:end] = s
            positions[r, start:end] = np.arange(len(text))
            start = end
    return TokenBatch(
        ids, segment_ids, positions, np.array(text_row, np.int32), np.array(text_segment, np.uint8)
    )


def one_a_row(texts: list[np.ndarray], row_length: int) -> TokenBatch:
    """Every text in a row of its own."""
    batches = [pack([text], row_length) for text in texts]
    ids, segment_ids, positions = (np.concatenate([b[i] for b in batches]) for i in range(3))
    count = len(texts)
    return TokenBatch(ids, segment_ids, positions, np.arange(count), np.ones(count, np.uint8))
