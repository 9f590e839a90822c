"""How UniDEC and DePSL rank: inner products of unit vectors, by an index of the label vectors."""

from __future__ import annotations

import dataclasses
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from absl import logging

from xmc_jax.contracts import Tokens
from xmc_jax.data.search import index as indexes
from xmc_jax.systems.unidec.embedder import Embedder
from xmc_jax.tables import label_pool

HEADS = ("concat", "de", "clf")
SCORED_NUMBERS = 1 << 20  # of gathered label vectors, held at once by a thread


@dataclasses.dataclass(frozen=True)
class LabelVectors:
    """Both heads' label vectors, unit rows.

    Attributes:
      de: ``[L, d]`` Phi_D(z_l).
      clf: ``[L, d]`` N(Psi_l), or None for a dual encoder alone.
    """

    de: np.ndarray
    clf: np.ndarray | None

    def of(self, head: str) -> np.ndarray:
        """Vectors that a head's index holds; concat = [de, clf] (preprint 3.3)."""
        return _join(head, self.de, self.clf)

    def parts(self, head: str) -> dict[str, np.ndarray]:
        """The arrays of which `of` is made, side by side, by head: they may be gigabytes."""
        if head == "concat" and self.clf is not None:
            return {"de": self.de, "clf": self.clf}
        return {head: self.of(head)}


def label_vectors(
    embedder: Embedder,
    params: Any,
    table: Any,
    label_tokens: Tokens,
    num_labels: int | None = None,
    *,
    unseen: np.ndarray | None = None,
    unseen_weight: float = 0.0,
) -> LabelVectors:
    """Embed all label texts and normalise the classifier table.

    Args:
      embedder: of the model.
      params: its parameters.
      table: ``[L, d]`` as stored in the train state, or None.
      label_tokens: token store of the label texts.
      num_labels: unused rows past it are left out.
      unseen: labels whose vector of the classifier is ``unseen_weight N(CLF(z_l))`` instead.
      unseen_weight: c.
    """
    de = embedder.de(params, label_tokens, side="label")
    clf = None
    if table is not None:
        clf = unit_rows(np.asarray(label_pool.from_storage(table))[:num_labels])
        if unseen is not None and len(unseen):
            _, vectors = embedder.both(params, label_tokens, unseen)
            clf[unseen] = np.float32(unseen_weight) * unit_rows(vectors)
    return LabelVectors(de, clf)


def query_vectors(
    embedder: Embedder, params: Any, tokens: Tokens, rows: np.ndarray | None, head: str
) -> np.ndarray:
    """Query vectors of a head, to be searched against ``LabelVectors.of(head)``."""
    if head == "de":
        return embedder.de(params, tokens, rows)
    de, clf = embedder.both(params, tokens, rows)
    return _join(head, de, unit_rows(clf))


def unit_rows(x: np.ndarray) -> np.ndarray:
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


