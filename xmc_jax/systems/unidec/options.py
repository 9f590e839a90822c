"""Options of UniDEC and DePSL, the names and bounds that a configuration may set."""

from __future__ import annotations

import dataclasses

from xmc_jax.contracts import TextForm
from xmc_jax.data.search import index as indexes
from xmc_jax.systems import settings
from xmc_jax.systems.encoders import EncoderOptions
from xmc_jax.systems.settings import TableOptions
from xmc_jax.training.options import PoolOptions

NAMES = {
    **settings.NAMES,
    "batching": settings.BATCHINGS,
    "index": ("auto", *indexes.KINDS),
    "encoder.compute_dtype": ("float32", "bfloat16"),
    "encoder.pooling": ("mean", "cls"),
}
BOUNDS = {
    **settings.BOUNDS,
    "head_dim": (0, None),
    "head_dropout": (0, 0.99),
    "de_weight": (0, 1),
    "de.query_weight": (0, 1),
    "clf.query_weight": (0, 1),
    "de.temperature": (1e-4, None),
    "clf.temperature": (1e-4, None),
    "clf.bce_weight": (0, None),
    "unseen_weight": (0, 1),
    "encoder.freeze": (0, None),
    "encoder.towers": (1, 2),
}


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """The loss of one head; ``bce_weight`` None = a head that takes no bce."""

    loss: str
    normalize: bool = True
    query_weight: float = 0.5
    temperature: float = 0.05
    margin: float = 0.3
    bce_weight: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniDECOptions(PoolOptions):
    """A resolved configuration; the comments of its fields say what they mean."""

    encoder: EncoderOptions
    head_dim: int
    head_dropout: float
    table: TableOptions
    de: HeadOptions
    clf: HeadOptions
    de_weight: float = 0.5
    classifier: bool = True
    unseen_weight: float = 0.0
    index: str = "auto"
    stages: tuple[tuple[int, str], ...] = ()

    @property
    def text_form(self) -> TextForm:
        """How texts are cut into tokens."""
        return settings.text_form(self.encoder, self.max_length)
