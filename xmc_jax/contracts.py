"""The packed token batch: the one shape in which texts travel from the host to an encoder."""

from __future__ import annotations

from typing import Any, NamedTuple


class TokenBatch(NamedTuple):
    """Several short texts a row, without padding between them.

    Text ``b`` of the batch is segment ``text_segment[b]`` of row ``text_row[b]``. One text a row is
    the same thing with every segment 1. Arrays are NumPy arrays of small unsigned types on the host
    and JAX arrays on the device; models widen them.

    Attributes:
      ids: ``[R, T]`` token ids; what stands in padding is never read. ``[R, T, H]`` hidden states
        where the lower layers of the encoder are frozen.
      segment_ids: ``[R, T]`` number of the text within its row, from 1; 0 = padding.
      positions: ``[R, T]`` place of the token within its text, from 0.
      text_row: ``[B]`` row of each text.
      text_segment: ``[B]`` segment of each text; 0 = an empty slot, whose vector is all zeros.
    """

    ids: Any
    segment_ids: Any
    positions: Any
    text_row: Any
    text_segment: Any
