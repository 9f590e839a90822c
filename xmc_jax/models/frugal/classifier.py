"""The frugal family, one model with parts: Astec, DECAF, ECLARE, InceptionXML, InceptionXML-LF."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xmc_jax.contracts import Side, TokenBatch
from xmc_jax.models.encoders.padded import padded_batch
from xmc_jax.models.frugal import label_parts
from xmc_jax.models.frugal.bag_queries import BagQueries
from xmc_jax.models.frugal.inception import InceptionQueries
from xmc_jax.models.layers import dropout, init_linear, linear, require_key

Params = dict[str, Any]
Moving = dict[str, Any]


@dataclass(frozen=True)
class Frugal:
    """A query encoder, a classifier over label clusters, and label vectors of up to three parts.

    ``score(x, l) = sigmoid(<x_e, w_l>) sigmoid(<x_m, v_c(l)> + b_c(l))`` with the query's extreme
    and meta features, label l's cluster c(l), and

        w_l = alpha_1 text(z1_l) + alpha_2 graph(z2_l) + alpha_3 u_l

    where z1 is the TF-IDF sum of the label's word vectors, z2 that of its neighbours in the label
    graph, u free weights (rows of a table that is no parameter), text and graph residual blocks,
    and alpha an attention (ECLARE; Gandalf, appendix A.3). Parts that are off are left out; a
    single part has weight 1. One token table serves queries and labels.

    Astec: bag, free weights. DECAF: + label text. ECLARE: + label graph. InceptionXML: inception,
    free weights. InceptionXML-LF: inception with experts, all three. DECAF mixes by two learned
    scalars, not by attention: the family has one mixing here.

    Parameters: ``{"tokens": {"embedding": [V, D]}, "queries", "meta": {"kernel": [D, C], "bias":
    [C]}, "text", "graph", "attention", "moving"}``; text, graph and attention where they are on.
    ``moving`` holds what no gradient moves: idf, directions of spectral norms, running means of
    batch norms. Training calls return a new ``moving``, whole, for the next call.

    Attributes:
      queries: the query encoder.
      num_clusters: C.
      label_text: whether text(z1) is a part.
      label_graph: whether graph(z2) is a part.
      free_weights: whether u is a part.
      dropout: rate before both classifiers, in training only.
      label_dropout: rate in the label blocks and in the attention, in training only.
      token_scale: standard deviation of the token table's entries at the start.
      cluster_bias: bias of all clusters at the start.
    """

    queries: BagQueries | InceptionQueries
    num_clusters: int
    label_text: bool = False
    label_graph: bool = False
    free_weights: bool = True
    dropout: float = 0.5
    label_dropout: float = 0.2
    token_scale: float = 0.4
    cluster_bias: float = 0.0

    def __post_init__(self) -> None:
        if not (self.label_text or self.free_weights):
            raise ValueError(
                "Frugal(label_text=False, free_weights=False): a label vector needs at least one "
                "of them; expected one to be True"
            )

    @property
    def dim(self) -> int:
        """Size D of features and label vectors."""
        return self.queries.dim

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts of a label vector: some of text, graph, free."""
        on = {"text": self.label_text, "graph": self.label_graph, "free": self.free_weights}
        return tuple(name for name, is_on in on.items() if is_on)

    def init(self, key: jax.Array, idf: np.ndarray) -> Params:
        """Draws parameters.

        Args:
          key: a key of ``jax.random``.
          idf: ``[V]`` inverse document frequencies; 0 = a token that no training or label text
            holds, whose vector starts at 0 (it is never trained, and would be noise).

        Raises:
          ValueError: ``idf`` has another shape than ``[V]``, or a negative or not finite entry.
        """
        idf = np.asarray(idf, np.float32)
        if idf.shape != (self.queries.vocab_size,) or not (np.isfinite(idf) & (idf >= 0)).all():
            raise ValueError(
                f"idf of shape {idf.shape}, smallest {idf.min(initial=0)}: expected finite entries "
                f">= 0 of shape ({self.queries.vocab_size},), one a token"
            )
        keys = dict(
            zip(
                ("tokens", "queries", "meta", "text", "graph", "attention"),
                jax.random.split(key, 6),
            )
        )
        shape = (self.queries.vocab_size, self.dim)
        table = self.token_scale * jax.random.normal(keys["tokens"], shape, jnp.float32)
        params: Params = {
            "tokens": {"embedding": table * (idf > 0)[:, None]},
            "meta": self.init_meta(keys["meta"]),
        }
        moving: Moving = {"idf": jnp.asarray(idf)}
        params["queries"], moving["queries"] = self.queries.init(keys["queries"])
        for name in ("text", "graph"):
            if name in self.parts:
                params[name], moving[name] = label_parts.init_block(keys[name], self.dim)
        if len(self.parts) > 1:
            params["attention"], moving["attention"] = label_parts.init_attention(
                keys["attention"], self.dim, len(self.parts)
            )
        return {**params, "moving": moving}

    def init_meta(self, key: jax.Array) -> dict[str, jax.Array]:
        """A new classifier over clusters, for new clusters: Xavier uniform, one bias for all."""
        params = init_linear(key, self.dim, self.num_clusters)
        return {**params, "bias": params["bias"] + self.cluster_bias}

    def with_embeddings(self, params: Params, table: np.ndarray) -> Params:
        """Parameters with this token table ``[V, D]``, scaled to the deviation ``token_scale``.

        Raises:
          ValueError: the table has another shape, or all its entries are equal or not finite.
        """
        table = np.asarray(table, np.float32)
        expected = (self.queries.vocab_size, self.dim)
        deviation = float(table.std(dtype=np.float64))
        if table.shape != expected or not 0 < deviation < np.inf:
            raise ValueError(
                f"token table of shape {table.shape} with standard deviation {deviation}: expected "
                f"finite, unequal entries and shape (vocab_size, dim) = {expected}"
            )
        scaled = jnp.asarray(table * np.float32(self.token_scale / deviation))
        return {**params, "tokens": {"embedding": scaled}}

    def features(
        self,
        params: Params,
        tokens: TokenBatch,
        *,
        key: jax.Array | None = None,
        train: bool = False,
    ) -> tuple[tuple[jax.Array, jax.Array], Moving]:
        """Meta and extreme features of texts, after the dropout before the classifiers.

        Args:
          params: see the class.
          tokens: packed texts.
          key: for dropout; needed if and only if ``train``.
          train: dropout, batch statistics and power iterations, or not.

        Returns:
          ``((meta, extreme), moving)``: ``[B, D]`` each, zeros where ``text_segment`` is 0, and the
          whole of ``params["moving"]`` with the query encoder's part renewed.

        Raises:
          ValueError: ``train=True`` without a key.
        """
        key = require_key(train, key)
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        moving = jax.lax.stop_gradient(params["moving"])
        table = params["tokens"]["embedding"]
        (meta, extreme), queries = self.queries.apply(
            params["queries"],
            table,
            moving["idf"],
            tokens,
            moving["queries"],
            key=keys[0],
            train=train,
        )
        meta, extreme = (
            dropout(meta, self.dropout, keys[1]),
            dropout(extreme, self.dropout, keys[2]),
        )
        return (meta, extreme), {**moving, "queries": queries}

    def apply_padded(
        self, params: Params, ids: jax.Array, mask: jax.Array, side: Side = "query"
    ) -> tuple[jax.Array, jax.Array]:
        """Meta and extreme features of one text a row: ids and mask ``[B, T]``; no side differs."""
        return self.features(params, padded_batch(ids, mask))[0]

    def cluster_scores(self, params: Params, meta: jax.Array) -> jax.Array:
        """Logits ``[B, C]`` of the clusters from meta features ``[B, D]``."""
        return linear(params["meta"], meta)

    def text_vectors(self, params: Params, tokens: TokenBatch) -> jax.Array:
        """z1 ``[B, D]`` of label texts: the TF-IDF sum of word vectors, before the block."""
        idf = params["moving"]["idf"]
        return label_parts.tfidf_sums(params["tokens"]["embedding"], idf, tokens)

    def weighted_sum(self, params: Params, ids: jax.Array, weights: jax.Array) -> jax.Array:
        """z2 ``[P, D]`` of rows of G Z0: ``sum_t weights[p, t] E[ids[p, t]]``."""
        return label_parts.weighted_sums(params["tokens"]["embedding"], ids, weights)

    def label_vectors(
        self,
        params: Params,
        texts: jax.Array | None,
        graphs: jax.Array | None,
        rows: jax.Array | None,
        *,
        key: jax.Array | None = None,
        train: bool = False,
    ) -> tuple[jax.Array, Moving]:
        """Label vectors w of the parts that are on.

        Args:
          params: see the class. In a training step pass ``{**params, "moving": moving}`` with what
            ``features`` returned.
          texts: z1 ``[P, D]``; read if and only if ``label_text``.
          graphs: z2 ``[P, D]``; read if and only if ``label_graph``.
          rows: u ``[P, D]``; read if and only if ``free_weights``. None leaves the free weights out
            where there are other parts: their attention is 0 (phase I, appendix A.4).
          key: for dropout; needed if and only if ``train``.
          train: dropout and power iterations, or not.

        Returns:
          ``[P, D]`` and the whole of ``params["moving"]`` with the label parts renewed.

        Raises:
          ValueError: ``train=True`` without a key, or a part that is on is None.
        """
        key = require_key(train, key)
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        moving = dict(jax.lax.stop_gradient(params["moving"]))
        given = {"text": texts, "graph": graphs, "free": rows}
        for name in self.parts:
            if given[name] is None and (name != "free" or len(self.parts) == 1):
                raise ValueError(
                    f"label_vectors: the part {name!r} is on and its array is None; expected [P, D]"
                )
        parts = []
        for name, part_key in zip(("text", "graph", "free"), (*keys[:2], None)):
            if name not in self.parts:
                continue
            part = given[name]
            if name != "free" and part is not None:
                part, moving[name] = label_parts.residual_block(
                    params[name], moving[name], part, self.label_dropout, part_key, train=train
                )
            parts.append(part)
        if len(parts) == 1 and parts[0] is not None:
            return parts[0], moving
        vectors, moving["attention"] = label_parts.attend(
            params["attention"],
            moving["attention"],
            parts,
            self.label_dropout,
            keys[2],
            train=train,
        )
        return vectors, moving
