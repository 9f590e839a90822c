"""Tokenizers and text encoders of a run: from its options, and back from a work directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from tokenizers import Tokenizer

from xmc_jax.contracts import Encoder
from xmc_jax.data.tokens import tokenizer as tokenizers
from xmc_jax.data.tokens import word_vectors
from xmc_jax.models import pretrained
from xmc_jax.models.encoders.bag import BagEncoder
from xmc_jax.models.encoders.transformer import TransformerConfig, TransformerEncoder
from xmc_jax.models.encoders.two_towers import TwoTowers
from xmc_jax.models.frugal.bag_queries import BagQueries
from xmc_jax.models.frugal.inception import InceptionQueries

OF_WORD_VECTORS = ("bag", "inception")  # encoders of token vectors alone; others are pretrained
QUERIES = {kind.__name__: kind for kind in (BagQueries, InceptionQueries)}


@dataclasses.dataclass(frozen=True)
class EncoderOptions:
    """The section ``encoder`` of a configuration, whose comments say what the fields mean."""

    name: str
    dim: int = 256
    dropout: float = 0.2
    token_dropout: float = 0.0
    token_scale: float = 1.0
    embeddings: str = ""
    vocabulary: str = "wordpiece"
    vocab_size: int = 30_000
    lower: bool = True
    strip_accents: bool = False
    pooling: str = "mean"
    freeze: int = 0
    compute_dtype: str = "float32"
    remat: bool = False
    experts: bool = False
    towers: int = 1
    query_prefix: str = ""
    label_prefix: str = ""

    @property
    def of_word_vectors(self) -> bool:
        """Whether it is made of token vectors, not a pretrained model."""
        return self.name in OF_WORD_VECTORS

    @property
    def of_whole_words(self) -> bool:
        """Whether its tokens are words, not pieces of them."""
        return self.vocabulary == "words" or word_vectors.is_file(self.embeddings)

    @property
    def makes_vocabulary(self) -> bool:
        """Whether its tokens are made from the texts; else a pretrained model's are taken."""
        return self.of_word_vectors and (not self.embeddings or self.of_whole_words)


def tokenizer(options: EncoderOptions, texts: Iterable[str], folder: Path) -> Tokenizer:
    """The run's tokenizer: kept in its folder, a pretrained encoder's, or trained on the texts.

    Args:
      options: of the encoder.
      texts: all training and label texts; read more than once.
      folder: ``tokenizer/`` of the work directory.

    Raises:
      ValueError: there is no such folder and no such model on the hub, or no network.
    """
    if (folder / "tokenizer.json").exists():
        return tokenizers.load_tokenizer(folder)
    if not options.makes_vocabulary:
        source = options.embeddings if options.of_word_vectors else options.name
        loaded = tokenizers.load_tokenizer(pretrained.resolve_folder(source))
        tokenizers.save_tokenizer(loaded, folder)
        return loaded
    settings: dict[str, Any] = {
        "vocab_size": options.vocab_size,
        "lower": options.lower,
        "strip_accents": options.strip_accents,
    }
    said = ", ".join(f"config.encoder.{name} = {value}" for name, value in settings.items())
    logging.info("making a vocabulary of the texts: %s", said)
    if options.of_whole_words:
        return tokenizers.train_words(texts, folder=folder, **settings)
    return tokenizers.train_wordpiece(texts, folder=folder, special_tokens=False, **settings)


def token_table(
    options: EncoderOptions, folder: Path, vocab_size: int, *, seed: int
) -> np.ndarray | None:
    """Pretrained token vectors ``[V, D]``, of a model or of a file; None where none are asked for.

    Args:
      options: of the encoder.
      folder: the work directory, which has the tokenizer.
      vocab_size: of the tokenizer.
      seed: of the vectors of words that a file lacks.

    Raises:
      ValueError: a folder or file that cannot be read, or a tokenizer that knows more tokens.
    """
    source = options.embeddings
    if not source:
        return None
    if word_vectors.is_file(source):
        words = tokenizers.load_tokenizer(folder / "tokenizer").get_vocab()
        return word_vectors.table(source, words, seed=seed)
    table = pretrained.word_embeddings(source)
    _check_tokens(source, vocab_size, len(table))
    return table


