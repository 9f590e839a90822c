"""Features, label vectors and the exact ranking of a frugal classifier."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from xmc_jax.data.search.exact_search import blocked_search, host_device
from xmc_jax.data.tokens.token_stores import JoinedTokens, TokenStore
from xmc_jax.models.frugal.inception import InceptionQueries
from xmc_jax.systems.embedding import chunks
from xmc_jax.systems.frugal.source import LABEL_SEGMENTS, GraphRows
from xmc_jax.tables import label_pool

CHUNK_TEXTS = 2048
INCEPTION_TEXTS = 256  # whose features need an array [texts, words, D], also for empty places
CHUNK_TOKENS = 24_576  # padding included


class FrugalEmbedder:
    """Runs the parts of a frugal model over token stores, chunk by chunk, each in one shape."""

    def __init__(self, model: Any, *, row_length: int) -> None:
        """Prepare the jitted functions.

        Args:
          model: a ``models.frugal.Frugal``.
          row_length: tokens in a packed row, at least the longest text.
        """
        self.model = model
        self._row_length, self._segments = row_length, model.queries.max_segments
        of_words = isinstance(model.queries, InceptionQueries)
        self._query_texts = INCEPTION_TEXTS if of_words else CHUNK_TEXTS
        self._features = jax.jit(lambda params, tokens: model.features(params, tokens)[0])
        self._texts = jax.jit(model.text_vectors)
        self._vectors = jax.jit(self._label_vectors)

    def both(
        self, params: Any, store: TokenStore | JoinedTokens, rows: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Meta and extreme features of ``rows`` (default all), each ``[n, D]``."""
        rows = np.arange(len(store)) if rows is None else np.asarray(rows)
        run = lambda start, stop, tokens: self._features(params, tokens)
        options = (self._query_texts, self._segments)
        return tuple(self._run(store, rows, run, 2, *options))

    def texts(self, params: Any, store: TokenStore) -> np.ndarray:
        """z1 of all label texts, ``[L, D]``."""
        run = lambda start, stop, tokens: (self._texts(params, tokens),)
        return self._run(store, np.arange(len(store)), run, 1)[0]

    def label_vectors(
        self, params: Any, table: Any, store: TokenStore, graph: GraphRows | None
    ) -> np.ndarray:
        """Vectors of all labels, ``[L, D]`` float32.

        Args:
          params: with the phase's facts.
          table: free weights as stored; read in a phase that has them.
          store: label texts.
          graph: rows of all labels where the model has that part.
        """
        free = bool(params["phase"]["free_weights"])
        if self.model.parts == ("free",):
            return np.asarray(label_pool.from_storage(table))

        def run(start: int, stop: int, tokens: Any) -> tuple[jax.Array]:
            labels = np.full(CHUNK_TEXTS, -1)
            labels[: stop - start] = np.arange(start, stop)
            rows = graph.take(labels) if graph is not None and self.model.label_graph else None
            own = None
            if free:
                own = label_pool.gather_rows(table, np.where(labels < 0, len(store), labels))
            return (self._vectors(params, tokens, rows, own),)

        return self._run(store, np.arange(len(store)), run, 1)[0]

    def _label_vectors(self, params: Any, tokens: Any, graph: Any, own: Any) -> jax.Array:
        texts = self.model.text_vectors(params, tokens)
        graphs = None
        if graph is not None:
            graphs = self.model.weighted_sum(params, graph.ids, graph.weights)
        return self.model.label_vectors(params, texts, graphs, own)[0]

    def _run(
        self,
        store: Any,
        rows: np.ndarray,
        function: Any,
        outputs: int,
        texts: int = CHUNK_TEXTS,
        segments: int = LABEL_SEGMENTS,
    ) -> list[np.ndarray]:
        found = [np.zeros((len(rows), self.model.dim), np.float32) for _ in range(outputs)]
        num_rows = max(1, min(CHUNK_TOKENS // self._row_length, texts))
        options = {"row_length": self._row_length, "max_segments": segments}
        bar = tqdm(total=len(rows), desc="embedding", unit=" texts", delay=2, leave=False)
        with bar:
            for start, stop, tokens in chunks(store, rows, num_rows, texts, **options):
                for array, part in zip(found, function(start, stop, tokens)):
                    array[start:stop] = np.asarray(part)[: stop - start]
                bar.update(stop - start)
        return found


class FrugalRanker:
    """Exact ranking by ``p(label) p(cluster of the label)^gamma``, over labels in blocks.

    Labels stand in the order of their clusters, so that a block of labels needs a block of
    clusters: all is scored once, in bounded memory. Sums of log-probabilities are compared, for
    products of probabilities near 1 are equal in 32 bits. The papers' gamma is 1; below that,
    clusters count for less: on small data sets theirs is the part that generalises worse.
    """

    heads = ("clf",)

    def __init__(
        self,
        embedder: FrugalEmbedder,
        params: Any,
        table: Any,
        label_tokens: TokenStore,
        graph: GraphRows | None,
        *,
        cluster_weight: float = 1.0,
        bonus: np.ndarray | None = None,
        kind: str = "exact",
        seed: int = 0,
        keep_indexes: bool = False,
    ) -> None:
        """Compute the label vectors.

        Args:
          embedder: of the model.
          params: its parameters.
          table: free weights as stored, or None.
          label_tokens: label texts.
          graph: rows of the label graph, or None.
          cluster_weight: gamma.
          bonus: ``[L]``, what a label's ``ln p`` gets (`xmc_jax.systems.unidec.ranking.tail_bonus`), or None.
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
        clusters = np.asarray(params["phase"]["label_clusters"])
        if len(clusters) != len(label_tokens):
            raise ValueError(
                f"{len(label_tokens)} labels for a classifier of {len(clusters)}: labels that came "
                "after training have no cluster and no weights here. Train anew, or take UniDEC."
            )
        self._embedder, self._params, self.num_labels = embedder, params, len(clusters)
        self._order = np.argsort(clusters, kind="stable").astype(np.int32)
        self._clusters = clusters[self._order]
        vectors = embedder.label_vectors(params, table, label_tokens, graph)
        self._vectors = vectors[self._order]
        bonus = np.zeros(len(clusters), np.float32) if bonus is None else bonus
        self._bonus = bonus[self._order]
        meta = params["meta"]
        self._kernel, self._bias = np.asarray(meta["kernel"]), np.asarray(meta["bias"])
        self._offset = np.float32(params["offset"])
        self._cluster_weight = np.float32(cluster_weight)
        self._smallest = max(1, int(np.bincount(clusters).min(initial=len(clusters))))
        self._on_host = host_device() or contextlib.nullcontext

    def label_vectors(self, head: str) -> np.ndarray:
        """Vectors of the extreme classifier, ``[L, D]``."""
        vectors = np.empty_like(self._vectors)
        vectors[self._order] = self._vectors
        return vectors

    def query_vectors(self, tokens: Any, rows: np.ndarray | None, head: str) -> np.ndarray:
        """Extreme and meta features side by side, ``[n, 2 D]``."""
        meta, extreme = self._embedder.both(self._params, tokens, rows)
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

    def memory(self, num_queries: int) -> str:
        """What the ranking holds."""
        size = 4 * self._vectors.shape[1] * (self.num_labels + 2 * num_queries) / 2**30
        return (
            f"exact ranking of {self.num_labels:,} labels in {len(self._bias):,} clusters: "
            f"{size:.2f} GiB of vectors, and about 60 MB a core for blocks of scores"
        )


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
