"""From a configuration to objects: the only place where a name becomes an object."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from xmc_jax import augmentation, frozen, losses, training_data
from xmc_jax.data import label_features, word_vectors
from xmc_jax.data import tokenizer as tokenizers
from xmc_jax.dual_system import DualSystem
from xmc_jax.embedding import CHUNK_TEXTS, Embedder
from xmc_jax.frugal_ranking import FrugalEmbedder
from xmc_jax.frugal_source import GraphRows
from xmc_jax.frugal_system import (
    FrugalSystem,
    graph_rows,
    load_graph_rows,
    num_clusters,
)
from xmc_jax.models import pretrained
from xmc_jax.models.bag import BagEncoder
from xmc_jax.models.frugal import BagQueries, Frugal
from xmc_jax.models.inception import InceptionQueries
from xmc_jax.models.transformer import TransformerConfig, TransformerEncoder
from xmc_jax.models.unidec import UniDEC
from xmc_jax.train_step import Objective, Side
from xmc_jax.training_data import WORD_VECTORS, TrainingData

LABEL_LOSSES: dict[str, Callable[..., jax.Array]] = {
    "decoupled_softmax": losses.decoupled_softmax_loss,
    "supcon": losses.supcon_loss,
    "triplet": losses.triplet_loss,
}


def side(config: ConfigDict, name: str) -> Side:
    """The loss of one head, from ``config.de`` or ``config.clf``.

    Raises:
      ValueError: the loss is not a known name, alone or followed by ``+bce``.
    """
    parts = config.loss.split("+")
    multi_class = [part for part in parts if part != "bce"]
    if len(multi_class) > 1 or len(parts) > 2 or not set(multi_class) <= LABEL_LOSSES.keys():
        raise ValueError(
            f"config.{name}.loss = {config.loss!r}: expected one of {list(LABEL_LOSSES)}, 'bce', "
            "or one of them followed by '+bce', as in 'decoupled_softmax+bce'."
        )
    label_loss = LABEL_LOSSES[multi_class[0]] if multi_class else None
    if multi_class == ["triplet"]:
        label_loss = functools.partial(label_loss, margin=config.margin)
    elif multi_class:
        label_loss = functools.partial(label_loss, normalize=config.normalize)
    bce_weight = config.bce_weight if "bce" in parts else 0.0
    return Side(label_loss, config.temperature, config.query_weight, bce_weight)


def objective(config: ConfigDict) -> Objective:
    """Both heads' losses, or the dual encoder's alone."""
    if not config.classifier:
        return Objective(side(config.de, "de"))
    return Objective(side(config.de, "de"), side(config.clf, "clf"), config.de_weight)


def tokenizer(config: ConfigDict, texts: Iterable[str], folder: Path) -> Any:
    """The run's tokenizer: kept in its folder, a pretrained encoder's, or trained on the texts.

    Args:
      config: the configuration.
      texts: all training and label texts; read more than once.
      folder: ``tokenizer/`` of the work directory.

    Raises:
      ValueError: there is no such folder and no such model on the hub, or no network.
    """
    if (folder / "tokenizer.json").exists():
        return tokenizers.load_tokenizer(folder)
    of_words = config.encoder.name in WORD_VECTORS
    source = config.encoder.embeddings if of_words else config.encoder.name
    whole = of_words and config.encoder.get("vocabulary") == "words"
    if whole or word_vectors.is_file(source):
        size = config.encoder.vocab_size
        return tokenizers.train_words(texts, vocab_size=size, folder=folder)
    if source:
        made = tokenizers.load_tokenizer(pretrained.resolve_folder(source))
        tokenizers.save_tokenizer(made, folder)
        return made
    return tokenizers.train_wordpiece(
        texts,
        vocab_size=config.encoder.vocab_size,
        folder=folder,
        special_tokens=not of_words,
    )


def token_table(config: ConfigDict, folder: Path, vocab_size: int) -> np.ndarray | None:
    """Pretrained token vectors ``[V, D]``, of a model or of a file; None where none are asked for.

    Raises:
      ValueError: a folder or file that cannot be read, or a tokenizer that knows more tokens.
    """
    source = config.encoder.embeddings
    if not source:
        return None
    if word_vectors.is_file(source):
        words = tokenizers.load_tokenizer(folder / "tokenizer").get_vocab()
        return word_vectors.table(source, words, seed=config.seed)
    table = pretrained.word_embeddings(source)
    _check_tokens(source, vocab_size, len(table))
    return table


def encoder(
    config: ConfigDict, folder: Path, vocab_size: int, token_counts: np.ndarray
) -> tuple[Any, Callable[[jax.Array], Any]]:
    """The encoder, and the function from a key to its first parameters.

    Args:
      config: the configuration.
      folder: the work directory, which has the tokenizer.
      vocab_size: of the tokenizer.
      token_counts: ``[vocab_size]`` occurrences in training and label texts. Without embeddings,
        the bag's vectors of tokens that occur in none start at 0: they are never trained, and would
        be noise in the vectors of new texts.

    Raises:
      ValueError: a pretrained folder that cannot be read, whose tokenizer knows more tokens than
        its embeddings, whose positions are fewer than ``config.max_length``, or whose layers are
        fewer than ``config.encoder.freeze``.
    """
    options = config.encoder
    if options.name != "bag":
        made, params = pretrained.load_encoder(
            options.name,
            pooling=options.pooling,
            compute_dtype=options.compute_dtype,
            remat=options.remat,
        )
        shape = made.config
        _check_freeze(config, shape.num_layers)
        _check_tokens(options.name, vocab_size, shape.vocab_size)
        if config.max_length > shape.max_positions:
            raise ValueError(
                f"config.max_length = {config.max_length}: {options.name} has positions for texts "
                f"of at most {shape.max_positions} tokens. Set --config.max_length to that or less."
            )
        return made, lambda key: params
    words = token_table(config, folder, vocab_size)
    shape = (vocab_size, options.dim) if words is None else words.shape
    made = BagEncoder(*shape, options.dropout, options.token_dropout)

    def init(key: jax.Array) -> Any:
        params, factors = made.init(key), np.float32(options.token_scale)
        if words is None:
            factors = factors * (token_counts > 0)[:, None]
        else:
            params = made.with_embeddings(params, words)
        return {**params, "tokens": {"embedding": params["tokens"]["embedding"] * factors}}

    return made, init


def _check_freeze(config: ConfigDict, num_layers: int) -> None:
    freeze = config.encoder.freeze
    if freeze > num_layers:
        raise ValueError(
            f"config.encoder.freeze = {freeze}: {config.encoder.name} has {num_layers} layers; "
            f"expected 0 (none) to {num_layers} (the whole encoder)."
        )
    if freeze == num_layers and not config.head_dim:
        raise ValueError(
            f"config.encoder.freeze = {freeze} freezes all layers, and config.head_dim = "
            f"{config.head_dim} leaves no head to train: set --config.head_dim, to 384 for example."
        )


def _check_tokens(folder: str, vocab_size: int, embeddings: int) -> None:
    """An id past the table's end would be read as some other token."""
    if vocab_size > embeddings:
        raise ValueError(
            f"{folder}: its tokenizer has {vocab_size} tokens, its model embeddings of "
            f"{embeddings}; expected at least as many. Take both from one model."
        )