def _products(queries: np.ndarray, vectors: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """``<queries_n, vectors_ids[n, m]>``, ``[n, m]``; gathered rows are held in blocks."""
    products = np.empty(ids.shape, np.float32)
    step = max(1, SCORED_NUMBERS // max(1, ids.shape[1] * queries.shape[1]))

    def multiply(start: int) -> None:
        some = slice(start, start + step)
        rows = np.take(vectors, ids[some], axis=0, mode="wrap")  # -1 is the last one
        np.einsum("nd,nmd->nm", queries[some], rows, out=products[some])

    with ThreadPoolExecutor(os.cpu_count() or 1) as workers:
        list(workers.map(multiply, range(0, len(ids), step)))
    return products


def choose_index(kind: str, num_queries: int, num_labels: int, dim: int) -> str:
    """Resolve ``auto`` and say what was chosen."""
    if kind != "auto":
        return kind
    accelerator = jax.default_backend() != "cpu"
    kind, seconds = indexes.choose(num_queries, num_labels, dim, accelerator=accelerator)
    logging.info(
        "index: %s for %d queries x %d labels x %d, about %.0f s",
        kind,
        num_queries,
        num_labels,
        dim,
        seconds,
    )
    return kind


def exact_search_cost(labels: LabelVectors, num_queries: int) -> str:
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


class DualRanker:
    """UniDEC and DePSL: inner products of unit vectors, by an index of the label vectors."""

    probabilities = False

    def __init__(
        self,
        embedder: Embedder,
        params: Any,
        table: Any,
        label_tokens: Tokens,
        *,
        bonus: np.ndarray | None = None,
        kind: str = "exact",
        seed: int = 0,
        keep_indexes: bool = False,
        why_not: str = "the run has no classifier",
        unseen: np.ndarray | None = None,
        unseen_weight: float = 0.0,
    ) -> None:
        """Labels are embedded when they are first needed, a head's index when it is searched.

        Args:
          embedder: of the model.
          params: its parameters.
          table: ``[L, d]`` as stored in the train state, or None.
          label_tokens: token store of the label texts.
          bonus: ``[L]``, what every head's scores of a label get for being rare, or None.
          kind: index: exact, hnsw, ivf or auto.
          seed: of the index.
          keep_indexes: keep every head's index, not the last one alone.
          why_not: why there is no other head, where there is no table.
          unseen, unseen_weight: of `label_vectors`.

        Raises:
          ValueError: a bonus, and an index that is not exact.
        """
        if bonus is not None and kind not in ("exact", "auto"):
            raise ValueError(f"index {kind!r}: with a tail weight, labels are searched exactly.")
        self._bonus = bonus
        self._embedder, self._params = embedder, params
        self._kind, self._seed, self._keep = kind, seed, keep_indexes
        vectors = functools.partial(label_vectors, unseen=unseen, unseen_weight=unseen_weight)
        self._embed = functools.partial(vectors, embedder, params, table, label_tokens)
        self._indexes: dict[str, indexes.Index] = {}
        self.heads: tuple[str, ...] = HEADS if table is not None else ("de",)
        self.num_labels = len(label_tokens)
        self._why_not = why_not

    @functools.cached_property
    def _labels(self) -> LabelVectors:
        return self._embed()

    def label_vectors(self, head: str) -> np.ndarray:
        """Unit vectors of a head; concat: both side by side."""
        return self._labels.of(head)

    def query_vectors(self, tokens: Tokens, rows: np.ndarray | None, head: str) -> np.ndarray:
        """Unit vectors, to be multiplied with `label_vectors`."""
        return query_vectors(self._embedder, self._params, tokens, rows, head)

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

    def search_cost(self, num_queries: int) -> str:
        """What exact search of the widest head holds."""
        return exact_search_cost(self._labels, num_queries)

    def score(self, queries: np.ndarray, head: str, ids: np.ndarray) -> np.ndarray:
        """Inner products with chosen labels, and their bonus; -1 has -inf."""
        terms = self.terms(queries, head, ids).values()
        return np.where(ids >= 0, sum(terms, np.float32(0)), np.float32(-np.inf))

    def terms(self, queries: np.ndarray, head: str, ids: np.ndarray) -> dict[str, np.ndarray]:
        """The inner products of each head, and what labels get for being rare."""
        parts, first = {}, 0
        for name, vectors in self._labels.parts(head).items():
            columns = queries[:, first : first + vectors.shape[1]]
            parts[name] = _products(columns, vectors, ids)
            first += vectors.shape[1]
        if self._bonus is not None:
            parts["rarity"] = self._bonus[ids]
        return parts

    def key_vectors(self, queries: np.ndarray, head: str) -> np.ndarray:
        """The vectors themselves: what is near in them has the labels' scores in common."""
        return queries

    def tail_factor(self, ids: np.ndarray) -> np.ndarray:
        """1: the bonus is a term."""
        return np.ones(ids.shape, np.float32)

    def why_not(self, head: str) -> str:
        """Why a head is not among ``heads``."""
        return self._why_not if head in HEADS else "no run has such a head"