def encoder(
    options: EncoderOptions,
    folder: Path,
    vocab_size: int,
    token_counts: np.ndarray,
    *,
    seed: int,
    max_length: int,
    head_dim: int,
) -> tuple[Encoder, Callable[[jax.Array], Any]]:
    """The encoder, and the function from a key to its first parameters.

    Args:
      options: of the encoder.
      folder: the work directory, which has the tokenizer.
      vocab_size: of the tokenizer.
      token_counts: ``[vocab_size]`` occurrences in training and label texts. Without embeddings,
        the bag's vectors of tokens that occur in none start at 0: they are never trained, and would
        be noise in the vectors of new texts.
      seed: of the run.
      max_length: tokens of a text.
      head_dim: size of the heads above it; 0 = none.

    Raises:
      ValueError: a pretrained folder that cannot be read, whose tokenizer knows more tokens than
        its embeddings, whose positions are fewer than ``max_length``, or whose layers are fewer
        than are to be frozen.
    """
    one, init = _tower(options, folder, vocab_size, token_counts, seed, max_length, head_dim)
    if options.towers == 1:
        return one, init

    def init_both(key: jax.Array) -> Any:
        query, label = jax.random.split(key)
        # Copied: two towers of one pretrained folder would be the same arrays, donated twice.
        return {"query": init(query), "label": jax.tree.map(jnp.copy, init(label))}

    return TwoTowers(one, one), init_both


def _tower(
    options: EncoderOptions,
    folder: Path,
    vocab_size: int,
    token_counts: np.ndarray,
    seed: int,
    max_length: int,
    head_dim: int,
) -> tuple[BagEncoder | TransformerEncoder, Callable[[jax.Array], Any]]:
    if not options.of_word_vectors:
        transformer, params = pretrained.load_encoder(
            options.name,
            pooling=options.pooling,
            compute_dtype=options.compute_dtype,
            remat=options.remat,
        )
        config = transformer.config
        _check_freeze(options, config.num_layers, head_dim)
        _check_tokens(options.name, vocab_size, config.vocab_size)
        if max_length > config.max_positions:
            raise ValueError(
                f"config.max_length = {max_length}: {options.name} has positions for texts "
                f"of at most {config.max_positions} tokens. Set --config.max_length to that or "
                "less."
            )
        return transformer, lambda key: params
    words = token_table(options, folder, vocab_size, seed=seed)
    size, dim = (vocab_size, options.dim) if words is None else words.shape
    bag = BagEncoder(size, dim, options.dropout, options.token_dropout)

    def init(key: jax.Array) -> Any:
        params, scale = bag.init(key), np.float32(options.token_scale)
        if words is None:
            factors: np.ndarray | np.float32 = scale * (token_counts > 0)[:, None]
        else:
            params, factors = bag.with_embeddings(params, words), scale
        return {**params, "tokens": {"embedding": params["tokens"]["embedding"] * factors}}

    return bag, init


def _check_freeze(options: EncoderOptions, num_layers: int, head_dim: int) -> None:
    freeze = options.freeze
    if freeze > num_layers:
        raise ValueError(
            f"config.encoder.freeze = {freeze}: {options.name} has {num_layers} layers; "
            f"expected 0 (none) to {num_layers} (the whole encoder)."
        )
    if freeze == num_layers and not head_dim:
        raise ValueError(
            f"config.encoder.freeze = {freeze} freezes all layers, and config.head_dim = "
            f"{head_dim} leaves no head to train: set --config.head_dim, to 384 for example."
        )


def _check_tokens(folder: str, vocab_size: int, embeddings: int) -> None:
    """An id past the table's end would be read as some other token."""
    if vocab_size > embeddings:
        raise ValueError(
            f"{folder}: its tokenizer has {vocab_size} tokens, its model embeddings of "
            f"{embeddings}; expected at least as many. Take both from one model."
        )


def queries(
    options: EncoderOptions, vocab_size: int, max_length: int
) -> BagQueries | InceptionQueries:
    """The query encoder of a frugal classifier."""
    if options.name == "bag":
        return BagQueries(vocab_size, options.dim, options.dropout)
    return InceptionQueries(
        vocab_size,
        options.dim,
        length=max_length,
        dropout=options.dropout,
        experts=options.experts,
    )


def describe(encoder: Encoder | BagQueries | InceptionQueries) -> dict[str, Any]:
    """An encoder as plain JSON: enough to make it again without its pretrained folder."""
    if isinstance(encoder, TwoTowers):
        towers = {"query": describe(encoder.query), "label": describe(encoder.label)}
        return {"kind": TwoTowers.__name__, **towers}
    return {"kind": type(encoder).__name__, **dataclasses.asdict(encoder)}


def restore(description: Mapping[str, Any]) -> Encoder:
    """The text encoder of `describe`."""
    fields = dict(description)
    name = fields.pop("kind")
    if name == TwoTowers.__name__:
        return TwoTowers(restore(fields["query"]), restore(fields["label"]))
    if name == BagEncoder.__name__:
        return BagEncoder(**fields)
    fields["config"] = TransformerConfig(**fields["config"])
    return TransformerEncoder(**fields)


def restore_queries(description: Mapping[str, Any]) -> BagQueries | InceptionQueries:
    """The query encoder of `describe`."""
    fields = dict(description)
    return QUERIES[fields.pop("kind")](**fields)
