"""Held-out rows and train/test splits from which answers cannot be read backwards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.sparse import csr_matrix

from xmc_jax.data.dataset import Split

SHARES = ("rows", "texts")
RETURNED_TEXTS = 20_000
_ROW_BLOCK = 1 << 18
_SHOWN = 60  # characters of a text in a note


def hold_out(
    split: Split,
    label_texts: Sequence[str],
    *,
    share: float = 0.05,
    max_rows: int = 10_000,
    seed: int,
    share_of: str = "rows",
    notes: list[str] | None = None,
) -> tuple[Split, Split]:
    """Draws a share of the rows, texts with all of theirs, and removes reverse pairs from the rest.

    Rows of equal text land on one side, so that no held-out row can be answered by heart; those
    without labels, those without text, and those of a text that fills more than the share stay in
    training. Where held-out x has label y, while the training row with y's text lists a label with
    x's text, that pair leaves training. Texts are compared as by `text_codes`.

    Args:
      split: ``n`` points.
      label_texts: ``L`` texts.
      share: share of the rows, in [0, 1); 0 = none.
      max_rows: at most so many rows.
      seed: same seed, same rows.
      share_of: "texts" counts a text once, however many rows it has, as runs of before did: a
        frequent one, or none at all, may be drawn and be most of the rows.
      notes: gets a line for each text that fills more than the share.

    Returns:
      (training, held-out) splits; their ``rows`` are the numbers the rows had in ``split``.

    Raises:
      ValueError: share or max_rows out of range.
    """
    if not 0 <= share < 1:
        raise ValueError(
            f"share: found {share}; expected 0 <= share < 1, the part that is held out."
        )
    if max_rows < 0:
        raise ValueError(f"max_rows: found {max_rows}; expected 0 or more.")
    codes, (blank,) = text_codes(split.texts, [""])
    labelled = np.flatnonzero(np.diff(split.labels.indptr) > 0)
    sizes = np.bincount(codes[labelled], minlength=codes.max(initial=-1) + 1)
    _, first = np.unique(codes[labelled], return_index=True)
    candidates = labelled[np.sort(first)]  # a row for each text
    units = len(codes) if share_of == "rows" else len(np.unique(codes))
    # One text with labels stays in training at least.
    wanted = min(round(share * units), max_rows)
    generator = np.random.default_rng(seed)
    drawn = codes[generator.choice(candidates, min(wanted, max(len(candidates) - 1, 0)), False)]
    if share_of == "texts":
        drawn = drawn[np.cumsum(sizes[drawn]) <= max_rows]
    else:
        if notes is not None and wanted:
            notes += _too_frequent(split, candidates, sizes[codes[candidates]], wanted)
        others = generator.permutation(np.setdiff1d(codes[candidates], drawn))
        order = np.concatenate([drawn, others])
        drawn = _fitting(order[order != blank], sizes, wanted)[: len(candidates) - 1]
    return _part(split, labelled[np.isin(codes[labelled], drawn)], label_texts)


def _fitting(order: np.ndarray, sizes: np.ndarray, room: int) -> np.ndarray:
    """Those of ``order`` that find room one after the other; what does not is passed over."""
    taken = [order[:0]]
    while len(order := order[sizes[order] <= room]):
        fit = int(np.searchsorted(np.cumsum(sizes[order]), room, side="right"))
        taken.append(order[:fit])
        room -= int(sizes[order[:fit]].sum())
        order = order[fit:]
    return np.concatenate(taken)


def _too_frequent(split: Split, first: np.ndarray, sizes: np.ndarray, wanted: int) -> Iterator[str]:
    """A line for each text of more than ``wanted`` rows, given by a row; of many for three."""
    if wanted < 2:
        return
    larger = np.flatnonzero(sizes > wanted)
    for place in larger[:3]:
        text = split.texts[first[place]].strip()
        yield (
            f"{sizes[place]:,} of {len(split):,} rows have the text {text[:_SHOWN]!r}: more than "
            f"the {wanted:,} that are held out, so they stay in training"
        )
    if len(larger) > 3:
        yield f"so do the rows of {len(larger) - 3:,} more texts"


def _part(split: Split, drawn: np.ndarray, label_texts: Sequence[str]) -> tuple[Split, Split]:
    """(the other rows without reverse pairs, the drawn rows), each in the order of rows."""
    rest = np.ones(len(split), dtype=bool)
    rest[drawn] = False
    train, held_out = split.take(np.flatnonzero(rest)), split.take(np.sort(drawn))
    return remove_reverse_pairs(train, held_out, label_texts), held_out


def remove_reverse_pairs(train: Split, other: Split, label_texts: Sequence[str]) -> Split:
    """Returns ``train`` without the pairs that give away answers of ``other``."""
    if len(other) == 0:
        return train
    positions, _ = reverse_pairs(train, other, label_texts)
    if len(positions) == 0:
        return train
    labels = train.labels.copy()
    labels.data[positions] = 0
    labels.eliminate_zeros()
    return Split(train.texts, labels, train.filter_pairs, train.rows)


def reverse_pairs(
    train: Split, other: Split, label_texts: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Finds pairs (t, z) of ``train`` and (x, y) of ``other`` with t = y and z = x, as texts.

    Returns:
      places of those pairs among the stored values of ``train.labels`` and ``other.labels``:
      int64, sorted.
    """
    codes = text_codes(train.texts, other.texts, label_texts)
    return reverse_pairs_by_code(train.labels, other.labels, *codes)


