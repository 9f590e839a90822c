"""What every reader returns: texts, sparse labels and filter pairs of a data set."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_matrix

from xmc_jax.data import texts as texts_lib


@dataclasses.dataclass(frozen=True)
class Split:
    """Some points of a data set.

    Attributes:
      texts: ``n`` texts.
      labels: ``[n, L]`` float32, every stored value 1.0, ids sorted and unique in a row.
      filter_pairs: int64 ``[F, 2]`` of (row, label), sorted: pairs neither right nor wrong.
      rows: int64 ``[n]``, numbers of the rows in the split they were drawn from; None = all of it.
    """

    texts: Sequence[str]
    labels: csr_matrix
    filter_pairs: np.ndarray
    rows: np.ndarray | None = None

    def __len__(self) -> int:
        return self.labels.shape[0]

    def take(self, rows: np.ndarray) -> Split:
        """Returns these rows (sorted, unique), filter pairs numbered anew."""
        rows = np.asarray(rows, dtype=np.int64)
        new_row = np.full(len(self), -1, dtype=np.int64)
        new_row[rows] = np.arange(len(rows))
        pairs = np.array(self.filter_pairs, dtype=np.int64).reshape(-1, 2)
        pairs[:, 0] = new_row[pairs[:, 0]]
        return Split(
            texts=texts_lib.take(self.texts, rows),
            labels=self.labels[rows],
            filter_pairs=pairs[pairs[:, 0] >= 0],
            rows=rows if self.rows is None else self.rows[rows],
        )


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set, as read.

    Attributes:
      name: catalog name where known, else the folder's or file's name.
      train: training points.
      test: test points.
      label_texts: ``L`` texts; a label's id is its place here. Labels without points are kept.
      digest: hexadecimal digest of texts, labels and filter pairs, whatever layout they came in.
      notes: what the reader met and repaired, with file and line.
    """

    name: str
    train: Split
    test: Split
    label_texts: Sequence[str]
    digest: str
    notes: tuple[str, ...] = ()


def make_dataset(
    name: str, train: Split, test: Split, label_texts: Sequence[str], notes: Sequence[str] = ()
) -> Dataset:
    """Returns the data set with its digest computed."""
    return Dataset(name, train, test, label_texts, digest(train, test, label_texts), tuple(notes))


def filter_matrix(pairs: np.ndarray, shape: tuple[int, int]) -> csr_matrix:
    """Returns filter pairs ``[F, 2]`` as a boolean matrix of that shape, repeated pairs merged."""
    pairs = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    entries = np.ones(len(pairs), dtype=bool), (pairs[:, 0], pairs[:, 1])
    matrix = csr_matrix(entries, shape=shape)
    matrix.sum_duplicates()
    return matrix


def digest(train: Split, test: Split, label_texts: Sequence[str]) -> str:
    """Returns a blake2b digest (32 hexadecimal digits) of all texts, labels and filter pairs."""
    state = hashlib.blake2b(digest_size=16)
    for name, texts in (("train", train.texts), ("test", test.texts), ("labels", label_texts)):
        state.update(f"{name} {len(texts)}\n".encode())
        for block in texts_lib.encoded_blocks(texts):
            state.update(block)
    for split in (train, test):
        state.update(f"matrix {split.labels.shape} {len(split.filter_pairs)}\n".encode())
        state.update(np.ascontiguousarray(split.labels.indptr, dtype=np.int64).data)
        state.update(np.ascontiguousarray(split.labels.indices, dtype=np.int32).data)
        state.update(np.ascontiguousarray(split.filter_pairs, dtype=np.int64).data)
    return state.hexdigest()
