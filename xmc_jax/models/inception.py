"""Query encoder of InceptionXML and InceptionXML-LF: convolutions over word vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from xmc_jax.tokens import TokenBatch

Params = dict[str, Any]
Moving = dict[str, Any]


@dataclass(frozen=True)
class InceptionQueries:
    """InceptionXML's encoder (``experts=False``) or InceptionXML-LF's (``experts=True``)."""

    vocab_size: int
    dim: int = 300
    length: int = 32
    dropout: float = 0.25
    experts: bool = False
    max_segments: ClassVar[int] = 255

    def init(self, key: jax.Array) -> tuple[Params, Moving]:
        """Draws parameters, without the token table, and moving values."""
        raise NotImplementedError

    def apply(
        self,
        params: Params,
        table: jax.Array,
        idf: jax.Array,
        tokens: TokenBatch,
        moving: Moving,
        *,
        key: jax.Array | None = None,
        train: bool = False,
    ) -> tuple[tuple[jax.Array, jax.Array], Moving]:
        """Meta and extreme features, each ``[B, D]``, and the moving values to keep."""
        raise NotImplementedError
