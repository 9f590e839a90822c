"""How much retrieval counts: weights chosen on held-out rows, by ranking anew what was found once.

Not by leaving out a training row: a model has seen its training rows, and answers them far better
than those that it will be asked for.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from xmc_jax.contracts import Ranker
from xmc_jax.data.dataset import filter_matrix
from xmc_jax.data.search.keys import Keys, entries
from xmc_jax.metrics.ranked_lists import positives
from xmc_jax.training.evaluation import depth
from xmc_jax.training.retrieval import Setting, candidates
from xmc_jax.training.training_data import EvaluationSplit

NEIGHBOURS = (20, 50, 100)
TEMPERATURES = (0.05, 0.1, 0.2)
WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0)
OF_PROBABILITIES = (10.0, 20.0)  # further weights, where a score is one
METRICS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5")
GUARDS = ("P@1", "PSP@1")  # what must not be lost
_BLOCK = 1 << 10


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
    """Settings to choose from, none of it first."""
    weights = WEIGHTS + (OF_PROBABILITIES if probabilities else ())
    settings = [Setting()]
    for m, tau in itertools.product(NEIGHBOURS, TEMPERATURES):
        for values in itertools.product(weights, repeat=len(parts)):
            if any(values):
                settings.append(Setting(m, tau, **dict(zip(parts, values))))
    return settings


def choose(
    base: Ranker,
    parts: Mapping[str, Keys],
    split: EvaluationSplit,
    inverse_propensity: np.ndarray,
    *,
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
      choose_by: one of `METRICS`.
      settings: to choose from, none of it first; default `grid`.

    Raises:
      ValueError: an unknown metric.
    """
    if choose_by not in METRICS:
        raise ValueError(f"choose_by = {choose_by!r}: expected one of {', '.join(METRICS)}.")
    settings = settings or grid(tuple(parts), probabilities=base.probabilities)
    names = tuple(dict.fromkeys((choose_by, *GUARDS)))
    values = _measure(base, parts, split, inverse_propensity, settings, names)  # name: [S, n]
    kept = np.ones(len(settings), bool)
    for name in GUARDS:
        difference = values[name] - values[name][0]
        kept &= difference.mean(axis=1) >= -_standard_error(difference)
    means = values[choose_by].mean(axis=1)
    best = int(np.argmax(np.where(kept, means, -np.inf)))
    short = values[choose_by][best] - values[choose_by]
    near = np.flatnonzero(kept & (short.mean(axis=1) <= _standard_error(short)))
    plainness = lambda i: (
        round(sum(settings[i].weights.values()), 6),
        settings[i].neighbours,
        -settings[i].temperature,
        -means[i],
    )
    chosen = min(near.tolist(), key=plainness)
    figures = lambda i: {name: 100 * float(values[name][i].mean()) for name in names}
    return Choice(settings[chosen], figures(0), figures(chosen), 100 * float(means[best]))


def _standard_error(differences: np.ndarray) -> np.ndarray:
    """Of the mean of each row of paired differences ``[S, n]``; 0 of a single pair."""
    n = differences.shape[1]
    return differences.std(axis=1, ddof=min(1, n - 1)) / math.sqrt(n)


