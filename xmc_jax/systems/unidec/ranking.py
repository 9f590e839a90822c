"""Rankers: how a trained model ranks all labels for a text; evaluation and prediction ask them."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from xmc_jax.data.search import index as indexes
from xmc_jax.systems.embedding import Embedder
from xmc_jax.training import evaluation
from xmc_jax.training.refresh import choose_index


class Ranker(Protocol):
    """What evaluation and prediction need of a trained model.

    Attributes:
      heads: names of its scores, the one to be chosen by first.
      num_labels: L.
    """

    heads: tuple[str, ...]
    num_labels: int

    def label_vectors(self, head: str) -> np.ndarray:
        """Vectors of the labels, ``[L, w]``."""

    def query_vectors(self, tokens: Any, rows: np.ndarray | None, head: str) -> np.ndarray:
        """Vectors of texts (default all of the store), ``[n, v]``, which `search` takes."""

    def search(self, queries: np.ndarray, head: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k labels of highest score: scores ``[n, k]``, descending, and ids (-1 = none)."""

    def memory(self, num_queries: int) -> str:
        """What exact search holds, in words."""


def tail_bonus(weight: float, inverse_propensity: np.ndarray) -> np.ndarray | None:
    """Returns ``t ln w_l``, which labels' scores get to rank rare labels higher; None for t = 0.

    For a frugal classifier, whose score is ``ln p``, t = 1 ranks by ``p w_l``, the label's
    share of the expected PSP@k (Jain et al., KDD 2016); of cosines, t is in units of cosine. Below
    0, frequent labels are ranked higher.

    Args:
      weight: ``t``.
      inverse_propensity: ``w_l``, ``[L]``.

    Returns:
      ``[L]`` float32, or None.
    """
    return (weight * np.log(inverse_propensity)).astype(np.float32) if weight else None


class DualRanker:
    """UniDEC and DePSL: inner products of unit vectors, by an index of the label vectors."""

    def __init__(
        self,
        embedder: Embedder,
        params: Any,
        table: Any,
        label_tokens: Any,
        *,
        bonus: np.ndarray | None = None,
        kind: str = "exact",
        seed: int = 0,
        keep_indexes: bool = False,
    ) -> None:
        """Embed the labels; an index is built when a head is first searched.

        Args:
          embedder: of the model.
          params: its parameters.
          table: ``[L, d]`` as stored in the train state, or None.
          label_tokens: token store of the label texts.
          bonus: ``[L]``, what every head's scores of a label get (`tail_bonus`), or None.
          kind: index: exact, hnsw, ivf or auto.
          seed: of the index.
          keep_indexes: keep every head's index, not the last one alone.

        Raises:
          ValueError: a bonus, and an index that is not exact.
        """
        if bonus is not None and kind not in ("exact", "auto"):
            raise ValueError(f"index {kind!r}: with a tail weight, labels are searched exactly.")
        self._bonus = bonus
        self._embedder, self._params = embedder, params
        self._kind, self._seed, self._keep = kind, seed, keep_indexes
        self._labels = evaluation.label_vectors(embedder, params, table, label_tokens)
        self._indexes: dict[str, indexes.Index] = {}
        self.heads, self.num_labels = self._labels.heads, len(self._labels.de)

    def label_vectors(self, head: str) -> np.ndarray:
        """Unit vectors of a head; concat: both side by side."""
        return self._labels.of(head)

    def query_vectors(self, tokens: Any, rows: np.ndarray | None, head: str) -> np.ndarray:
        """Unit vectors, to be multiplied with `label_vectors`."""
        return evaluation.query_vectors(self._embedder, self._params, tokens, rows, head)

    def search(self, queries: np.ndarray, head: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores and ids by the index of the head."""
        if head not in self._indexes:
            if not self._keep:
                self._indexes.clear()  # before the next one is made: it may be large
            vectors = self._labels.of(head)
            kind = "exact"
            if self._bonus is None:
                kind = choose_index(self._kind, len(queries), *vectors.shape)
            self._indexes[head] = indexes.Index.build(
                vectors, kind, seed=self._seed, bonus=self._bonus
            )
        return self._indexes[head].search(queries, min(k, self.num_labels))

    def memory(self, num_queries: int) -> str:
        """What exact search of the widest head holds."""
        return evaluation.exact_search_memory(self._labels, num_queries)
