"""How much retrieval counts: weights chosen on held-out rows, by ranking anew what was found once.

Not by leaving out a training row: a model has seen its training rows, and answers them far better
than those that it will be asked for.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from xmc_jax.contracts import Ranker
from xmc_jax.data.dataset import filter_matrix
from xmc_jax.data.search.keys import Keys, entries
from xmc_jax.data.search.lexical import TextIndex
from xmc_jax.metrics.ranked_lists import positives
from xmc_jax.training.evaluation import depth
from xmc_jax.training.retrieval import (
    BASE_CANDIDATES,
    LEXICAL_CANDIDATES,
    Setting,
    candidates,
    texts_of,
)
from xmc_jax.training.training_data import EvaluationSplit

NEIGHBOURS = (20, 50, 100)
TEMPERATURES = (0.05, 0.1, 0.2)
WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0)
OF_PROBABILITIES = (10.0, 20.0)  # further weights, where a score is one
METRICS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5")
GUARDS = ("P@1", "PSP@1")  # what must not be lost
LEXICAL = "lexical"
_TOP = 5  # labels that a metric reads
_BLOCK = 1 << 10
_PAIRS = 1 << 20  # of candidates that are compared at once
_LOWEST = np.float32(-1e9)  # in the place of minus infinity, of which there is no difference
_ROUNDING = 1e-4  # of sums of scores and votes


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen, and by what figures.

    Attributes:
      setting: the weights.
      without: metrics on the held-out rows without retrieval, in percent.
      chosen: with it.
      best: the best that any setting had by the metric of the choice.
    """

    setting: Setting
    without: dict[str, float]
    chosen: dict[str, float]
    best: float


def grid(parts: Sequence[str], *, probabilities: bool = False) -> list[Setting]:
    """Settings to choose from, none of it first; those of the same m and tau stand together."""
    weights = WEIGHTS + (OF_PROBABILITIES if probabilities else ())
    every = [dict(zip(parts, values)) for values in itertools.product(weights, repeat=len(parts))]
    votes = lambda values: any(values[name] for name in values if name != LEXICAL)
    plain = Setting()  # m and tau do not matter where nothing votes
    alone = [
        Setting(plain.neighbours, plain.temperature, **values)
        for values in every
        if not votes(values)
    ]
    return alone + [
        Setting(m, tau, **values)
        for m, tau in itertools.product(NEIGHBOURS, TEMPERATURES)
        for values in every
        if votes(values)
    ]


def choose(
    base: Ranker,
    parts: Mapping[str, Keys],
    split: EvaluationSplit,
    inverse_propensity: np.ndarray,
    *,
    texts: TextIndex | None = None,
    choose_by: str = "P@5",
    settings: Sequence[Setting] | None = None,
) -> Choice:
    """The setting that held-out rows ask for.

    Out are those that lose more than one paired standard error of P@1 or PSP@1 against none. Of
    those within one of the best remaining ``choose_by`` it is the one of least weight in all, then
    of fewest neighbours, then of the highest temperature.

    Args:
      base: of the model.
      parts: keys, none of which is made of these rows.
      split: the held-out rows.
      inverse_propensity: ``[L]``.
      texts: of the labels, for a lexical part.
      choose_by: one of `METRICS`.
      settings: to choose from, none of it first; default `grid`.

    Raises:
      ValueError: an unknown metric.
    """
    if choose_by not in METRICS:
        raise ValueError(f"choose_by = {choose_by!r}: expected one of {', '.join(METRICS)}.")
    if settings is None:
        names = (*parts, LEXICAL) if texts is not None else tuple(parts)
        settings = grid(names, probabilities=base.probabilities)
    names = tuple(dict.fromkeys((choose_by, *GUARDS)))
    values = _measure(  # name: [S, n]
        base, parts, split, inverse_propensity, settings, names, texts=texts
    )
    kept = np.ones(len(settings), bool)
    for name in GUARDS:
        gained, error = _compared(values[name], 0)
        kept &= gained >= -error
    means = values[choose_by].mean(axis=1)
    best = int(np.argmax(np.where(kept, means, -np.inf)))
    gained, error = _compared(values[choose_by], best)
    near = np.flatnonzero(kept & (gained >= -error))
    plainness = lambda i: (
        round(sum(settings[i].weights.values()), 6),
        settings[i].neighbours,
        -settings[i].temperature,
        -means[i],
    )
    chosen = min(near.tolist(), key=plainness)
    figures = lambda i: {name: 100 * float(values[name][i].mean()) for name in names}
    return Choice(settings[chosen], figures(0), figures(chosen), 100 * float(means[best]))


def _compared(values: np.ndarray, other: int) -> tuple[np.ndarray, np.ndarray]:
    """What rows of ``[S, n]`` have more than another one, in the mean, and its standard error.

    The differences are paired; the error of a single pair is 0.
    """
    n = values.shape[1]
    differences = (row - values[other] for row in values)  # one at a time: all are gigabytes
    pairs = np.array([(row.mean(), row.std(ddof=min(1, n - 1))) for row in differences])
    return pairs[:, 0], pairs[:, 1] / math.sqrt(n)


