"""The exact ranking of a frugal classifier."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np

from xmc_jax.contracts import Tokens, Weights
from xmc_jax.data.search.exact_search import blocked_search, host_device
from xmc_jax.systems.frugal.embedder import FrugalEmbedder, whole
from xmc_jax.systems.frugal.source import GraphRows

SCORED_NUMBERS = 1 << 24  # of gathered label vectors, held at once


class FrugalRanker:
    """Exact ranking by ``p(label) p(cluster of the label)^gamma``, over labels in blocks.

    Labels stand in the order of their clusters, so that a block of labels needs a block of
    clusters: all is scored once, in bounded memory. Sums of log-probabilities are compared, for
    products of probabilities near 1 are equal in 32 bits. The papers' gamma is 1; below that,
    clusters count for less: on small data sets theirs is the part that generalises worse.
    """

    heads: tuple[str, ...] = ("clf",)
    probabilities = True

    def __init__(
        self,
        embedder: FrugalEmbedder,
        weights: Weights,
        label_tokens: Tokens,
        graph: GraphRows | None,
        *,
        cluster_weight: float = 1.0,
        bonus: np.ndarray | None = None,
        kind: str = "exact",
        seed: int = 0,
        keep_indexes: bool = False,
    ) -> None:
        """Labels' vectors are computed when they are first needed.

        Args:
          embedder: of the model.
          weights: of a checkpoint or a state.
          label_tokens: label texts.
          graph: rows of the label graph, or None.
          cluster_weight: gamma.
          bonus: ``[L]``, what a label's ``ln p`` gets (`tail_bonus`), or None.
          kind: exact or auto; the score is no inner product, so there is no other index.
          seed: not read; there is nothing random.
          keep_indexes: not read.

        Raises:
          ValueError: another kind, or labels that were not there in training.
        """
        del seed, keep_indexes
        if kind not in ("exact", "auto"):
            raise ValueError(
                f"index {kind!r}: a frugal classifier is ranked exactly; take 'exact'."
            )
        params = whole(weights)
        clusters = np.asarray(params["phase"]["label_clusters"])
        if len(clusters) != len(label_tokens):
            raise ValueError(
                f"{len(label_tokens)} labels for a classifier of {len(clusters)}: labels that came "
                "after training have no cluster and no weights here. Train anew, or take UniDEC."
            )
        self._embedder, self._weights, self.num_labels = embedder, weights, len(clusters)
        self._order = np.argsort(clusters, kind="stable").astype(np.int32)
        self._clusters = clusters[self._order]
        self._embed = functools.partial(embedder.label_vectors, weights, label_tokens, graph)
        bonus = np.zeros(len(clusters), np.float32) if bonus is None else bonus
        self._bonus_of, self._bonus = bonus, bonus[self._order]
        meta = params["meta"]
        self._kernel, self._bias = np.asarray(meta["kernel"]), np.asarray(meta["bias"])
        self._offset = np.float32(params["offset"])
        self._cluster_weight = np.float32(cluster_weight)
        self._smallest = max(1, int(np.bincount(clusters).min(initial=len(clusters))))
        self._on_host = host_device() or contextlib.nullcontext

    @functools.cached_property
    def _vectors(self) -> np.ndarray:
        """In the order of clusters."""
        return self._embed()[self._order]

    def label_vectors(self, head: str) -> np.ndarray:
        """Vectors of the extreme classifier, ``[L, D]``."""
        vectors = np.empty_like(self._vectors)
        vectors[self._order] = self._vectors
        return vectors

    def query_vectors(self, tokens: Tokens, rows: np.ndarray | None, head: str) -> np.ndarray:
        """Extreme and meta features side by side, ``[n, 2 D]``."""
        meta, extreme = self._embedder.both(self._weights, tokens, rows)
        return np.concatenate([extreme, meta], axis=1)

    def search(self, queries: np.ndarray, head: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k most probable labels: probabilities ``[n, k]`` and ids, equal ones by id.

        With a bonus, they are multiplied with its exponential and so may be above 1.
        """
        k = min(k, self.num_labels)
        scores, places = blocked_search(queries, self.num_labels, k, self._score)
        ids = np.where(places >= 0, self._order[places], -1).astype(np.int32)
        order = np.lexsort((ids, -scores), axis=1)
        scores, ids = (np.take_along_axis(array, order, axis=1) for array in (scores, ids))
        return np.exp(scores), ids

    def score(self, queries: np.ndarray, head: str, ids: np.ndarray) -> np.ndarray:
        """Probabilities of chosen labels, times the exponential of their bonus; -1 has -inf."""
        extreme, meta = np.split(queries, 2, axis=1)
        place = np.empty_like(self._order)
        place[self._order] = np.arange(len(place))
        scores = np.full(ids.shape, -np.inf, np.float32)
        step = max(1, SCORED_NUMBERS // max(1, ids.shape[1] * extreme.shape[1]))
        for start in range(0, len(ids), step):
            some, rows = place[ids[start : start + step]], slice(start, start + step)
            logits = np.einsum("nd,nmd->nm", extreme[rows], self._vectors[some]) + self._offset
            cluster = self._clusters[some]
            of_clusters = np.einsum("nd,dnm->nm", meta[rows], self._kernel[:, cluster])
            of_clusters = of_clusters + self._bias[cluster]
            logs = _log_sigmoid(logits) + self._cluster_weight * _log_sigmoid(of_clusters)
            logs = logs + self._bonus[some]
            scores[rows] = np.where(ids[rows] >= 0, np.exp(logs), -np.inf)
        return scores

    def terms(self, queries: np.ndarray, head: str, ids: np.ndarray) -> dict[str, np.ndarray]:
        """The probabilities, which are no sum."""
        return {head: self.score(queries, head, ids)}

    def key_vectors(self, queries: np.ndarray, head: str) -> np.ndarray:
        """Unit rows of the features that labels are compared with, ``[n, D]``."""
        extreme, _ = np.split(queries, 2, axis=1)
        lengths = np.linalg.norm(extreme, axis=1, keepdims=True)
        return extreme / np.where(lengths > 0, lengths, 1)

    def tail_factor(self, ids: np.ndarray) -> np.ndarray:
        """The exponential of the labels' bonus."""
        return np.exp(self._bonus_of[ids])

    def why_not(self, head: str) -> str:
        """Why a head is not among ``heads``."""
        return "a frugal classifier has no other"

    def _score(self, queries: np.ndarray, begin: int, end: int) -> np.ndarray:
        """Log-probabilities of a block of labels, with their bonus."""
        number = min(len(self._bias), -(-(end - begin) // self._smallest) + 1)
        first = min(int(self._clusters[begin]), len(self._bias) - number)
        with self._on_host():
            scores = _log_probabilities(
                queries,
                self._vectors[begin:end],
                self._kernel[:, first : first + number],
                self._bias[first : first + number],
                self._clusters[begin:end] - first,
                self._bonus[begin:end],
                self._offset,
                self._cluster_weight,
            )
            return np.asarray(scores)

    def search_cost(self, num_queries: int) -> str:
        """What the ranking holds."""
        size = 4 * self._vectors.shape[1] * (self.num_labels + 2 * num_queries) / 2**30
        return (
            f"exact ranking of {self.num_labels:,} labels in {len(self._bias):,} clusters: "
            f"{size:.2f} GiB of vectors, and about 60 MB a core for blocks of scores"
        )


def _log_sigmoid(x: np.ndarray) -> np.ndarray:
    return -np.logaddexp(np.float32(0), -x)


@jax.jit
def _log_probabilities(
    queries: jax.Array,
    vectors: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    cluster: jax.Array,
    bonus: jax.Array,
    offset: jax.Array,
    weight: jax.Array,
) -> jax.Array:
    """``log sigmoid(<x_e, w_l> + b) + gamma log sigmoid(<x_m, v_c> + b_c)`` and the bonus."""
    extreme, meta = jnp.split(queries, 2, axis=1)
    high = jax.lax.Precision.HIGHEST
    labels = jax.nn.log_sigmoid(jnp.matmul(extreme, vectors.T, precision=high) + offset)
    clusters = jax.nn.log_sigmoid(jnp.matmul(meta, kernel, precision=high) + bias)
    return labels + weight * jnp.take(clusters, cluster, axis=1, mode="clip") + bonus