def _measure(
    base: Ranker,
    parts: Mapping[str, Keys],
    split: EvaluationSplit,
    inverse_propensity: np.ndarray,
    settings: Sequence[Setting],
    names: Sequence[str],
) -> dict[str, np.ndarray]:
    """Each metric's share of each row under each setting, ``[S, n]``: their means are the metric.

    A row's PSP is divided by the mean of the best that could be had, as that of a data set is.
    """
    truth = positives(split.truth, split.filter_pairs)
    filters = filter_matrix(split.filter_pairs, truth.shape)
    deep = depth(split, (5,))
    queries = base.query_vectors(split.tokens, split.rows, base.heads[0])
    keys = base.key_vectors(queries, base.heads[0])
    most = max(setting.neighbours for setting in settings)
    near = {name: part.nearest(keys, most) for name, part in parts.items()}
    own = base.search(queries, base.heads[0], min(deep, base.num_labels))
    values = {name: np.zeros((len(settings), len(queries)), np.float32) for name in names}
    for start in range(0, len(queries), _BLOCK):
        rows = slice(start, start + _BLOCK)
        block = _Block(base, parts, queries[rows], near, own, rows)
        block.look_up(truth[rows], filters[rows], inverse_propensity)
        for number, setting in enumerate(settings):
            top = block.top(setting)
            for name in names:
                values[name][number, rows] = block.gain(top, name)
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
        near: Mapping[str, tuple[np.ndarray, np.ndarray]],
        own: tuple[np.ndarray, np.ndarray],
        rows: slice,
    ) -> None:
        self.parts = parts
        self.near = {name: (x[rows], ids[rows]) for name, (x, ids) in near.items()}
        # What no part votes for is ranked by the model alone: a few of it are enough.
        votes = {
            name: part.votes(self.near[name], max(TEMPERATURES)) for name, part in parts.items()
        }
        self.row, self.label, scores = candidates(
            base, queries, (own[0][rows], own[1][rows]), votes
        )
        counts = np.bincount(self.row, minlength=len(queries))
        self.column = np.arange(len(self.row)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.shape = len(queries), max(5, int(counts.max(initial=0)))
        self.scores = self._matrix(scores, -np.inf)
        self.factor = base.tail_factor(self.label)
        self.votes: tuple[Any, dict[str, np.ndarray]] = None, {}

    def look_up(self, truth: csr_matrix, filters: csr_matrix, inverse: np.ndarray) -> None:
        """Find out which candidates are right, and which are to be left out."""
        right = entries(truth, self.row, self.label) > 0
        self.hits = self._matrix(right.astype(np.float32), 0)
        self.gains = self._matrix(right * inverse[self.label], 0)
        out = self._matrix(entries(filters, self.row, self.label), 0) > 0
        self.scores = np.where(out, -np.inf, self.scores)

    def top(self, setting: Setting) -> np.ndarray:
        """Columns of the five best under a setting, best first, ``[q, 5]``."""
        key = setting.neighbours, setting.temperature
        if self.votes[0] != key:  # settings of the same votes come one after the other
            m, tau = key
            votes = {
                name: part.votes((self.near[name][0][:, :m], self.near[name][1][:, :m]), tau)
                for name, part in self.parts.items()
            }
            values = {
                name: self._matrix(entries(part, self.row, self.label) * self.factor, 0)
                for name, part in votes.items()
            }
            self.votes = key, values
        total = self.scores
        for name, weight in setting.weights.items():
            total = total + np.float32(weight) * self.votes[1][name]
        best = np.sort(np.argpartition(-total, 4, axis=1)[:, :5], axis=1)
        order = np.argsort(-np.take_along_axis(total, best, axis=1), axis=1, kind="stable")
        return np.take_along_axis(best, order, axis=1)

    def gain(self, top: np.ndarray, name: str) -> np.ndarray:
        """What each row adds to P@k or PSP@k, ``[q]``."""
        kind, k = name.split("@")
        values = self.gains if kind == "PSP" else self.hits
        return np.take_along_axis(values, top[:, : int(k)], axis=1).sum(axis=1) / int(k)

    def _matrix(self, values: np.ndarray, empty: float) -> np.ndarray:
        matrix = np.full(self.shape, empty, np.float32)
        matrix[self.row, self.column] = values
        return matrix


def _best_gain(truth: csr_matrix, inverse: np.ndarray, k: int) -> float:
    """The mean over rows of the k heaviest labels' weights, divided by k."""
    row = np.repeat(np.arange(truth.shape[0]), np.diff(truth.indptr))
    weights = inverse[truth.indices]
    order = np.lexsort((-weights, row))
    place = np.arange(len(row)) - truth.indptr[row]
    return float(weights[order][place < k].sum()) / (k * truth.shape[0]) or 1.0
