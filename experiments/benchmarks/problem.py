"""What a training step is measured on: an encoder's weights, texts, and batches of a real source.

Contenders read the same folder of weights and the same batches.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.sparse import csr_matrix
from tokenizers import Tokenizer

from configs import unidec
from xmc_jax.catalog import Entry
from xmc_jax.contracts import Stage
from xmc_jax.data.batching import packing
from xmc_jax.data.dataset import Dataset
from xmc_jax.data.tokens import tokenizer as tokenizers
from xmc_jax.data.tokens.token_stores import TokenStore
from xmc_jax.models import pretrained
from xmc_jax.models.encoders.transformer import TransformerConfig, TransformerEncoder
from xmc_jax.models.heads.unidec import UniDEC
from xmc_jax.runs import settings
from xmc_jax.systems.unidec.options import UniDECOptions
from xmc_jax.systems.unidec.source import make_source
from xmc_jax.systems.unidec.step import StepBatch
from xmc_jax.training import training_data
from xmc_jax.training.training_data import TrainingData

SHAPES = {
    "minilm": TransformerConfig.minilm(),
    "distilbert": TransformerConfig.distilbert(),
    "tiny": TransformerConfig.minilm(
        vocab_size=8000, dim=32, num_layers=1, num_heads=2, mlp_dim=64, max_positions=64
    ),
}
MAX_LENGTH = 32  # of a title, as in the papers' code
# LF-AmazonTitles-1.3M: words a title as printed in the papers; pieces a word and the spread of the
# log are our assumption.
WORDS, PIECES_A_WORD, SPREAD = 8.74, 1.4, 0.5
BLOCK = 1 << 18  # points drawn at once
STAGE = Stage(0, 1)  # of all batches


class Batch(NamedTuple):
    """One batch in the forms that contenders want.

    Attributes:
      packed: as training makes it.
      single: the same with one text a row.
      flat_ids: token ids of the queries, then of the pool's labels, without padding.
      lengths: ``[Q + P]`` of each text, 0 = an empty slot.
    """

    packed: StepBatch
    single: StepBatch
    flat_ids: np.ndarray
    lengths: np.ndarray


@dataclasses.dataclass(frozen=True)
class Problem:
    """What every contender starts from.

    Attributes:
      folder: Hugging Face folder of the encoder.
      options: of the run; losses, rates, sizes.
      heads: parameters of both heads.
      num_labels: rows of the table.
      batches: a few different ones.
    """

    folder: Path
    options: UniDECOptions
    heads: dict[str, dict[str, np.ndarray]]
    num_labels: int
    batches: tuple[Batch, ...]

    def table(self) -> np.ndarray:
        """First classifier table ``[L, d]``, the same for every contender."""
        rng = np.random.default_rng(1)
        shape = (self.num_labels, self.options.head_dim)
        return np.float32(0.2) * rng.standard_normal(shape, dtype=np.float32)


def make_options(queries: int, pool: int, head_dim: int, dtype: str = "float32") -> UniDECOptions:
    """Random batches with both symmetric losses, the pool filled up with random labels."""
    config = unidec.get_config("amazontitles1.3m")
    config.batch_size, config.pool_size, config.head_dim = queries, pool, head_dim
    config.batching, config.hard_negatives, config.fill = "random", False, "random"
    config.clf.loss = config.de.loss = "decoupled_softmax"
    config.encoder.compute_dtype = dtype
    config.held_out_share = 0.0
    return settings.options_of(config)


def read_titles(
    dataset: str, data: str, encoder: str, folder: Path
) -> tuple[Dataset, Entry, Tokenizer]:
    """A data set of real titles, and the encoder's tokenizer or one trained on the titles."""
    read, entry, _ = training_data.read_dataset(dataset, data, max_length=MAX_LENGTH)
    if encoder:
        return read, entry, tokenizers.load_tokenizer(encoder)
    every = [*read.train.texts, *read.label_texts]
    size = SHAPES["minilm"].vocab_size if len(every) > 10_000 else SHAPES["tiny"].vocab_size
    return read, entry, tokenizers.train_wordpiece(every, vocab_size=size, folder=folder)


def titles(
    options: UniDECOptions, dataset: str, data: str, encoder: str, folder: Path
) -> TrainingData:
    """What training reads of a data set of real titles."""
    return training_data.load(options, *read_titles(dataset, data, encoder, folder))


