"""Options of the frugal classifiers, the names and bounds that a configuration may set."""

from __future__ import annotations

import dataclasses

from xmc_jax.contracts import TextForm
from xmc_jax.systems import settings
from xmc_jax.systems.encoders import OF_WORD_VECTORS, EncoderOptions
from xmc_jax.systems.frugal import text_mixing
from xmc_jax.systems.settings import TableOptions
from xmc_jax.training.options import PoolOptions

CLUSTERS = ("pifa", "text")  # what labels are clustered by
NAMES = {
    **settings.NAMES,
    "batching": ("random",),
    "encoder.name": OF_WORD_VECTORS,
    "gandalf.variant": (*settings.NAMES["gandalf.variant"], *text_mixing.VARIANTS),
}
BOUNDS = {
    **settings.BOUNDS,
    "dropout": (0, 0.99),
    "label_dropout": (0, 0.99),
    "meta_weight": (0, None),
    "clusters.size": (1, None),
    "clusters.top": (1, None),
    "clusters.weight": (0, None),
    "graph.neighbours": (1, None),
    "graph.degree": (1, None),
    "graph.tokens": (1, None),
}


@dataclasses.dataclass(frozen=True)
class GraphOptions:
    """The section ``graph`` of a configuration, whose comments say what the fields mean."""

    neighbours: int = 10
    degree: int = 2
    tokens: int = 32


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """The section ``clusters`` of a configuration, whose comments say what the fields mean."""

    size: int = 32
    top: int = 20
    weight: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrugalOptions(PoolOptions):
    """A resolved configuration; the comments of its fields say what they mean."""

    encoder: EncoderOptions
    table: TableOptions
    dropout: float
    label_dropout: float
    label_text: bool
    label_graph: bool
    classifier: bool = True
    graph: GraphOptions = GraphOptions()
    clusters: ClusterOptions = ClusterOptions()
    offset: float = -4.0
    meta_weight: float = 1.0
    phases: tuple[tuple[int, bool, str], ...] = ((1, True, "pifa"),)

    @property
    def text_form(self) -> TextForm:
        """How texts are cut into tokens."""
        return settings.text_form(self.encoder, self.max_length)
