"""An encoder of two: one for queries and one for labels, which share no parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from xmc_jax.contracts import Encoder, Side, TokenBatch

Params = dict[str, Any]


@dataclass(frozen=True)
class TwoTowers:
    """Queries through one encoder, labels through another. Parameters: ``{"query", "label"}``.

    Attributes:
      query: the encoder of queries.
      label: the encoder of labels, of the same ``dim``.
    """

    query: Encoder
    label: Encoder
    shared: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.query.dim != self.label.dim:
            raise ValueError(
                f"TwoTowers: vectors of {self.query.dim} numbers a query and {self.label.dim} a "
                "label cannot be compared; expected encoders of the same dim"
            )

    @property
    def dim(self) -> int:
        """Size of a text's vector."""
        return self.query.dim

    @property
    def max_segments(self) -> int:
        """Texts that a packed row may hold, whichever tower it goes through."""
        return min(self.query.max_segments, self.label.max_segments)

    def init(self, key: jax.Array) -> Params:
        """Draws the parameters of both, apart from each other."""
        query, label = jax.random.split(key)
        return {"query": self.query.init(query), "label": self.label.init(label)}

    def apply(
        self,
        params: Params,
        tokens: TokenBatch,
        *,
        key: jax.Array | None = None,
        train: bool = False,
        side: Side = "query",
    ) -> jax.Array:
        """One vector a text, ``[B, dim]``, all of one side.

        Raises:
          ValueError: ``side="both"``, or ``train=True`` without a key.
        """
        return self._tower(side).apply(params[side], tokens, key=key, train=train, side=side)

    def apply_padded(
        self, params: Params, ids: jax.Array, mask: jax.Array, side: Side = "query"
    ) -> jax.Array:
        """The same of one text a row: see `xmc_jax.models.encoders.padded.padded_batch`."""
        return self._tower(side).apply_padded(params[side], ids, mask, side)

    def _tower(self, side: Side) -> Encoder:
        if side not in ("query", "label"):
            raise ValueError(
                f"TwoTowers: side is {side!r}, but a text goes through one of two towers: pass "
                "queries and labels in two calls, with side='query' and side='label'"
            )
        return self.query if side == "query" else self.label