def describe(made: UniDEC | Frugal) -> dict[str, Any]:
    """A model's encoder as plain JSON: enough to make it again without its pretrained folder."""
    encoder = made.queries if isinstance(made, Frugal) else made.encoder
    return {"kind": type(encoder).__name__, **dataclasses.asdict(encoder)}


def restore_encoder(description: dict[str, Any]) -> Any:
    """The encoder of ``describe``."""
    fields = dict(description)
    kinds = {kind.__name__: kind for kind in (BagEncoder, BagQueries, InceptionQueries)}
    kind = kinds.get(fields.pop("kind"))
    if kind is not None:
        return kind(**fields)
    fields["config"] = TransformerConfig(**fields["config"])
    return TransformerEncoder(**fields)


def embedder(config: ConfigDict, made: UniDEC) -> Embedder:
    """For a model; a chunk of pooled vectors has no more places than texts."""
    options = {"chunk_tokens": CHUNK_TEXTS} if frozen.reads_pooled(made.encoder) else {}
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
      system: see `xmc_jax.train_loop.Run`.
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
        return FrugalSystem(graph)
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
    made, init_encoder = encoder(config, folder, vocab_size, counts)
    if config.encoder.freeze:
        whole = init_encoder(jax.random.key(config.seed))
        lower, made, rest = frozen.split_run(config, folder, made, whole)
        data, init_encoder = frozen.freeze(data, lower), lambda key: rest
    data = augmentation.augment(config, data)
    built = model(config, made)
    params = built.init(jax.random.key(config.seed))
    params["encoder"] = init_encoder(jax.random.key(config.seed))
    return Parts(data, built, params, embedder(config, built), system(config))


def _frugal_parts(config: ConfigDict, folder: Path, data: TrainingData, vocab_size: int) -> Parts:
    words = token_table(config, folder, vocab_size)
    if words is not None:
        vocab_size, config.encoder.dim = words.shape
    stores = (data.train_tokens, data.label_tokens)
    idf = label_features.inverse_document_frequency(stores, vocab_size)
    made = frugal_model(config, queries(config, vocab_size), data.num_labels)
    params = made.init(jax.random.key(config.seed), idf)
    if words is not None:
        params = made.with_embeddings(params, words)
    graph = graph_rows(folder, config, data, idf) if made.label_graph else None
    data = augmentation.augment(config, data)
    runner = FrugalEmbedder(made, row_length=config.row_length)
    return Parts(data, made, params, runner, system(config, graph))


def queries(config: ConfigDict, vocab_size: int) -> BagQueries | InceptionQueries:
    """The query encoder of a frugal classifier."""
    options = config.encoder
    if options.name == "bag":
        return BagQueries(vocab_size, options.dim, options.dropout)
    return InceptionQueries(
        vocab_size,
        options.dim,
        length=config.max_length,
        dropout=options.dropout,
        experts=options.experts,
    )


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
    made = restore_encoder(meta["encoder"])
    if family(config) == "unidec":
        built = model(config, made)
        return built, system(config), embedder(config, built)
    built = frugal_model(config, made, meta["num_labels"])
    graph = load_graph_rows(folder) if built.label_graph else None
    return built, system(config, graph), FrugalEmbedder(built, row_length=config.row_length)
