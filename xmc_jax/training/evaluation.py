"""From a model and a split to metrics: for each head, filtered and unfiltered, and by frequency."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from scipy.sparse import csr_matrix

from xmc_jax import metrics
from xmc_jax.data.search import index as indexes
from xmc_jax.systems.embedding import Embedder
from xmc_jax.tables import label_pool
from xmc_jax.training.training_data import EvaluationSplit

if TYPE_CHECKING:
    from xmc_jax.systems.unidec.ranking import Ranker

HEADS = ("concat", "de", "clf")


@dataclasses.dataclass(frozen=True)
class LabelVectors:
    """Both heads' label vectors, unit rows.

    Attributes:
      de: ``[L, d]`` Phi_D(z_l).
      clf: ``[L, d]`` N(Psi_l), or None for a dual encoder alone.
    """

    de: np.ndarray
    clf: np.ndarray | None

    @property
    def heads(self) -> tuple[str, ...]:
        """Heads there are, the one to be chosen by first."""
        return HEADS if self.clf is not None else ("de",)

    def of(self, head: str) -> np.ndarray:
        """Vectors that a head's index holds; concat = [de, clf] (preprint 3.3)."""
        return _join(head, self.de, self.clf)


def label_vectors(
    embedder: Embedder, params: Any, table: Any, label_tokens: Any, num_labels: int | None = None
) -> LabelVectors:
    """Embed all label texts and normalise the classifier table.

    Args:
      embedder: of the model.
      params: its parameters.
      table: ``[L, d]`` as stored in the train state, or None.
      label_tokens: token store of the label texts.
      num_labels: unused rows past it are left out.
    """
    de = embedder.de(params, label_tokens)
    clf = None
    if table is not None:
        clf = l2norm(np.asarray(label_pool.from_storage(table))[:num_labels])
    return LabelVectors(de, clf)


def query_vectors(
    embedder: Embedder, params: Any, tokens: Any, rows: np.ndarray | None, head: str
) -> np.ndarray:
    """Query vectors of a head, to be searched against ``LabelVectors.of(head)``."""
    if head == "de":
        return embedder.de(params, tokens, rows)
    de, clf = embedder.both(params, tokens, rows)
    return _join(head, de, l2norm(clf))


def l2norm(x: np.ndarray) -> np.ndarray:
    """Unit rows; a zero row stays zero."""
    x = np.asarray(x, np.float32)
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    return x / np.where(norm > 0, norm, 1.0)


def _join(head: str, de: np.ndarray, clf: np.ndarray | None) -> np.ndarray:
    if head not in HEADS:
        raise ValueError(f"head {head!r}: expected one of {HEADS}.")
    if head == "de":
        return de
    if clf is None:
        raise ValueError(f"head {head!r}: this run has no classifier, only the head 'de'.")
    return clf if head == "clf" else np.concatenate([de, clf], axis=1)


def predict_split(
    ranker: Ranker, split: EvaluationSplit, head: str, *, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Top ``k`` labels of a split's rows: ids ``[n, k]`` (-1 = none) and scores."""
    queries = ranker.query_vectors(split.tokens, split.rows, head)
    scores, ids = ranker.search(queries, head, k)
    return ids, scores


def exact_search_memory(labels: LabelVectors, num_queries: int) -> str:
    """What exact search of the widest head holds, and where it takes minutes how many."""
    d = (1 if labels.clf is None else 2) * labels.de.shape[1]
    size = 4 * d * (len(labels.de) + num_queries) / 2**30
    accelerator = jax.default_backend() != "cpu"
    work = num_queries, len(labels.de), 2 * d if labels.clf is not None else d  # three heads or one
    seconds = indexes.exact_seconds(*work, accelerator=accelerator)
    return (
        f"exact search over {len(labels.de):,} labels x {d}: {size:.2f} GiB of vectors, and "
        "about 60 MB a core (128 MB on an accelerator) for blocks of scores"
        + (f"; about {seconds / 60:.0f} minutes" if seconds > 60 else "")
    )


def depth(split: EvaluationSplit, ks: tuple[int, ...]) -> int:
    """How many predictions a row needs so that filtering leaves max(ks)."""
    pairs = split.filter_pairs
    longest = int(np.bincount(pairs[:, 0]).max()) if len(pairs) else 0
    return max(ks) + longest


def report(
    ids: np.ndarray,
    split: EvaluationSplit,
    inverse_propensity: np.ndarray,
    ks: tuple[int, ...],
) -> dict[str, dict[str, float]]:
    """Metrics in percent, with filter pairs left out and without that."""
    options = dict(inverse_propensity=inverse_propensity, ks=ks)
    return {
        "filtered": metrics.evaluate(ids, split.truth, filter_pairs=split.filter_pairs, **options),
        "unfiltered": metrics.evaluate(ids, split.truth, **options),
    }


def evaluate(
    ranker: Ranker,
    split: EvaluationSplit,
    train_labels: csr_matrix,
    inverse_propensity: np.ndarray,
    *,
    heads: tuple[str, ...] | None = None,
    ks: tuple[int, ...] = (1, 3, 5),
    keep: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Evaluate a model on a split.

    Args:
      ranker: of the model.
      split: what is evaluated.
      train_labels: original training matrix, for the bins.
      inverse_propensity: ``[L]``.
      heads: which; default all there are.
      ks: cut-offs.
      keep: if given, gets ``{head: (ids, scores)}``.

    Returns:
      ``{"heads": {head: {"filtered": {...}, "unfiltered": {...}}}, "bins": {head: [...]}}``.
    """
    bins = metrics.frequency_bins(train_labels)
    frequency = np.asarray(train_labels.sum(axis=0)).ravel()
    result: dict[str, Any] = {"heads": {}, "bins": {}}
    for head in heads or ranker.heads:
        deep = max(depth(split, (*ks, 5)), 100 if keep is not None else 0)  # bins look at 5
        ids, scores = predict_split(ranker, split, head, k=deep)
        result["heads"][head] = report(ids, split, inverse_propensity, ks)
        result["bins"][head] = metrics.evaluate_bins(
            ids, split.truth, bins, frequency=frequency, filter_pairs=split.filter_pairs
        )
        if keep is not None:
            keep[head] = (ids, scores)
    return result