def _measure(
    base: Ranker,
    parts: Mapping[str, Keys],
    split: EvaluationSplit,
    inverse_propensity: np.ndarray,
    settings: Sequence[Setting],
    names: Sequence[str],
    *,
    texts: TextIndex | None = None,
) -> dict[str, np.ndarray]:
    """Each metric's share of each row under each setting, ``[S, n]``: their means are the metric.

    A row's PSP is divided by the mean of the best that could be had, as that of a data set is.
    """
    truth = positives(split.truth, split.filter_pairs)
    filters = filter_matrix(split.filter_pairs, truth.shape)
    deep = depth(split, (5,))
    queries = base.query_vectors(split.tokens, split.rows, base.heads[0])
    keys = base.key_vectors(queries, base.heads[0])
    if texts is not None:
        packed = texts.pack(texts.vocabulary.vectors(texts_of(split.tokens, split.rows)))
        deep = max(deep, BASE_CANDIDATES)  # some of them have a word in common with the query
    most = max(setting.neighbours for setting in settings)
    highest = {name: max(getattr(x, name) for x in settings) for name in (*parts, LEXICAL)}
    near = {name: part.nearest(keys, most) for name, part in parts.items()}
    own = base.search(queries, base.heads[0], min(deep, base.num_labels))
    values = {name: np.zeros((len(settings), len(queries)), np.float32) for name in names}
    for start in range(0, len(queries), _BLOCK):
        rows = slice(start, start + _BLOCK)
        votes = {name: (x[rows], ids[rows]) for name, (x, ids) in near.items()}
        words = None if texts is None else (texts, texts.unpack(packed[rows]))
        of_model = own[0][rows], own[1][rows]
        block = _Block(base, parts, queries[rows], of_model, votes, words, highest)
        block.look_up(truth[rows], filters[rows], inverse_propensity)
        number = 0
        for (m, tau), group in itertools.groupby(settings, lambda x: (x.neighbours, x.temperature)):
            contest = block.contest(m, tau)
            for setting in group:
                top = contest.top(setting)
                for name in names:
                    values[name][number, rows] = contest.gain(top, name)
                number += 1
    for name in names:
        if name.startswith("PSP"):
            values[name] /= _best_gain(truth, inverse_propensity, int(name.split("@")[1]))
    return values


