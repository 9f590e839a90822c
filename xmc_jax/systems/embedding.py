"""Texts through a model, chunk by chunk, each chunk packed into one of two compiled shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from tqdm import tqdm

from xmc_jax.contracts import TokenBatch, Tokens
from xmc_jax.data.batching import packing

CHUNK_TEXTS = 2048
FEW = 32  # a call of a 32nd of a chunk, or less, has a shape of its own

# From places ``start, stop`` among the rows and their tokens to arrays whose rows are the texts.
Function = Callable[[int, int, TokenBatch], Sequence[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How many texts go through a model at once.

    One shape is compiled for all stores, whatever their lengths; and, where ``few`` is set, one of
    a 32nd of that for calls with so few texts, which then do not wait for rows of padding.

    Attributes:
      rows: packed rows of a chunk.
      texts: texts of a chunk, at most.
      row_length: tokens of a packed row, at least the longest text.
      max_segments: texts of a packed row, at most.
      few: whether few texts have a shape of their own.
    """

    rows: int
    texts: int
    row_length: int
    max_segments: int
    few: bool = False

    def split(self, store: Tokens, rows: np.ndarray) -> Iterator[tuple[int, int, TokenBatch]]:
        """Consecutive ranges ``start, stop`` of ``rows`` that fit, each packed into the one shape.

        Args:
          store: the texts.
          rows: ``[n]`` which of them.
        """
        packed = {"row_length": self.row_length, "max_segments": self.max_segments}
        lengths = np.asarray(store.lengths(rows), np.int64)
        ends = np.cumsum(lengths)
        num_rows, num_texts = self._shape(lengths)
        start = 0
        while start < len(rows):
            before = ends[start - 1] if start else 0
            stop = int(np.searchsorted(ends, before + num_rows * self.row_length, side="right"))
            stop = min(max(stop, start + 1), start + num_texts, len(rows))
            while (needed := packing.count_rows(lengths[start:stop], **packed)) > num_rows:
                stop = start + (stop - start) * num_rows // needed
            padded = np.full(num_texts, -1, np.int64)
            padded[: stop - start] = rows[start:stop]
            flat, sizes = store.gather(padded)
            yield start, stop, packing.pack(flat, sizes, num_rows=num_rows, **packed)
            start = stop

    def run(
        self,
        function: Function,
        store: Tokens,
        rows: np.ndarray | None,
        *,
        dim: int,
        outputs: int = 1,
    ) -> tuple[np.ndarray, ...]:
        """What a function gives for every text: ``outputs`` arrays ``[n, dim]`` float32.

        Args:
          function: of a chunk.
          store: the texts.
          rows: ``[n]`` which of them; None = all.
          dim: size of a text's vector.
          outputs: arrays that the function returns.
        """
        rows = np.arange(len(store)) if rows is None else np.asarray(rows)
        arrays = tuple(np.zeros((len(rows), dim), np.float32) for _ in range(outputs))
        with tqdm(total=len(rows), desc="embedding", unit=" texts", delay=2, leave=False) as bar:
            for start, stop, tokens in self.split(store, rows):
                for array, part in zip(arrays, function(start, stop, tokens)):
                    array[start:stop] = np.asarray(part)[: stop - start]
                bar.update(stop - start)
        return arrays

    def _shape(self, lengths: np.ndarray) -> tuple[int, int]:
        """Packed rows and texts of a chunk."""
        few_rows, few_texts = max(1, self.rows // FEW), max(1, self.texts // FEW)
        if self.few and len(lengths) <= few_texts:
            packed = {"row_length": self.row_length, "max_segments": self.max_segments}
            if packing.count_rows(lengths, **packed) <= few_rows:
                return few_rows, few_texts
        return self.rows, self.texts
