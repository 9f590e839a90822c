"""The token store: every text tokenised once, ragged on disk, gathered by row without a loop."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import re
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from xmc_jax import files
from xmc_jax.contracts import Tokens
from xmc_jax.data.tokens.tokenizer import LONGEST_WORD, backend_of

_LAYOUT = 1  # Part of the key: raise it when the files change their meaning.
_MAX_BLOCK_TEXTS = 8192
_MAX_BLOCK_CHARACTERS = 1 << 20  # The library keeps what truncation cuts off until a block is done.
_FILES = ("ids", "offsets")
_ADVICE = "Set the environment variable XMC_CACHE to a folder for token ids that can."


@dataclass(frozen=True)
class TokenStore:
    """Token ids of ``n`` texts without padding: text ``i`` is ``ids[offsets[i] : offsets[i + 1]]``.

    Attributes:
      ids: ``[tokens]`` uint16, or uint32 where an id is above 65,535; memory-mapped if from disk.
        ``[tokens, H]`` where hidden states stand in their place (`xmc_jax.systems.frozen_layers`).
      offsets: ``[n + 1]`` int64.
      texts: the texts, where they are known; they are not stored with the tokens.
    """

    ids: np.ndarray
    offsets: np.ndarray
    texts: Sequence[str] | None = None

    def of(self, texts: Sequence[str] | None) -> TokenStore:
        """The same tokens, with the texts that they are of."""
        return replace(self, texts=texts)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Number of tokens ``[n]`` int32 of each row asked for (all by default); row -1 has none.

        Raises:
          ValueError: a row below -1 or not below ``len(self)``.
        """
        if rows is None:
            return np.diff(self.offsets).astype(np.int32)
        return self._span(rows)[1]

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of the rows, one after the other, and how many each has.

        Args:
          rows: ``[n]`` int, in any order, repeats allowed; -1 = no text, which has length 0.

        Returns:
          flat_ids: ``[sum(lengths)]`` in the dtype of ``ids``.
          lengths: ``[n]`` int32.

        Raises:
          ValueError: a row below -1 or not below ``len(self)``.
        """
        starts, lengths = self._span(rows)
        flat_starts = np.cumsum(lengths, dtype=np.int64) - lengths
        places = np.repeat(starts - flat_starts, lengths)
        places += np.arange(len(places))
        return np.asarray(self.ids).take(places, axis=0), lengths

    def _span(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = np.asarray(rows, np.int64).ravel()
        if rows.size and not (rows.min() >= -1 and rows.max() < len(self)):
            bad = rows[(rows < -1) | (rows >= len(self))][0]
            raise ValueError(
                f"row {bad} asked of a store of {len(self)} texts: expected -1 or 0..n-1"
            )
        real = rows >= 0
        rows = np.where(real, rows, 0)
        if not len(self):
            return rows, rows.astype(np.int32)
        starts = self.offsets[rows]
        return starts, np.where(real, self.offsets[rows + 1] - starts, 0).astype(np.int32)


@dataclass(frozen=True)
class JoinedTokens:
    """Two stores read as one: rows of the first, then those of the second; nothing is copied.

    Attributes:
      first: ``n`` texts.
      second: its text ``i`` is row ``n + i`` here.
    """

    first: Tokens
    second: Tokens
    texts = None

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def lengths(self, rows: np.ndarray | None = None) -> np.ndarray:
        """As `TokenStore.lengths`."""
        if rows is None:
            return np.concatenate([self.first.lengths(), self.second.lengths()])
        first, second = self._parts(rows)
        return self.first.lengths(first) + self.second.lengths(second)

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `TokenStore.gather`."""
        first, second = self._parts(rows)
        first_ids, first_lengths = self.first.gather(first)
        second_ids, second_lengths = self.second.gather(second)
        lengths = first_lengths + second_lengths
        of_second = np.repeat(second >= 0, lengths)
        shape = len(of_second), *first_ids.shape[1:]
        ids = np.empty(shape, np.result_type(first_ids, second_ids))
        ids[~of_second], ids[of_second] = first_ids, second_ids
        return ids, lengths

    def _parts(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the first store and of the second, -1 where the text is in the other one."""
        rows, border = np.asarray(rows, np.int64).ravel(), len(self.first)
        return np.where(rows < border, rows, -1), np.where(rows >= border, rows - border, -1)


def tokenize(
    texts: Sequence[str],
    tokenizer: Any,
    *,
    max_length: int,
    folder: str | Path,
    num_workers: int = 2,
    special_tokens: bool = True,
) -> TokenStore:
    """Tokenises the texts once, and opens the stored result ever after.

    The store is the subfolder ``tokens-KEY`` of ``folder``; KEY is a digest of the tokenizer,
    ``max_length``, ``special_tokens`` and the texts. It is written under a temporary name and
    renamed; one that does not match its own sizes and checksums is built again. Ids are equal for
    any ``num_workers``. Memory grows by the offsets only, 8 bytes a text.

    Args:
      texts: ``n`` texts; an empty one still has the tokenizer's special tokens.
      tokenizer: from ``load_tokenizer`` or ``train_wordpiece``, or a fast ``transformers`` one; it
        is not changed.
      max_length: longest text in tokens, special tokens included; the tokenizer cuts off the rest.
      folder: made if missing; several collections can share it.
      num_workers: blocks in work at a time, at least 1.
      special_tokens: False leaves out [CLS], [SEP] and their like (a bag of tokens needs none).

    Returns:
      A ``TokenStore`` of memory-mapped arrays.

    Raises:
      ValueError: a text that is no valid string (its row is named), ``max_length`` without room for
        the special tokens, a slow tokenizer.
      OSError: the disk is full or read-only; nothing half-written is left.
    """
    backend = _prepare(tokenizer, max_length, special_tokens)
    settings = (
        f"{_LAYOUT} {backend.to_str()} {max_length} {special_tokens} {_content_digest(texts)}"
    )
    key = hashlib.sha256(settings.encode()).hexdigest()[:20]
    return stored(
        Path(folder) / f"tokens-{key}",
        lambda: _token_blocks(texts, backend, special_tokens, num_workers),
        len(texts),
    )


def stored(
    path: Path, blocks: Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]], num_texts: int
) -> TokenStore:
    """Opens the store at ``path``, or writes it: under a temporary name, then renamed.

    Args:
      path: a folder whose name is a digest of all that the content depends on.
      blocks: makes the content: (ids ``[tokens, ...]``, lengths ``[texts]``) of texts in order.
      num_texts: how many texts there are.

    Raises:
      OSError: the disk is full or read-only; nothing half-written is left.
    """
    if path.exists():
        store = open_store(path)
        if store is not None:
            return store
        logging.warning("token store %s is incomplete or damaged: making it again", path)
        shutil.rmtree(path)
    whole = lambda folder: open_store(folder) is not None
    with files.publishing_folder(path, whole=whole, advice=_ADVICE) as temporary:
        _write(temporary, blocks(), num_texts)
    store = open_store(path)
    if store is None:
        raise OSError(f"token store {path} does not read back as it was written: check the disk")
    return store


def encode(
    texts: Sequence[str], tokenizer: Any, *, max_length: int, special_tokens: bool = True
) -> TokenStore:
    """``tokenize`` in memory, for texts seen once: same ids, nothing written, no progress bar."""
    backend = _prepare(tokenizer, max_length, special_tokens)
    blocks = (_encode_block(backend, *block, special_tokens) for block in _text_blocks(texts))
    store = joined(blocks, np.empty(0, np.uint32))
    return TokenStore(store.ids.astype(_id_dtype(backend)), store.offsets)


def joined(blocks: Iterable[tuple[np.ndarray, np.ndarray]], none: np.ndarray) -> TokenStore:
    """A store in memory of blocks as for `stored`; ``none`` is an empty array of their type."""
    values, lengths = [none], [np.zeros(1, np.int64)]
    for block, block_lengths in blocks:
        values.append(block)
        lengths.append(block_lengths)
    return TokenStore(np.concatenate(values), np.cumsum(np.concatenate(lengths)))


def _prepare(tokenizer: Any, max_length: int, special_tokens: bool) -> Tokenizer:
    """A copy that truncates as asked and does not pad; the caller's tokenizer stays as it is."""
    backend = Tokenizer.from_str(backend_of(tokenizer).to_str())
    reserved = backend.num_special_tokens_to_add(False) if special_tokens else 0
    if max_length <= reserved:
        raise ValueError(
            f"max_length={max_length}, but the tokenizer adds {reserved} special tokens to a text: "
            f"give at least {reserved + 1}"
        )
    direction = (backend.truncation or {}).get("direction", "right")
    backend.no_padding()
    backend.enable_truncation(max_length, direction=direction)
    return backend


def _id_dtype(backend: Tokenizer) -> np.dtype:
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
    return np.dtype(np.uint16 if largest <= np.iinfo(np.uint16).max else np.uint32)


def _text_blocks(texts: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """(first row, texts) of blocks of bounded numbers of texts and of characters."""
    first, block, characters = 0, [], 0
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"text {row} (counted from 0) is {text!r:.80}, expected a string")
        block.append(text)
        characters += len(text)
        if len(block) == _MAX_BLOCK_TEXTS or characters >= _MAX_BLOCK_CHARACTERS:
            yield first, block
            first, block, characters = row + 1, [], 0
    if block:
        yield first, block


def _content_digest(texts: Iterable[str]) -> str:
    """Digest of the texts and their boundaries, whatever characters they hold."""
    digest = hashlib.blake2b(digest_size=16)
    for _, block in _text_blocks(texts):
        digest.update(np.fromiter(map(len, block), np.int64, len(block)).tobytes())
        digest.update("".join(block).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _encode_block(
    backend: Tokenizer, first: int, block: list[str], special_tokens: bool
) -> tuple[np.ndarray, np.ndarray]:
    # Of one word no more than the tokens that are kept can come from; the rest would take minutes.
    truncation = backend.truncation or {}
    most = LONGEST_WORD * truncation["max_length"]
    if truncation["direction"] == "right" and max(map(len, block)) > most:
        block = [re.sub(rf"(\S{{{most}}})\S+", r"\1", text) for text in block]
    try:
        encodings = backend.encode_batch_fast(block, add_special_tokens=special_tokens)
    except TypeError as error:  # Half of a surrogate pair; the library does not say where.
        for row, text in enumerate(block, first):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as cause:
                raise ValueError(
                    f"text {row} (counted from 0) is no valid Unicode: {cause}; read its file as "
                    "utf-8 or latin-1"
                ) from error
        raise
    lists = [encoding.ids for encoding in encodings]
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    flat = itertools.chain.from_iterable(lists)
    return np.fromiter(flat, np.uint32, int(lengths.sum())), lengths


def _token_blocks(
    texts: Sequence[str], backend: Tokenizer, special_tokens: bool, num_workers: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, lengths) of each block in order, with at most ``num_workers`` + 1 blocks in memory.

    The library's own threads share a block, outside of Python's lock; several blocks in work let it
    go on while Python turns the block before into arrays.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers={num_workers}: expected at least 1")
    dtype = _id_dtype(backend)
    waiting: deque[Future] = deque()
    bar = tqdm(total=len(texts), desc="tokenising", unit=" texts", delay=1.0, unit_scale=True)
    with bar, ThreadPoolExecutor(num_workers) as pool:
        for block in itertools.chain(_text_blocks(texts), itertools.repeat(None, num_workers)):
            if block is not None:
                waiting.append(pool.submit(_encode_block, backend, *block, special_tokens))
            if waiting and (block is None or len(waiting) > num_workers):
                ids, lengths = waiting.popleft().result()
                bar.update(len(lengths))
                yield ids.astype(dtype), lengths


def _write(folder: Path, blocks: Iterable[tuple[np.ndarray, np.ndarray]], num_texts: int) -> None:
    offsets = np.zeros(num_texts + 1, np.int64)
    done = checksum = 0
    dtype, width = np.dtype(np.uint16), ()
    with (folder / "ids.bin").open("wb") as file:
        for ids, lengths in blocks:
            dtype, width = ids.dtype, ids.shape[1:]
            offsets[done + 1 : done + 1 + len(lengths)] = lengths
            done += len(lengths)
            checksum = zlib.crc32(ids.data, checksum)
            file.write(ids.data)  # Not tofile, which may miss that the disk is full.
    if done != num_texts:
        raise ValueError(f"len(texts) is {num_texts}, but {done} texts were read")
    np.cumsum(offsets, out=offsets)
    (folder / "offsets.bin").write_bytes(offsets.data)
    meta = {
        "num_texts": num_texts,
        "num_tokens": int(offsets[-1]),
        "dtype": dtype.name,
        "width": width,
        "ids_crc32": checksum,
        "offsets_crc32": zlib.crc32(offsets.data),
    }
    files.write_record(folder / "meta.json", meta)


def open_store(folder: Path) -> TokenStore | None:
    """The store in the folder, or None if it is not exactly what was written."""
    try:
        meta = files.read_record(folder / "meta.json")
        shape = (meta["num_tokens"], *meta.get("width", ()))
        ids = _map(folder / "ids.bin", np.dtype(meta["dtype"]), shape)
        offsets = _map(folder / "offsets.bin", np.dtype(np.int64), (meta["num_texts"] + 1,))
        checked = [_crc32(folder / f"{name}.bin") == meta[f"{name}_crc32"] for name in _FILES]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return TokenStore(ids, offsets) if all(checked) else None


def _map(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    if path.stat().st_size != size:
        raise ValueError(f"{path}: {path.stat().st_size} bytes, expected {size}")
    return np.memmap(path, dtype, mode="r", shape=shape) if size else np.empty(shape, dtype)


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum
