"""Frozen lower layers: what they put out for a text is computed once and read like token ids.

    frozen/             of a work directory: the frozen part, as a Hugging Face folder
    $XMC_CACHE/hidden/  what it puts out, one store for each token store

Training, evaluation and prediction run the rest of the encoder on it: ``TransformerEncoder.start``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from tqdm import tqdm

from xmc_jax import files
from xmc_jax.contracts import Encoder, TokenBatch, Tokens
from xmc_jax.data.batching import packing
from xmc_jax.data.tokens import token_stores
from xmc_jax.data.tokens.token_stores import TokenStore
from xmc_jax.host import xla
from xmc_jax.models import pretrained
from xmc_jax.models.encoders.transformer import TransformerEncoder
from xmc_jax.systems.embedding import Chunks

FOLDER = "frozen"
CHUNK_TOKENS, CHUNK_TEXTS = 8192, 1024
PART_TEXTS = 1 << 13


class FrozenLayers:
    """The embeddings and the lowest layers of an encoder, which are not trained.

    A text's hidden states stand in place of its token ids: a vector a token, or, where all layers
    are frozen, its pooled vector as if it had one token.
    """

    def __init__(
        self,
        encoder: TransformerEncoder,
        params: Any,
        *,
        pooled: bool,
        row_length: int,
        dtype: str = "float16",
    ) -> None:
        """Prepare the jitted function.

        Args:
          encoder: of these layers alone.
          params: its parameters.
          pooled: whether these are all layers.
          row_length: tokens of a packed row, at least the longest text.
          dtype: of what is stored.
        """
        self.encoder, self.params, self.pooled, self.dtype = encoder, params, pooled, dtype
        num_rows = max(1, CHUNK_TOKENS // row_length)
        self._chunks = Chunks(num_rows, CHUNK_TEXTS, row_length, encoder.max_segments)
        digest = hashlib.sha256(f"1 {encoder} {pooled} {dtype}".encode())
        for leaf in jax.tree.leaves(params):
            digest.update(np.asarray(leaf).data)
        self._digest = digest.digest()

        def hidden(params: Any, tokens: TokenBatch) -> jax.Array:
            if pooled:
                return encoder.apply(params, tokens).astype(dtype)  # [B, H]
            return encoder.hidden(params, *tokens[:3]).astype(dtype)  # [R, T, H]

        self._hidden = jax.jit(hidden, compiler_options=xla.compiler_options())

    def __call__(self, tokens: TokenStore, *, keep: bool = True) -> TokenStore:
        """Hidden states of all texts of a token store.

        Args:
          tokens: the texts.
          keep: whether they are written to the cache; they are looked for there in any case.

        Raises:
          OSError: the cache has too little room, or cannot be written to.
        """
        digest = hashlib.sha256(self._digest)
        for array in (tokens.ids, tokens.offsets):
            digest.update(np.ascontiguousarray(array).data)
        path = files.cache_folder() / "hidden" / f"hidden-{digest.hexdigest()[:20]}"
        if not keep and not path.exists():
            blocks = self._blocks(tokens, np.arange(len(tokens)))
            return token_stores.joined(blocks, np.zeros((0, self.encoder.dim), self.dtype))
        if not path.exists():
            vectors = len(tokens) if self.pooled else len(tokens.ids)
            _check_room(path, vectors * self.encoder.dim * np.dtype(self.dtype).itemsize)
        store = token_stores.stored(path, lambda: self._parts(tokens, path), len(tokens))
        for part in path.parent.glob(f"{path.name}-from-*"):
            if part.suffix != ".tmp":  # another process is writing it
                shutil.rmtree(part, ignore_errors=True)
        return store

    def _parts(self, tokens: TokenStore, path: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Large blocks, each kept on disk until all are there: a killed pass goes on from them."""
        for first in range(0, len(tokens), PART_TEXTS):
            rows = np.arange(first, min(first + PART_TEXTS, len(tokens)))
            make = functools.partial(self._blocks, tokens, rows)
            part = token_stores.stored(path.with_name(f"{path.name}-from-{first}"), make, len(rows))
            yield part.ids, part.lengths()

    def _blocks(
        self, tokens: TokenStore, rows: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        options = {"desc": "frozen layers", "unit": " texts", "delay": 2, "leave": False}
        with tqdm(total=len(tokens), initial=int(rows[0]) if len(rows) else 0, **options) as bar:
            for start, stop, batch in self._chunks.split(tokens, rows):
                hidden = np.asarray(self._hidden(self.params, batch))
                if self.pooled:
                    yield hidden[: stop - start], np.ones(stop - start, np.int64)
                else:
                    yield packing.unpack(batch, hidden), tokens.lengths(rows[start:stop])
                bar.update(stop - start)


def split(
    encoder: TransformerEncoder, params: Any, layers: int, *, row_length: int
) -> tuple[FrozenLayers, TransformerEncoder, Any]:
    """Cuts an encoder above its lowest ``layers`` layers.

    Args:
      encoder: a whole encoder.
      params: its parameters.
      layers: 1 to all of them.
      row_length: tokens of a packed row.

    Returns:
      The frozen part, the encoder of the rest, and the parameters of the rest.
    """
    rest = {f"layer_{i}": params[f"layer_{i}"] for i in range(layers, encoder.config.num_layers)}
    upper = dataclasses.replace(encoder, start=layers)
    if not rest:  # one vector a text, many of which fill a row
        upper = dataclasses.replace(upper, max_segments=min(row_length, 255))
    lower = {name: value for name, value in params.items() if name not in rest}
    shape = dataclasses.replace(encoder.config, num_layers=layers)
    frozen = FrozenLayers(
        dataclasses.replace(encoder, config=shape), lower, pooled=not rest, row_length=row_length
    )
    return frozen, upper, rest


def split_run(
    layers: int, workdir: Path, encoder: TransformerEncoder, params: Any, *, row_length: int
) -> tuple[FrozenLayers, TransformerEncoder, Any]:
    """`split` for a run, whose frozen part is kept in its work directory."""
    frozen, upper, rest = split(encoder, params, layers, row_length=row_length)
    kept = load(workdir, upper, row_length=row_length)
    if kept is None:
        pretrained.save_encoder(workdir / FOLDER, frozen.encoder, frozen.params)
    return kept or frozen, upper, rest  # the pretrained folder may have changed since


def load(workdir: Path, upper: Encoder, *, row_length: int) -> FrozenLayers | None:
    """The frozen part of a run, to go before its encoder ``upper``; None where nothing is frozen.

    Raises:
      ValueError: it is damaged.
    """
    if not (workdir / FOLDER).exists():
        return None
    assert isinstance(upper, TransformerEncoder), "of one tower"
    encoder, params = pretrained.load_encoder(
        workdir / FOLDER, pooling=upper.pooling, compute_dtype=upper.compute_dtype
    )
    return FrozenLayers(encoder, params, pooled=reads_pooled(upper), row_length=row_length)


def reads_pooled(encoder: Encoder) -> bool:
    """Whether an encoder is what remains where all layers are frozen."""
    if not isinstance(encoder, TransformerEncoder):
        return False
    return 0 < encoder.start == encoder.config.num_layers


def read_through(frozen: FrozenLayers | None, tokens: Tokens, *, keep: bool) -> Tokens:
    """What the frozen layers, if there are any, put out for texts.

    Args:
      frozen: the layers, or None.
      tokens: the texts' ids.
      keep: whether it is written to the cache.

    Raises:
      OSError: it cannot be written.
    """
    if frozen is None:
        return tokens
    assert isinstance(tokens, TokenStore)
    return frozen(tokens, keep=keep).of(tokens.texts)


def _check_room(path: Path, size: int) -> None:
    """Say what will be written (for a moment twice), and refuse what the disk cannot hold."""
    place = next(folder for folder in path.parents if folder.exists())
    free = shutil.disk_usage(place).free
    logging.info("hidden states of the frozen layers: %.2f GiB in %s", size / 2**30, path)
    if 2 * size > free:
        raise OSError(
            f"{path}: the hidden states need {2 * size / 2**30:.1f} GiB, {free / 2**30:.1f} are "
            "free. Set the environment variable XMC_CACHE to a larger disk, or freeze all layers: "
            "that keeps one vector a text."
        )
