"""A data set as a run reads it: tokens, training labels without held-out rows, filters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
from absl import logging
from scipy.sparse import csr_matrix

from xmc_jax import catalog, files
from xmc_jax.contracts import Side, TextForm, Tokenizer, Tokens
from xmc_jax.data import splits
from xmc_jax.data.dataset import Dataset, filter_matrix
from xmc_jax.data.readers import formats, layouts
from xmc_jax.data.readers.reading import AS_FOUND, Reading
from xmc_jax.data.tokens import token_stores
from xmc_jax.data.tokens.token_stores import TokenStore
from xmc_jax.data.tokens.tokenizer import backend_of, unknown_lines, unknown_share
from xmc_jax.training.options import TrainingOptions

BLOCK_TEXTS = 1 << 16


@dataclasses.dataclass(frozen=True)
class EvaluationSplit:
    """Rows to be evaluated: ``rows`` of ``tokens``, their truth, and pairs to ignore."""

    tokens: Tokens
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
      first_text_row: None, or N where label texts are points too (`augmentation`): rows
        ``N`` to ``N + L - 1`` of ``train_tokens``, ``labels`` and ``filters`` are theirs, and
        ``labels`` holds soft targets.
      label_queries: label texts in the form of queries, where that differs from ``label_tokens``.
    """

    dataset: Dataset
    entry: catalog.Entry
    train_tokens: Tokens
    label_tokens: Tokens
    labels: csr_matrix
    filters: csr_matrix | None
    held_out: EvaluationSplit | None
    test: EvaluationSplit | None
    first_text_row: int | None = None
    label_queries: Tokens | None = None

    @property
    def rows(self) -> np.ndarray:
        """Training rows that have a label."""
        return np.flatnonzero(np.diff(self.labels.indptr) > 0)

    @property
    def num_labels(self) -> int:
        """L."""
        return self.labels.shape[1]

    @property
    def original_labels(self) -> csr_matrix:
        """``labels`` of the points that are no label texts."""
        return self.labels[: self.first_text_row]

    @property
    def most_evaluated(self) -> int:
        """Rows of the larger split that is evaluated; 0 where there is none."""
        splits = [split for split in (self.held_out, self.test) if split is not None]
        return max((len(split.rows) for split in splits), default=0)

    def joined_tokens(self) -> token_stores.JoinedTokens:
        """Training texts, then label texts as queries."""
        texts = self.label_tokens if self.label_queries is None else self.label_queries
        return token_stores.JoinedTokens(self.train_tokens, texts)

    def read_by(self, read: Callable[[Tokens], Tokens]) -> TrainingData:
        """The data set with what a system reads in the place of tokens, such as hidden states."""
        train, held_out, test = read(self.train_tokens), self.held_out, self.test
        if held_out is not None:
            held_out = dataclasses.replace(held_out, tokens=train)
        if test is not None:
            test = dataclasses.replace(test, tokens=read(test.tokens))
        return dataclasses.replace(
            self,
            train_tokens=train,
            label_tokens=read(self.label_tokens),
            held_out=held_out,
            test=test,
            label_queries=None if self.label_queries is None else read(self.label_queries),
        )


def read_dataset(
    name: str,
    folder: str,
    *,
    max_length: int | None,
    share_of: str = "rows",
    propensity: str = "",
    reading: Reading = AS_FOUND,
) -> tuple[Dataset, catalog.Entry, Path]:
    """Find and read a data set.

    Args:
      name: of the catalog, or a folder or file.
      folder: of the data set, or a root that holds it; "" = where it is usually looked for.
      max_length: tokens of a text, for the entry of own data.
      share_of: what a test split is a share of (`xmc_jax.data.splits.hold_out`).
      propensity: ``A,B`` for the entry; "" = as it is.
      reading: what is set of how people's own files are read.

    Returns:
      The data set, its catalog entry, and the folder or file it came from.
    """
    source = formats.find_folder(name, folder or None)
    entry = catalog.find(name) or catalog.find(layouts.detect(source).name)
    text = entry.text if entry else "title"
    copies = files.cache_folder() / "datasets"
    dataset = formats.load(
        formats.ensure_canonical(
            source, text=text, cache_root=copies, share_of=share_of, reading=reading
        ),
        text=text,
        share_of=share_of,
        reading=reading,
    )
    entry = entry or catalog.find(dataset.name)  # a canonical form keeps the name
    if entry is None:
        num_rows, num_labels = dataset.train.labels.shape
        entry = catalog.default_entry(
            dataset.name, num_rows, len(dataset.test), num_labels, max_length
        )
    return dataset, catalog.with_propensity(entry, propensity), source