def amazon_shaped(
    num_points: int,
    num_labels: int,
    vocab_size: int,
    *,
    labels_a_point: float = 22.2,
    seed: int = 0,
) -> TrainingData:
    """Random tokens in texts of LF-AmazonTitles-1.3M's lengths, random labels, popular ones more.

    Numbers of labels a point are log-normal. Every second point has a filter pair.
    """
    rng = np.random.default_rng(0)
    counts = rng.lognormal(np.log(labels_a_point) - 0.5, 1.0, num_points)
    counts = np.clip(counts, 1, num_labels // 4).astype(np.int64)
    sizes, indices = [], []
    for start in range(0, num_points, BLOCK):
        row = np.repeat(np.arange(min(BLOCK, num_points - start)), counts[start : start + BLOCK])
        label = (num_labels * rng.random(len(row)) ** 2).astype(np.int64)
        row, label = np.divmod(np.unique(row * num_labels + label), num_labels)
        sizes.append(np.bincount(row))
        indices.append(label.astype(np.int32))
    shape = (num_points, num_labels)
    labels = _matrix(np.concatenate(sizes), np.concatenate(indices), shape, np.float32)
    twin = np.arange(num_points) % 2
    barred = rng.integers(0, num_labels, int(twin.sum()), np.int32)
    filters = _matrix(twin, barred, shape, bool)
    stores = [_tokens(rng, number, vocab_size) for number in (num_points, num_labels)]
    return TrainingData(None, None, *stores, labels, filters, None, None)


def _matrix(
    sizes: np.ndarray, indices: np.ndarray, shape: tuple[int, int], dtype: Any
) -> csr_matrix:
    indptr = np.concatenate([[0], np.cumsum(sizes)])
    return csr_matrix((np.ones(len(indices), dtype), indices, indptr), shape=shape)


def _tokens(rng: np.random.Generator, number: int, vocab_size: int) -> TokenStore:
    words = rng.lognormal(np.log(WORDS) - SPREAD**2 / 2, SPREAD, number)
    lengths = np.clip(np.rint(PIECES_A_WORD * words) + 2, 3, MAX_LENGTH).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return TokenStore(rng.integers(1, vocab_size, offsets[-1], np.uint16), offsets)


def write_encoder(shape: str, folder: Path, encoder: str = "") -> TransformerEncoder:
    """Writes the weights that all contenders read: the given ones if of this shape, else random."""
    if encoder:
        made, params = pretrained.load_encoder(encoder, pooling="mean")
        if made.config == SHAPES[shape]:
            pretrained.save_encoder(folder, made, params)
            return made
    made = TransformerEncoder(SHAPES[shape])
    pretrained.save_encoder(folder, made, made.init(jax.random.key(0)))
    return made


def make(
    options: UniDECOptions,
    shape: str,
    data: TrainingData,
    folder: Path,
    *,
    encoder: str,
    number: int,
) -> Problem:
    """Weights below ``folder`` and the first ``number`` batches of a run on ``data``."""
    made = write_encoder(shape, folder, encoder)
    params = jax.tree.map(np.asarray, UniDEC(made, options.head_dim).init(jax.random.key(2)))
    heads = {name: params[name] for name in ("de_head", "clf_head")}
    source = make_source(options, data, made.max_segments)
    queries = source.epoch_queries(0)
    batches = []
    ahead = itertools.islice(source.ahead(STAGE, 0, 0), number)
    for step, (packed, _, labels) in enumerate(ahead):
        gathered = [data.train_tokens.gather(queries[step]), data.label_tokens.gather(labels)]
        flat, lengths = (np.concatenate(parts) for parts in zip(*gathered))
        single = packing.one_text_a_row(flat, lengths, row_length=MAX_LENGTH)
        batches.append(Batch(packed, packed._replace(tokens=single), flat, lengths))
    return Problem(folder, options, heads, data.num_labels, tuple(batches))


def useful_flops(config: TransformerConfig, batch: Batch, head_dim: int, *, train: bool) -> float:
    """Matrix FLOPs of the tokens that are texts: maps, attention within a text, heads, scores.

    A backward pass has twice the FLOPs of the forward pass.
    """
    lengths = batch.lengths.astype(np.float64)
    queries = batch.packed.targets.shape[0]
    maps = 2 * (4 * config.dim**2 + 2 * config.dim * config.mlp_dim) * lengths.sum()
    attention = 4 * config.dim * np.square(lengths).sum()
    heads = 2 * config.dim * head_dim * (len(lengths) + queries)
    scores = 2 * 2 * head_dim * batch.packed.targets.size
    return float(config.num_layers * (maps + attention) + heads + scores) * (3 if train else 1)
