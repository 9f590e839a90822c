"""A data set as a run reads it: tokens, training labels without held-out rows, filters."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from ml_collections import ConfigDict
from scipy.sparse import csr_matrix

from xmc_jax import catalog
from xmc_jax.data import splits
from xmc_jax.data.dataset import Dataset, filter_matrix
from xmc_jax.data.readers import formats, layouts
from xmc_jax.data.tokens import token_stores
from xmc_jax.data.tokens.token_stores import JoinedTokens, TokenStore

WORD_VECTORS = ("bag", "inception")  # encoders of token vectors alone; others are pretrained


@dataclasses.dataclass(frozen=True)
class EvaluationSplit:
    """Rows to be evaluated: ``rows`` of ``tokens``, their truth, and pairs to ignore."""

    tokens: TokenStore
    rows: np.ndarray
    truth: csr_matrix
    filter_pairs: np.ndarray


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """What training and evaluation read.

    Attributes:
      dataset: texts and original matrices; propensities come from ``dataset.train.labels``.
      entry: catalog facts, or the defaults of own data.
      train_tokens: of all training texts, held-out ones included.
      label_tokens: of the label texts.
      labels: ``[N, L]``, held-out rows emptied and pairs that would answer them removed.
      filters: ``[N, L]`` boolean, or None where there are none (or they are not to be masked).
      held_out: the rows that choose the checkpoint, or None.
      test: the test rows, or None where the data set has none.
      first_text_row: None, or N where label texts are points too (``xmc_jax.training.augmentation``): rows
        ``N`` to ``N + L - 1`` of ``train_tokens``, ``labels`` and ``filters`` are theirs, and
        ``labels`` holds soft targets.
    """

    dataset: Dataset
    entry: catalog.Entry
    train_tokens: TokenStore | JoinedTokens
    label_tokens: TokenStore
    labels: csr_matrix
    filters: csr_matrix | None
    held_out: EvaluationSplit | None
    test: EvaluationSplit | None
    first_text_row: int | None = None

    @property
    def rows(self) -> np.ndarray:
        """Training rows that have a label."""
        return np.flatnonzero(np.diff(self.labels.indptr) > 0)

    @property
    def num_labels(self) -> int:
        """L."""
        return self.labels.shape[1]


def cache_folder() -> Path:
    """``$XMC_CACHE``, else a folder of the user's cache: canonical data sets and token stores."""
    root = os.environ.get("XMC_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "xmc_jax"


def read_dataset(config: ConfigDict) -> tuple[Dataset, catalog.Entry, Path]:
    """Find and read the data set of a configuration.

    Returns:
      The data set, its catalog entry, and the folder or file it came from.
    """
    source = formats.find_folder(config.dataset, config.data or None)
    entry = catalog.find(config.dataset) or catalog.find(layouts.detect(source).name)
    text = entry.text if entry else "title"
    folder = formats.ensure_canonical(source, text=text, cache_root=cache_folder() / "datasets")
    dataset = formats.load(folder, text=text)
    entry = entry or catalog.find(dataset.name)  # a canonical form keeps the name
    if entry is None:
        num_rows, num_labels = dataset.train.labels.shape
        entry = catalog.default_entry(
            dataset.name, num_rows, len(dataset.test), num_labels, config.max_length
        )
    return dataset, entry, source


def load(
    config: ConfigDict, dataset: Dataset, entry: catalog.Entry, tokenizer: Any
) -> TrainingData:
    """Tokenise and hold out.

    Args:
      config: a resolved configuration.
      dataset: texts and matrices.
      entry: its catalog facts.
      tokenizer: of the run.

    Raises:
      ValueError: no training row has a label.
    """
    train, test = dataset.train, dataset.test
    store = functools.partial(token_store, config, tokenizer)
    train_tokens, label_tokens = store(train.texts), store(dataset.label_texts)
    labels, held_out = hold_out(config, dataset, train_tokens)
    filters = None
    if len(train.filter_pairs) and config.mask_filter_pairs:
        filters = filter_matrix(train.filter_pairs, train.labels.shape)
        # What is neither right nor wrong is no answer, and no evidence for the label graph.
        if (barred := labels.multiply(filters)).nnz:
            labels = csr_matrix(labels - barred)
    test_split = None
    if len(test.texts):
        rows = np.arange(len(test.texts))
        test_split = EvaluationSplit(store(test.texts), rows, test.labels, test.filter_pairs)
    if not labels.nnz:
        raise ValueError(
            f"{dataset.name}: no training row has a label; nothing can be learned from it."
        )
    return TrainingData(
        dataset, entry, train_tokens, label_tokens, labels, filters, held_out, test_split
    )


def lost(config: ConfigDict, data: TrainingData, tokenizer: Any) -> list[str]:
    """Lines that say how much of the texts the tokens leave out; none where it is next to nothing.

    Args:
      config: a resolved configuration.
      data: as `load` gives it.
      tokenizer: of the run.
    """
    lines = []
    unknown = tokenizer.token_to_id("[UNK]")
    for name, store in (("training", data.train_tokens), ("label", data.label_tokens)):
        full = float((store.lengths() >= config.max_length).mean())
        if full > 0.02:
            lines.append(
                f"{full:.0%} of the {name} texts fill max_length = {config.max_length} tokens; "
                "what is longer was cut off"
            )
        if unknown is not None:
            counts = token_counts((store,), tokenizer.get_vocab_size())
            share = counts[unknown] / max(1, counts.sum())
            if share > 0.02:
                lines.append(f"{share:.0%} of the {name} texts' tokens are unknown ([UNK])")
    return lines


def token_store(config: ConfigDict, tokenizer: Any, texts: Sequence[str]) -> TokenStore:
    """Token ids of texts, from the cache or made once."""
    return token_stores.tokenize(
        texts,
        tokenizer,
        max_length=config.max_length,
        folder=cache_folder() / "tokens",
        special_tokens=config.encoder.name not in WORD_VECTORS,
    )


def hold_out(
    config: ConfigDict, dataset: Dataset, train_tokens: TokenStore
) -> tuple[csr_matrix, EvaluationSplit | None]:
    """Training labels with the held-out rows emptied, and those rows (DESIGN: Numbers)."""
    # Rows count from 0 here, also where the training split was itself drawn from one file.
    train = dataclasses.replace(dataset.train, rows=None)
    if config.held_out_share <= 0:
        return train.labels, None
    kept, held_out = splits.hold_out(
        train,
        dataset.label_texts,
        share=config.held_out_share,
        max_rows=config.held_out_rows,
        seed=config.seed,
    )
    if not len(held_out):
        return train.labels, None
    labels = scatter_rows(kept.labels, kept.rows, train.labels.shape[0])
    removed = train.labels.nnz - labels.nnz - held_out.labels.nnz
    logging.info("held out: %d rows; %d reverse pairs left training", len(held_out), removed)
    return labels, EvaluationSplit(
        train_tokens, held_out.rows, held_out.labels, held_out.filter_pairs
    )


def scatter_rows(matrix: csr_matrix, rows: np.ndarray, num_rows: int) -> csr_matrix:
    """A matrix of ``num_rows`` rows whose ``rows`` (ascending) are given, the others empty."""
    sizes = np.zeros(num_rows, np.int64)
    sizes[rows] = np.diff(matrix.indptr)
    indptr = np.concatenate([[0], np.cumsum(sizes)])
    return csr_matrix((matrix.data, matrix.indices, indptr), shape=(num_rows, matrix.shape[1]))


def only_rows(matrix: csr_matrix, rows: np.ndarray) -> csr_matrix:
    """The matrix with all other rows emptied; ``rows`` ascend."""
    return scatter_rows(matrix[rows], rows, matrix.shape[0])


def token_counts(stores: Sequence[TokenStore], vocab_size: int) -> np.ndarray:
    """Occurrences of every token, ``[vocab_size]`` int64; reads in blocks."""
    counts = np.zeros(vocab_size, np.int64)
    block = 1 << 24
    for store in stores:
        for start in range(0, len(store.ids), block):
            counts += np.bincount(store.ids[start : start + block], minlength=vocab_size)
    return counts
