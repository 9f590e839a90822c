"""Retrieval at inference: training points and label texts near a query vote for their labels.

``s(x, l) + w_p sum_i a_i y_il + w_l sum_j b_j G_jl + w_t t(x, l)``, where s is a trained model's
score, a and b are softmaxes of ``<q(x), key> / tau`` over the m nearest training points and label
texts, y_i are a point's labels, G_j is Gandalf's target row of a label (thesis 1.6), whose diagonal
is the label itself, and t is the cosine of the TF-IDF vectors of the texts of query and label
(`xmc_jax.data.search.lexical`). RAE-XMC has labels and points as keys of one softmax; rows of the
label graph as values of a label's key are ours: Gandalf without training on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.sparse import csr_matrix

from xmc_jax.contracts import Ranker, Tokens
from xmc_jax.data.search.keys import Keys, as_rows, entries, largest, strongest_entries
from xmc_jax.data.search.lexical import PACKED, TextIndex

SUFFIX = "+retrieval"
BASE_CANDIDATES = 300  # labels of the model's own that are ranked anew
PART_CANDIDATES = 500  # labels of each part that votes
LEXICAL_CANDIDATES = 100  # labels by their words
_TOGETHER = 1 << 16  # queries searched together
_BLOCK = 1 << 10  # queries whose candidates are held at once


@dataclasses.dataclass(frozen=True)
class Setting:
    """How much retrieval counts.

    Attributes:
      neighbours: m, keys of each part that vote.
      temperature: tau.
      points: w_p, weight of the training points.
      labels: w_l, weight of the label texts.
      lexical: w_t, weight of words and pieces of words in common.
    """

    neighbours: int = 50
    temperature: float = 0.1
    points: float = 0.0
    labels: float = 0.0
    lexical: float = 0.0

    @property
    def weights(self) -> dict[str, float]:
        """Of the parts that count."""
        weights = {"points": self.points, "labels": self.labels, "lexical": self.lexical}
        return {name: weight for name, weight in weights.items() if weight}

    def __str__(self) -> str:
        if not self.weights:
            return "none"
        weights = ", ".join(f"{name} {weight:g}" for name, weight in self.weights.items())
        if not self.points and not self.labels:
            return weights
        return f"{weights} ({self.neighbours} nearest, temperature {self.temperature:g})"


class RetrievalRanker:
    """A ranker around a ranker: its first head with retrieval, and all of its own heads.

    Candidates are the first 300 labels of the model, the 500 strongest of each part that votes and
    the 100 first by words; all scores of each are exact. Without any part that counts, results are
    the model's, bit for bit. A tail weight counts once, for the sum.
    """

    def __init__(
        self,
        base: Ranker,
        parts: Mapping[str, Keys],
        setting: Setting,
        texts: TextIndex | None = None,
    ) -> None:
        """Join them.

        Args:
          base: of the model.
          parts: ``points`` and ``labels``; keys are `Ranker.key_vectors` of its first head.
          setting: weights of the parts.
          texts: of the labels.

        Raises:
          ValueError: a part that counts has no keys here.
        """
        known = {*parts, "lexical"} if texts is not None else {*parts}
        if lacking := set(setting.weights) - known:
            raise ValueError(f"retrieval: no keys for {', '.join(sorted(lacking))}.")
        self.base, self.setting = base, setting
        self.parts = {name: part for name, part in parts.items() if name in setting.weights}
        self.texts = texts if setting.lexical else None
        self.head = base.heads[0] + SUFFIX
        self.heads: tuple[str, ...] = (self.head, *base.heads)
        self.num_labels, self.probabilities = base.num_labels, base.probabilities

    def label_vectors(self, head: str) -> np.ndarray:
        """Vectors of the labels; with retrieval, the model's."""
        return self.base.label_vectors(self._of_base(head))

    def query_vectors(self, tokens: Tokens, rows: np.ndarray | None, head: str) -> np.ndarray:
        """Vectors of texts; with retrieval, the model's, behind which their terms may stand.

        Raises:
          ValueError: terms are needed, and the texts are not known.
        """
        vectors = self.base.query_vectors(tokens, rows, self._of_base(head))
        if head != self.head or self.texts is None:
            return vectors
        return self.with_terms(vectors, texts_of(tokens, rows))

    def with_terms(self, vectors: np.ndarray, texts: Sequence[str]) -> np.ndarray:
        """Queries with retrieval, of the model's vectors of texts and the texts."""
        if self.texts is None:
            return vectors
        terms = self.texts.pack(self.texts.vocabulary.vectors(texts))
        return np.concatenate([vectors, terms], axis=1)

    def key_vectors(self, queries: np.ndarray, head: str) -> np.ndarray:
        """By what queries are compared with each other: the model's."""
        return self.base.key_vectors(self._cut(queries, head)[0], self._of_base(head))

    def tail_factor(self, ids: np.ndarray) -> np.ndarray:
        """That of the model."""
        return self.base.tail_factor(ids)

    def search(self, queries: np.ndarray, head: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best candidates: scores ``[n, k]``, descending, and ids, equal ones by id."""
        if head != self.head:
            return self.base.search(queries, head, k)
        k = min(k, self.num_labels)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        ids = np.full((len(queries), k), -1, np.int32)
        for start in range(0, len(queries), _TOGETHER):
            some = slice(start, start + _TOGETHER)
            self._search(queries[some], scores[some], ids[some])
        return scores, ids

    def score(self, queries: np.ndarray, head: str, ids: np.ndarray) -> np.ndarray:
        """Exact scores ``[n, m]`` of chosen labels, candidates or not; -1 has -inf."""
        scores = self.base.score(self._cut(queries, head)[0], self._of_base(head), ids)
        if head == self.head:
            for part in self.terms(queries, head, ids, of_model=False).values():
                scores = scores + part
        return scores

    def terms(
        self, queries: np.ndarray, head: str, ids: np.ndarray, *, of_model: bool = True
    ) -> dict[str, np.ndarray]:
        """What scores of chosen labels are a sum of, ``[n, m]`` each, by part.

        Args:
          queries: as `query_vectors` gives them.
          head: one of the heads.
          ids: ``[n, m]``.
          of_model: also the model's own parts.
        """
        vectors, terms = self._cut(queries, head)
        parts = self.base.terms(vectors, self._of_base(head), ids) if of_model else {}
        if head == self.head:
            rows = np.repeat(np.arange(len(ids)), ids.shape[1])
            factor = self.base.tail_factor(ids)
            for name, (near, weight) in self._near(vectors).items():
                votes = self.parts[name].votes(near, self.setting.temperature)
                values = entries(votes, rows, ids.reshape(-1)).reshape(ids.shape)
                parts[name] = np.float32(weight) * values * factor
            if self.texts is not None:
                values = self.texts.scores(terms, rows, ids.reshape(-1)).reshape(ids.shape)
                parts["lexical"] = np.float32(self.setting.lexical) * values * factor
        return parts

    def voters(
        self, queries: np.ndarray, ids: np.ndarray, most: int
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Which keys a label's votes come from: the first ``most`` of each part that votes.

        Args:
          queries: as `query_vectors` gives them.
          ids: ``[n, k]`` labels; -1 has no voters.
          most: t.

        Returns:
          By part, rows of keys ``[n, k, t]`` (-1 = none) and what each adds to the score.
        """
        voters = {}
        for name, (near, weight) in self._near(self._cut(queries, self.head)[0]).items():
            part = self.parts[name]
            shares = weight * part.weights(near[0], self.setting.temperature)  # [n, m]
            n, m = near[1].shape
            keys = np.repeat(near[1][:, None], ids.shape[1], axis=1)  # [n, k, m]
            labels = np.broadcast_to(ids[:, :, None], keys.shape)
            chosen = np.maximum(near[1].reshape(-1), 0)
            rows = np.broadcast_to(np.arange(n * m).reshape(n, 1, m), keys.shape)
            values = entries(part.labels[chosen], rows.reshape(-1), labels.reshape(-1))
            added = values.reshape(keys.shape) * shares[:, None] * self.base.tail_factor(labels)
            added = np.where(keys >= 0, added, 0)
            order = np.argsort(-added, axis=2, kind="stable")[:, :, :most]
            keys, added = (np.take_along_axis(x, order, axis=2) for x in (keys, added))
            voters[name] = np.where(added > 0, keys, -1), added.astype(np.float32)
        return voters

    def search_cost(self, num_queries: int) -> str:
        """What exact search holds, and how many keys there are."""
        counts = [f"{len(part):,} keys of {name}" for name, part in self.parts.items()]
        if self.texts is not None:
            counts.append(f"{len(self.texts.vocabulary):,} terms")
        return f"{self.base.search_cost(num_queries)}; retrieval: {', '.join(counts)}"

    def why_not(self, head: str) -> str:
        """Why a head is not among ``heads``."""
        return self.base.why_not(head)

    def _of_base(self, head: str) -> str:
        return self.base.heads[0] if head == self.head else head

    def _cut(self, queries: np.ndarray, head: str) -> tuple[np.ndarray, csr_matrix]:
        """The model's vectors, and the terms that stand behind them."""
        if head != self.head or self.texts is None:
            return queries, csr_matrix((len(queries), 0), dtype=np.float32)
        width = queries.shape[1] - 2 * PACKED
        return np.ascontiguousarray(queries[:, :width]), self.texts.unpack(queries[:, width:])

    def _near(self, vectors: np.ndarray) -> dict[str, tuple[tuple[np.ndarray, np.ndarray], float]]:
        """The nearest keys of each part that votes, and its weight."""
        keys = self.base.key_vectors(vectors, self.base.heads[0])
        return {
            name: (part.nearest(keys, self.setting.neighbours), self.setting.weights[name])
            for name, part in self.parts.items()
        }

    def _search(self, queries: np.ndarray, scores: np.ndarray, ids: np.ndarray) -> None:
        """Fills ``scores`` and ``ids``."""
        k, head = scores.shape[1], self.base.heads[0]
        queries, terms = self._cut(queries, self.head)
        deep = min(max(k, BASE_CANDIDATES), self.num_labels)
        base_scores, base_ids = self.base.search(queries, head, deep)
        near = self._near(queries)
        for start in range(0, len(queries), _BLOCK):
            rows = slice(start, start + _BLOCK)
            votes = {
                name: self.parts[name].votes(
                    (similarities[rows], keys[rows]), self.setting.temperature
                )
                for name, ((similarities, keys), _) in near.items()
            }
            if self.texts is not None:
                votes["lexical"] = self.texts.nearest(terms[rows], LEXICAL_CANDIDATES)
            row, label, total = candidates(
                self.base, queries[rows], (base_scores[rows], base_ids[rows]), votes
            )
            factor = self.base.tail_factor(label)
            for name, (_, weight) in near.items():
                total += np.float32(weight) * entries(votes[name], row, label) * factor
            if self.texts is not None:
                values = self.texts.scores(terms[rows], row, label)
                total += np.float32(self.setting.lexical) * values * factor
            counts = np.bincount(row, minlength=len(queries[rows]))
            column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
            totals = as_rows(total, row, column, len(counts), -np.inf)
            best = np.nonzero(largest(totals, k))  # as many of each row: k, or the widest's
            totals = totals[best].reshape(len(counts), -1)
            labels = as_rows(label, row, column, len(counts), -1)[best].reshape(totals.shape)
            order = np.argsort(-totals, axis=1, kind="stable")
            scores[rows, : order.shape[1]] = np.take_along_axis(totals, order, axis=1)
            ids[rows, : order.shape[1]] = np.take_along_axis(labels, order, axis=1)


def texts_of(tokens: Tokens, rows: np.ndarray | None) -> list[str]:
    """Texts of rows (default all) of a store.

    Raises:
      ValueError: it does not know its texts.
    """
    if tokens.texts is None:
        raise ValueError("tokens without their texts: a lexical part needs the words.")
    chosen = range(len(tokens)) if rows is None else rows.tolist()
    return [tokens.texts[row] for row in chosen]


def candidates(
    base: Ranker,
    queries: np.ndarray,
    own: tuple[np.ndarray, np.ndarray],
    votes: Mapping[str, csr_matrix],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels to be ranked, with the model's score: those that it found, and those of the parts.

    Args:
      base: the model's ranker.
      queries: ``[q, v]``.
      own: scores and ids that it found.
      votes: ``[q, L]`` of each part, of which the strongest count.

    Returns:
      row, label and score, flat, by row and label.
    """
    row, place = np.nonzero(own[1] >= 0)
    known = row * base.num_labels + own[1][row, place].astype(np.int64)
    order = np.argsort(known)
    keys = [known]
    for part in votes.values():
        of_row, label = strongest_entries(part, PART_CANDIDATES)
        keys.append(of_row * base.num_labels + label)
    wanted = np.sort(np.concatenate(keys), kind="stable")
    wanted = wanted[np.diff(wanted, prepend=-1) > 0]
    row, label = np.divmod(wanted, base.num_labels)
    lacking = np.ones(len(wanted), bool)
    lacking[np.searchsorted(wanted, known)] = False
    scores = np.empty(len(wanted), np.float32)
    scores[~lacking] = own[0][own[1] >= 0][order]
    counts = np.bincount(row[lacking], minlength=len(queries))
    if counts.any():
        at = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        ids = np.full((len(queries), counts.max()), -1, np.int64)
        ids[row[lacking], at] = label[lacking]
        exact = base.score(queries, base.heads[0], ids)
        scores[lacking] = exact[row[lacking], at]
    return row, label, scores