def load(
    options: TrainingOptions, dataset: Dataset, entry: catalog.Entry, tokenizer: Tokenizer
) -> TrainingData:
    """Tokenise and hold out.

    Args:
      options: of the run.
      dataset: texts and matrices.
      entry: its catalog facts.
      tokenizer: of the run.

    Raises:
      ValueError: no training row has a label.
    """
    train, test, form = dataset.train, dataset.test, options.text_form
    store = functools.partial(token_store, form, tokenizer)
    train_tokens = store(train.texts, "query")
    label_tokens = store(dataset.label_texts, "label")
    labels, held_out = hold_out_rows(options, dataset, train_tokens)
    filters = None
    if len(train.filter_pairs) and options.mask_filter_pairs:
        filters = filter_matrix(train.filter_pairs, train.labels.shape)
        # What is neither right nor wrong is no answer, and no evidence for the label graph.
        if (barred := labels.multiply(filters)).nnz:
            labels = csr_matrix(labels - barred)
    test_split = None
    if len(test.texts):
        rows = np.arange(len(test.texts))
        test_split = EvaluationSplit(
            store(test.texts, "query"), rows, test.labels, test.filter_pairs
        )
    if not labels.nnz:
        raise ValueError(
            f"{dataset.name}: no training row has a label; nothing can be learned from it."
        )
    data = TrainingData(
        dataset, entry, train_tokens, label_tokens, labels, filters, held_out, test_split
    )
    if options.gandalf.enabled and form.query_prefix != form.label_prefix:
        data = dataclasses.replace(data, label_queries=store(dataset.label_texts, "query"))
    return data


def lost(max_length: int, data: TrainingData, tokenizer: Tokenizer) -> list[str]:
    """Lines that say how much of the texts the tokens leave out: cut off, or unknown.

    Args:
      max_length: tokens of a text.
      data: as `load` gives it.
      tokenizer: of the run.
    """
    lines, shares = [], {}
    stores = {"training": data.train_tokens, "label": data.label_tokens}
    if data.test is not None:
        stores["test"] = data.test.tokens
    for name, store in stores.items():
        full = float((store.lengths() >= max_length).mean())
        if full > 0.02 and name != "test":
            lines.append(
                f"{full:.0%} of the {name} texts fill max_length = {max_length} tokens; "
                "what is longer was cut off"
            )
        counts = token_counts((store,), tokenizer.get_vocab_size())
        shares[name] = unknown_share(backend_of(tokenizer), counts)
    return [*lines, *unknown_lines(shares)]


class Prefixed(Sequence[str]):
    """Texts, each behind a prefix; nothing is copied."""

    def __init__(self, texts: Sequence[str], prefix: str) -> None:
        """Remember both."""
        self._texts, self._prefix = texts, prefix

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[str]:
        return (self._prefix + text for text in self._texts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return Prefixed(self._texts[index], self._prefix)
        return self._prefix + self._texts[index]


def with_prefix(form: TextForm, texts: Sequence[str], side: Side) -> Sequence[str]:
    """Texts as a side's encoder is given them."""
    prefix = form.label_prefix if side == "label" else form.query_prefix
    return Prefixed(texts, prefix) if prefix else texts


def token_store(
    form: TextForm, tokenizer: Tokenizer, texts: Sequence[str], side: Side
) -> TokenStore:
    """Token ids of texts, from the cache or made once."""
    store = token_stores.tokenize(
        with_prefix(form, texts, side),
        tokenizer,
        max_length=form.max_length,
        folder=files.cache_folder() / "tokens",
        special_tokens=form.special_tokens,
    )
    return store.of(texts)


def hold_out_rows(
    options: TrainingOptions, dataset: Dataset, train_tokens: TokenStore
) -> tuple[csr_matrix, EvaluationSplit | None]:
    """Training labels with the held-out rows emptied, and those rows (DESIGN: Numbers)."""
    # Rows count from 0 here, also where the training split was itself drawn from one file.
    train = dataclasses.replace(dataset.train, rows=None)
    if options.held_out_share <= 0:
        return train.labels, None
    notes: list[str] = []
    kept, held_out = splits.hold_out(
        train,
        dataset.label_texts,
        share=options.held_out_share,
        max_rows=options.held_out_rows,
        seed=options.seed,
        share_of=options.share_of,
        notes=notes,
    )
    for note in notes:
        logging.info("%s", note)
    if not len(held_out):
        return train.labels, None
    assert kept.rows is not None and held_out.rows is not None, "hold_out numbers them"
    labels = placed_rows(kept.labels, kept.rows, train.labels.shape[0])
    removed = train.labels.nnz - labels.nnz - held_out.labels.nnz
    logging.info("held out: %d rows; %d reverse pairs left training", len(held_out), removed)
    return labels, EvaluationSplit(
        train_tokens, held_out.rows, held_out.labels, held_out.filter_pairs
    )


def placed_rows(matrix: csr_matrix, rows: np.ndarray, num_rows: int) -> csr_matrix:
    """A matrix of ``num_rows`` rows whose ``rows`` (ascending) are given, the others empty."""
    sizes = np.zeros(num_rows, np.int64)
    sizes[rows] = np.diff(matrix.indptr)
    indptr = np.concatenate([[0], np.cumsum(sizes)])
    return csr_matrix((matrix.data, matrix.indices, indptr), shape=(num_rows, matrix.shape[1]))


def only_rows(matrix: csr_matrix, rows: np.ndarray) -> csr_matrix:
    """The matrix with all other rows emptied; ``rows`` ascend."""
    return placed_rows(matrix[rows], rows, matrix.shape[0])


def token_counts(stores: Sequence[Tokens], vocab_size: int) -> np.ndarray:
    """Occurrences of every token, ``[vocab_size]`` int64; reads in blocks."""
    counts = np.zeros(vocab_size, np.int64)
    for store in stores:
        for start in range(0, len(store), BLOCK_TEXTS):
            rows = np.arange(start, min(start + BLOCK_TEXTS, len(store)))
            counts += np.bincount(store.gather(rows)[0], minlength=vocab_size)
    return counts