class _Block:
    """Candidates of some rows, as matrices ``[q, W]``; columns of a row by label."""

    def __init__(
        self,
        base: Ranker,
        parts: Mapping[str, Keys],
        queries: np.ndarray,
        own: tuple[np.ndarray, np.ndarray],
        near: Mapping[str, tuple[np.ndarray, np.ndarray]],
        words: tuple[TextIndex, csr_matrix] | None,
        most: Mapping[str, float],
    ) -> None:
        self.parts, self.near, self.most = parts, near, most
        # What no part gives anything is ranked by the model alone: a few of it are enough.
        votes = {name: part.votes(near[name], max(TEMPERATURES)) for name, part in parts.items()}
        if words is not None:
            votes[LEXICAL] = words[0].nearest(words[1], LEXICAL_CANDIDATES)
        self.row, self.label, scores = candidates(base, queries, own, votes)
        counts = np.bincount(self.row, minlength=len(queries))
        self.column = np.arange(len(self.row)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.shape = len(queries), max(_TOP, int(counts.max(initial=0)))
        self.scores = self._matrix(scores, -np.inf)
        self.factor = base.tail_factor(self.label)
        self.lexical: dict[str, np.ndarray] = {}
        if words is not None:
            cosines = words[0].scores(words[1], self.row, self.label)
            self.lexical[LEXICAL] = self._matrix(cosines * self.factor, 0)

    def look_up(self, truth: csr_matrix, filters: csr_matrix, inverse: np.ndarray) -> None:
        """Find out which candidates are right, and which are to be left out."""
        right = entries(truth, self.row, self.label) > 0
        self.hits = self._matrix(right.astype(np.float32), 0)
        self.gains = self._matrix(right * inverse[self.label], 0)
        out = self._matrix(entries(filters, self.row, self.label), 0) > 0
        self.scores = np.where(out, -np.inf, self.scores)

    def contest(self, m: int, tau: float) -> _Contest:
        """Those that some weights put among the first five, by m neighbours and temperature tau."""
        values = dict(self.lexical)
        for name, part in self.parts.items():
            votes = part.votes((self.near[name][0][:, :m], self.near[name][1][:, :m]), tau)
            values[name] = self._matrix(entries(votes, self.row, self.label) * self.factor, 0)
        columns = _possible(self.scores, list(values.values()), [self.most[x] for x in values])
        take = lambda matrix: np.take_along_axis(matrix, columns, axis=1)
        values = {name: take(matrix) for name, matrix in values.items()}
        return _Contest(take(self.scores), values, take(self.hits), take(self.gains))

    def _matrix(self, values: np.ndarray, empty: float) -> np.ndarray:
        matrix = np.full(self.shape, empty, np.float32)
        matrix[self.row, self.column] = values
        return matrix


class _Contest(NamedTuple):
    """Candidates of some rows, ``[q, C]`` each; columns of a row by label.

    Attributes:
      scores: of the model.
      values: of each part, without its weight.
      hits: 1 where a label is right.
      gains: its inverse propensity there.
    """

    scores: np.ndarray
    values: dict[str, np.ndarray]
    hits: np.ndarray
    gains: np.ndarray

    def top(self, setting: Setting) -> np.ndarray:
        """Columns of the five best under a setting, best first, ``[q, 5]``."""
        total = self.scores
        for name, weight in setting.weights.items():
            total = total + np.float32(weight) * self.values[name]
        best = np.sort(np.argpartition(-total, _TOP - 1, axis=1)[:, :_TOP], axis=1)
        order = np.argsort(-np.take_along_axis(total, best, axis=1), axis=1, kind="stable")
        return np.take_along_axis(best, order, axis=1)

    def gain(self, top: np.ndarray, name: str) -> np.ndarray:
        """What each row adds to P@k or PSP@k, ``[q]``."""
        kind, k = name.split("@")
        values = self.gains if kind == "PSP" else self.hits
        return np.take_along_axis(values, top[:, : int(k)], axis=1).sum(axis=1) / int(k)


def _possible(
    scores: np.ndarray, values: Sequence[np.ndarray], most: Sequence[float]
) -> np.ndarray:
    """Columns that may be among the first five under some weights, ascending, ``[q, C]``.

    Five others keep a candidate out, that are above it whatever the weights are: so far by their
    score that what it has more of, at the highest weights, does not make up for it. Few of a
    thousand remain, so that thousands of weights can be tried.

    Args:
      scores: of the model, ``[q, W]``.
      values: of each part, at least 0.
      most: the highest weight of each part.
    """
    scores = np.maximum(scores, _LOWEST)
    values = [np.float32(weight) * value for weight, value in zip(most, values)]
    highest = scores + sum(values, np.float32(0))
    least = np.partition(scores, -_TOP, axis=1)[:, -_TOP, None]
    columns, scores, *values = _kept(highest >= least, _numbers(scores), scores, *values)
    strong = np.zeros(scores.shape, bool)  # the first ones of some weights are above most others
    for shares in itertools.product((0, 0.2), repeat=len(values)):
        total = scores + sum(np.float32(share) * x for share, x in zip(shares, values))
        first = np.argpartition(-total, _TOP - 1, axis=1)[:, :_TOP]
        np.put_along_axis(strong, first, True, axis=1)
    for _ in range(2):
        possible = _above(scores, values, strong) < _TOP
        columns, scores, *values = _kept(possible, columns, scores, *values)
        strong = np.ones(columns.shape, bool)  # then all that remain
    return columns


def _numbers(matrix: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(matrix.shape[1]), matrix.shape)


def _kept(wanted: np.ndarray, *matrices: np.ndarray) -> list[np.ndarray]:
    """The wanted columns of each row, in order; a few others where a row has fewer than others."""
    most = max(_TOP, int(wanted.sum(axis=1).max(initial=0)))
    chosen = np.sort(np.argsort(~wanted, axis=1, kind="stable")[:, :most], axis=1)
    return [np.take_along_axis(matrix, chosen, axis=1) for matrix in matrices]


def _above(scores: np.ndarray, values: Sequence[np.ndarray], strong: np.ndarray) -> np.ndarray:
    """How many of the ``strong`` columns are above each column under all weights up to 1."""
    count, width = int(strong.sum(axis=1).max(initial=0)), strong.shape[1]
    (of, real, *others) = _kept(strong, strong, scores, *values)
    number = np.zeros(strong.shape, np.int32)
    step = max(1, _PAIRS // (max(_TOP, count) * width))
    for start in range(0, len(strong), step):
        rows = slice(start, start + step)
        ahead = real[rows, :, None] - scores[rows, None, :]  # [q, count, W]
        for other, value in zip(others, values):
            ahead -= np.maximum(value[rows, None, :] - other[rows, :, None], 0)
        number[rows] = ((ahead > _ROUNDING) & of[rows, :, None]).sum(axis=1)
    return number


def _best_gain(truth: csr_matrix, inverse: np.ndarray, k: int) -> float:
    """The mean over rows of the k heaviest labels' weights, divided by k."""
    row = np.repeat(np.arange(truth.shape[0]), np.diff(truth.indptr))
    weights = inverse[truth.indices]
    order = np.lexsort((-weights, row))
    place = np.arange(len(row)) - truth.indptr[row]
    return float(weights[order][place < k].sum()) / (k * truth.shape[0]) or 1.0
