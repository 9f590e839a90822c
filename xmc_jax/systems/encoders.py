"""Tokenizers and text encoders of a run: from the configuration, and back from a work directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from xmc_jax.data.tokens import tokenizer as tokenizers
from xmc_jax.data.tokens import word_vectors
from xmc_jax.models import pretrained
from xmc_jax.models.encoders.bag import BagEncoder
from xmc_jax.models.encoders.transformer import TransformerConfig, TransformerEncoder
from xmc_jax.models.frugal.bag_queries import BagQueries
from xmc_jax.models.frugal.classifier import Frugal
from xmc_jax.models.frugal.inception import InceptionQueries
from xmc_jax.models.heads.unidec import UniDEC
from xmc_jax.training.training_data import WORD_VECTORS


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
    whole = config.encoder.vocabulary == "words" or word_vectors.is_file(source)
    if of_words and whole:
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


def describe(made: UniDEC | Frugal) -> dict[str, Any]:
    """A model's encoder as plain JSON: enough to make it again without its pretrained folder."""
    encoder = made.queries if isinstance(made, Frugal) else made.encoder
    return {"kind": type(encoder).__name__, **dataclasses.asdict(encoder)}


def restore(description: dict[str, Any]) -> Any:
    """The encoder of ``describe``."""
    fields = dict(description)
    kinds = {kind.__name__: kind for kind in (BagEncoder, BagQueries, InceptionQueries)}
    kind = kinds.get(fields.pop("kind"))
    if kind is not None:
        return kind(**fields)
    fields["config"] = TransformerConfig(**fields["config"])
    return TransformerEncoder(**fields)
