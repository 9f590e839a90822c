"""Predictions to beat without a model: frequent labels, TF-IDF nearest label texts, neighbours.

SciPy only. The products of queries and labels are made in blocks of bounded size, so memory is that
of the texts' own sparse matrices however many queries and labels there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import scipy.sparse as sp

from xmc_jax.data import splits
from xmc_jax.data.graph import label_graph
from xmc_jax.data.search.lexical import TextIndex
from xmc_jax.metrics.propensity import label_frequency


def popularity(train_labels: sp.csr_matrix, num_rows: int, k: int) -> np.ndarray:
    """Returns the k most frequent training labels for every row; ties go to the lower id.

    Args:
      train_labels: ``[N, L]`` CSR of the training rows.
      num_rows: rows to predict for.
      k: labels a row; at most L are given, the rest is -1.

    Returns:
      ``[num_rows, k]`` int32, a read-only view of one row.
    """
    order = np.argsort(-label_frequency(train_labels), kind="stable")[:k]
    top = np.full(k, -1, np.int32)
    top[: len(order)] = order
    return np.broadcast_to(top, (num_rows, k))


def tfidf_nearest_label(
    queries: Sequence[str],
    labels: Sequence[str],
    k: int,
    *,
    training_texts: Iterable[str] = (),
    analyzer: str = "word",
    block: int = 20_000_000,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the k labels whose texts are nearest to each query by the cosine of TF-IDF vectors.

    Terms and their weights are those of `xmc_jax.data.search.lexical`, counted over the label and
    training texts (the measured numbers of our own data sets were made so).

    Args:
      queries: N texts. The work is the number of (query, label, shared term) triples: for millions
        of queries and labels pass a sample.
      labels: L texts.
      k: labels a query.
      training_texts: further texts to count words in.
      analyzer: "word", or "word+char" for data of one or two words a text.
      block: how many scores are held at once (12 bytes each, more only if one query has more).

    Returns:
      ``([N, k] int32 ids, [N, k] float32 scores in [0, 1])``, best first, ties to the lower id; -1
      and 0 where fewer than k labels share a term with the query.

    Raises:
      ValueError: unknown analyzer.
    """
    index = TextIndex.of(labels, training_texts, analyzer=analyzer)
    return index.search(index.vocabulary.vectors(queries), k, block=block)


def label_of_the_same_text(
    queries: Sequence[str], labels: Sequence[str], train_labels: sp.csr_matrix, k: int
) -> np.ndarray:
    """Returns the label whose text a query is, then the labels it occurs with most often.

    That is Gandalf's target of the label's text (thesis 1.6), looked up instead of learned: where
    many test texts are label texts, a model trained with Gandalf has seen their answers.

    Args:
      queries: N texts.
      labels: L texts; of labels of one text the lowest id counts.
      train_labels: ``[N', L]`` CSR of the training rows, every stored value 1.
      k: labels a query.

    Returns:
      ``[N, k]`` int32, -1 where there is no such label or it has fewer neighbours.
    """
    ids = np.full((len(queries), k), -1, np.int32)
    codes, label_codes = splits.text_codes(queries, labels)
    texts, first = np.unique(label_codes, return_index=True)
    rows = np.flatnonzero(np.isin(codes, texts))
    if rows.size == 0:
        return ids
    ids[rows, 0] = own = first[np.searchsorted(texts, codes[rows])]
    chosen, place = np.unique(own, return_inverse=True)
    neighbours, _ = label_graph.strongest(
        label_graph.conditionals(train_labels, chosen), max(1, k - 1)
    )
    ids[rows, 1:] = neighbours[place, : k - 1]
    return ids