def reverse_pairs_by_code(
    train_labels: csr_matrix,
    other_labels: csr_matrix,
    train_codes: np.ndarray,
    other_codes: np.ndarray,
    label_codes: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The same, texts given by their `text_codes`."""
    num_codes = 1 + max(int(c.max(initial=0)) for c in (train_codes, other_codes, label_codes))
    # Only rows whose text is also a label text can take part.
    is_label = np.zeros(num_codes, dtype=bool)
    is_label[label_codes] = True
    places, source, target = _pairs(other_labels, is_label[other_codes], other_codes, label_codes)
    is_target, is_source = np.zeros(num_codes, dtype=bool), np.zeros(num_codes, dtype=bool)
    is_target[target], is_source[source] = True, True
    train_places, train_source, train_target = _pairs(
        train_labels, is_target[train_codes], train_codes, label_codes, is_source
    )
    forward = train_source * num_codes + train_target
    backward = target * num_codes + source
    return train_places[np.isin(forward, backward)], places[np.isin(backward, forward)]


def returned(labels: csr_matrix, codes: np.ndarray, label_codes: np.ndarray) -> tuple[int, int]:
    """How many pairs of a text and a label could be listed the other way round, and how many are.

    Args:
      labels: ``[n, L]``.
      codes, label_codes: of the texts and of the labels' texts (`text_codes`).

    Returns:
      Pairs whose text is a label and whose label is a text, and those of them that are there both
      ways; of a seeded sample of texts where there are many.
    """
    num_codes = 1 + max(int(c.max(initial=0)) for c in (codes, label_codes))
    is_both, chosen = np.zeros(num_codes, dtype=bool), np.zeros(num_codes, dtype=bool)
    known = np.intersect1d(codes, label_codes)
    is_both[known] = True
    if len(known) > RETURNED_TEXTS:
        known = np.random.default_rng(0).choice(known, RETURNED_TEXTS, replace=False)
    chosen[known] = True
    _, source, target = _pairs(labels, chosen[codes], codes, label_codes, is_both)
    _, back_source, back_target = _pairs(labels, is_both[codes], codes, label_codes, chosen)
    both = np.isin(source * num_codes + target, back_target * num_codes + back_source)
    other = source != target  # a text that is its own label says nothing
    return int(other.sum()), int((both & other).sum())


def _pairs(
    labels: csr_matrix,
    wanted_rows: np.ndarray,
    row_codes: np.ndarray,
    label_codes: np.ndarray,
    wanted_codes: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (place, code of the row's text, code of the label's text) of the wanted entries."""
    places, sources, targets = [], [], []
    for start in range(0, labels.shape[0], _ROW_BLOCK):
        bounds = np.asarray(labels.indptr[start : start + _ROW_BLOCK + 1], dtype=np.int64)
        rows = np.repeat(np.arange(start, start + len(bounds) - 1), np.diff(bounds))
        codes = label_codes[labels.indices[bounds[0] : bounds[-1]]]
        wanted = wanted_rows[rows]
        if wanted_codes is not None:
            wanted &= wanted_codes[codes]
        kept = np.flatnonzero(wanted)
        places.append(bounds[0] + kept)
        sources.append(row_codes[rows[kept]])
        targets.append(codes[kept])
    none = np.zeros(0, dtype=np.int64)
    place, source, target = (np.concatenate([*v, none]) for v in (places, sources, targets))
    return place, source, target


def text_codes(*groups: Sequence[str]) -> tuple[np.ndarray, ...]:
    """Numbers the texts of several sequences so that equal numbers mean equal texts.

    Equal means equal after ``strip().casefold()``; texts are compared by 64-bit digests, whose
    chance to clash among ten million texts is below 1e-5.

    Returns:
      one int64 array a sequence; numbers count from 0 without gaps.
    """
    hashes = [_hashes(texts) for texts in groups]
    _, codes = np.unique(np.concatenate(hashes), return_inverse=True)
    cuts = np.cumsum([len(values) for values in hashes])[:-1]
    return tuple(np.split(codes.astype(np.int64), cuts))


def _hashes(texts: Sequence[str]) -> np.ndarray:
    blake2b = hashlib.blake2b
    digests = b"".join(
        blake2b(text.strip().casefold().encode("utf-8", "replace"), digest_size=8).digest()
        for text in texts
    )
    return np.frombuffer(digests, dtype=np.uint64)
