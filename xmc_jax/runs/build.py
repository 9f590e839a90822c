"""From a configuration to objects: the only place where a name becomes an object."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from xmc_jax.training import augmentation, training_data
from xmc_jax.systems import encoders, frozen_layers
from xmc_jax import losses
from xmc_jax.data.graph import label_features
from xmc_jax.systems.unidec.system import DualSystem
from xmc_jax.systems.embedding import CHUNK_TEXTS, Embedder
from xmc_jax.systems.frugal.ranking import FrugalEmbedder
from xmc_jax.systems.frugal.source import GraphRows
from xmc_jax.systems.frugal.system import FrugalSystem, graph_rows, load_graph_rows, num_clusters
from xmc_jax.models.frugal.bag_queries import BagQueries
from xmc_jax.models.frugal.classifier import Frugal
from xmc_jax.models.frugal.inception import InceptionQueries
from xmc_jax.models.heads.unidec import UniDEC
from xmc_jax.systems.unidec.step import Objective, Side
from xmc_jax.training.training_data import TrainingData

LABEL_LOSSES: dict[str, Callable[..., jax.Array]] = {
    "decoupled_softmax": losses.decoupled_softmax_loss,
    "supcon": losses.supcon_loss,
    "triplet": losses.triplet_loss,
}


def side(config: ConfigDict, name: str) -> Side:
    """The loss of one head, from ``config.de`` or ``config.clf``.

    The dual encoder's triplet loss has no temperature: its margin is one of cosines.

    Raises:
      ValueError: the loss is not a known name, alone or (of the classifier) followed by ``+bce``.
    """
    parts = config.loss.split("+")
    multi_class = [part for part in parts if part != "bce"]
    allowed = "bce_weight" in config
    wrong = len(multi_class) > 1 or len(parts) > 2 or not set(multi_class) <= LABEL_LOSSES.keys()
    if wrong or ("bce" in parts and not allowed):
        with_bce = ", 'bce', or one of them followed by '+bce', as in 'decoupled_softmax+bce'"
        raise ValueError(
            f"config.{name}.loss = {config.loss!r}: expected one of {list(LABEL_LOSSES)}"
            f"{with_bce if allowed else ' (bce is for config.clf.loss)'}."
        )
    label_loss = LABEL_LOSSES[multi_class[0]] if multi_class else None
    temperature = config.temperature
    if multi_class == ["triplet"]:
        label_loss = functools.partial(label_loss, margin=config.margin)
        temperature = 1.0 if name == "de" else temperature
    elif multi_class:
        label_loss = functools.partial(label_loss, normalize=config.normalize)
    bce_weight = config.bce_weight if "bce" in parts else 0.0
    return Side(label_loss, temperature, config.query_weight, bce_weight)


def objective(config: ConfigDict) -> Objective:
    """Both heads' losses, or the dual encoder's alone."""
    if not config.classifier:
        return Objective(side(config.de, "de"))
    return Objective(side(config.de, "de"), side(config.clf, "clf"), config.de_weight)


def embedder(config: ConfigDict, made: UniDEC) -> Embedder:
    """For a model; a chunk of pooled vectors has no more places than texts."""
    options = {"chunk_tokens": CHUNK_TEXTS} if frozen_layers.reads_pooled(made.encoder) else {}
    return Embedder(made, row_length=config.row_length, **options)


def model(config: ConfigDict, made: Any) -> UniDEC:
    """Encoder and heads; ``head_dim`` 0 is no projection."""
    return UniDEC(made, config.head_dim or None, config.head_dropout)


@dataclasses.dataclass
class Parts:
    """What a run is made of beside its batches.

    Attributes:
      data: as training reads it: with label texts as points, or hidden states for tokens.
      model: a ``UniDEC`` or a ``Frugal``.
      params: its first parameters.
      embedder: runs it over token stores.
      system: see `xmc_jax.training.loop.Run`.
    """

    data: TrainingData
    model: Any
    params: Any
    embedder: Any
    system: Any


def family(config: ConfigDict) -> str:
    """``unidec`` (of which DePSL is a part) or ``frugal``.

    Raises:
      ValueError: another name.
    """
    found = config.family if "family" in config else "unidec"
    if found not in ("unidec", "frugal"):
        raise ValueError(f"config.family = {found!r}: expected 'unidec' or 'frugal'.")
    return found


def system(config: ConfigDict, graph: GraphRows | None = None) -> DualSystem | FrugalSystem:
    """What differs between the families in a run; ``graph``: rows of the label graph.

    Raises:
      ValueError: unknown names of losses.
    """
    if family(config) == "frugal":
        # A work directory from before there was such a field has the papers' product.
        return FrugalSystem(graph, config.clusters.get("weight", 1.0))
    return DualSystem(objective(config))


def parts(config: ConfigDict, folder: Path, data: TrainingData, vocab_size: int) -> Parts:
    """The parts of a new or continued run.

    Args:
      config: a resolved configuration.
      folder: its work directory, for what is kept there.
      data: as loaded.
      vocab_size: of the tokenizer.
    """
    make = _frugal_parts if family(config) == "frugal" else _dual_parts
    return make(config, folder, data, vocab_size)


def _dual_parts(config: ConfigDict, folder: Path, data: TrainingData, vocab_size: int) -> Parts:
    counts = training_data.token_counts((data.train_tokens, data.label_tokens), vocab_size)
    made, init_encoder = encoders.encoder(config, folder, vocab_size, counts)
    if config.encoder.freeze:
        whole = init_encoder(jax.random.key(config.seed))
        lower, made, rest = frozen_layers.split_run(config, folder, made, whole)
        data, init_encoder = frozen_layers.freeze(data, lower), lambda key: rest
    data = augmentation.augment(config, data)
    built = model(config, made)
    params = built.init(jax.random.key(config.seed), init_encoder)
    return Parts(data, built, params, embedder(config, built), system(config))


def _frugal_parts(config: ConfigDict, folder: Path, data: TrainingData, vocab_size: int) -> Parts:
    words = encoders.token_table(config, folder, vocab_size)
    if words is not None:
        vocab_size, config.encoder.dim = words.shape
    stores = (data.train_tokens, data.label_tokens)
    idf = label_features.inverse_document_frequency(stores, vocab_size)
    made = frugal_model(config, encoders.queries(config, vocab_size), data.num_labels)
    params = made.init(jax.random.key(config.seed), idf)
    if words is not None:
        params = made.with_embeddings(params, words)
    graph = graph_rows(folder, config, data, idf) if made.label_graph else None
    data = augmentation.augment(config, data)
    runner = FrugalEmbedder(made, row_length=config.row_length)
    return Parts(data, made, params, runner, system(config, graph))


def frugal_model(
    config: ConfigDict, made: BagQueries | InceptionQueries, num_labels: int
) -> Frugal:
    """A frugal classifier with its parts."""
    return Frugal(
        made,
        num_clusters(num_labels, config.clusters.size),
        label_text=config.label_text,
        label_graph=config.label_graph,
        free_weights=config.classifier,
        dropout=config.dropout,
        label_dropout=config.label_dropout,
        token_scale=config.encoder.token_scale,
        cluster_bias=config.offset,
    )


def opened(config: ConfigDict, folder: Path, meta: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Model, system and embedder of a work directory."""
    made = encoders.restore(meta["encoder"])
    if family(config) == "unidec":
        built = model(config, made)
        return built, system(config), embedder(config, built)
    built = frugal_model(config, made, meta["num_labels"])
    graph = load_graph_rows(folder) if built.label_graph else None
    return built, system(config, graph), FrugalEmbedder(built, row_length=config.row_length)
