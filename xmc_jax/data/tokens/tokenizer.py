"""Tokenizers: any fast Hugging Face one, or word pieces or words of the data set's own texts."""

from __future__ import annotations

import collections
import functools
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from xmc_jax import files

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_TEXTS_PER_BLOCK = 8192


def load_tokenizer(name_or_folder: str | Path) -> Tokenizer:
    """Opens a fast tokenizer from a local folder or by its Hugging Face hub name.

    A folder with ``tokenizer.json`` is read by ``tokenizers`` alone, in a tenth of a second; any
    other folder or name goes through ``transformers.AutoTokenizer``. Ids are those of
    ``AutoTokenizer`` in both cases. Padding and truncation settings found in the file are switched
    off: callers set lengths.

    Args:
      name_or_folder: a folder, or a hub name such as ``distilbert-base-uncased``.

    Returns:
      A ``tokenizers.Tokenizer``.

    Raises:
      ValueError: no such folder; a folder without tokenizer files; an unreadable
        ``tokenizer.json``; a name that is not on the hub or cannot be fetched; a tokenizer without
        a fast version.
    """
    folder = Path(os.path.expanduser(name_or_folder))
    if (folder / "tokenizer.json").is_file():
        tokenizer = _read_json_tokenizer(folder)
    elif folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give the folder that holds tokenizer.json")
    elif not folder.exists() and _looks_like_path(str(name_or_folder)):
        raise ValueError(
            f"no such folder: {folder}; give a folder that holds tokenizer.json, or a hub name "
            "such as distilbert-base-uncased"
        )
    else:
        tokenizer = _auto_tokenizer(str(folder) if folder.is_dir() else str(name_or_folder))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: str | Path) -> None:
    """Writes a folder that ``load_tokenizer`` and AutoTokenizer open.

    Args:
      tokenizer: a ``tokenizers.Tokenizer`` or a fast ``transformers`` one.
      folder: made if missing; each file is written under a temporary name and renamed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    backend = backend_of(tokenizer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    for key, token in zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL_TOKENS):
        if backend.token_to_id(token) is not None:
            config[f"{key}_token"] = token
    for name, text in (
        ("tokenizer.json", backend.to_str(pretty=True)),
        ("tokenizer_config.json", json.dumps(config, indent=2) + "\n"),
    ):
        with files.replacing(folder / name, shared=True) as file:
            file.write(text)


def train_wordpiece(
    texts: Sequence[str] | Iterable[str],
    *,
    vocab_size: int,
    folder: str | Path,
    special_tokens: bool = True,
) -> Tokenizer:
    """Trains a BERT-like WordPiece vocabulary and stores it: same texts, same vocabulary, always.

    The library's trainer numbers word-internal characters in the order of a hash map with a random
    seed, and breaks ties between merges by these numbers, so two runs differ. Here the characters
    are counted first and their pieces handed over in a fixed order, as reserved tokens, which
    leaves nothing to chance.

    Args:
      texts: read twice, in blocks; only the distinct words are kept in memory.
      vocab_size: most pieces to have, the five special tokens ([PAD] = 0) included; at least 256.
      folder: where ``tokenizer.json`` and ``tokenizer_config.json`` are written.
      special_tokens: put [CLS] and [SEP] around a text; a bag of tokens needs neither.

    Returns:
      The tokenizer; ids lie below its ``get_vocab_size()``.

    Raises:
      ValueError: ``vocab_size`` below 256, ``texts`` a one-way iterator, broken text, or no text.
    """
    if vocab_size < 256:
        raise ValueError(
            f"vocab_size={vocab_size}: at least 256 are needed, 8,000 to 32,000 are usual"
        )
    if isinstance(texts, Iterator):
        raise ValueError("texts is an iterator that can be read once: give a list or LineTexts")
    trained = _bare_wordpiece({"[UNK]": 0})
    alphabet, inner = _alphabet(texts, trained, vocab_size // 4)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[*SPECIAL_TOKENS, *inner],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    trained.train_from_iterator(_blocks(texts), trainer)
    # A fresh one: the trained tokenizer would treat the reserved pieces as special tokens.
    tokenizer = _bare_wordpiece(trained.get_vocab())
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    if special_tokens:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
        )
    save_tokenizer(tokenizer, folder)
    return tokenizer


def train_words(
    texts: Iterable[str],
    *,
    vocab_size: int,
    folder: str | Path,
) -> Tokenizer:
    """Makes a vocabulary of the most frequent words and stores it; ties in alphabetical order.

    Texts are lower-cased and split at spaces and punctuation as for word pieces, without special
    tokens around them. A word that is not in the vocabulary is [UNK].

    Args:
      texts: read once, in blocks; only the distinct words are kept in memory.
      vocab_size: most words to have, the five special tokens ([PAD] = 0) included.
      folder: where ``tokenizer.json`` and ``tokenizer_config.json`` are written.

    Returns:
      The tokenizer; ids lie below its ``get_vocab_size()``.

    Raises:
      ValueError: broken text, or no text.
    """
    counts: collections.Counter[str] = collections.Counter()
    for block in _blocks(texts):
        for text in block:
            counts.update(split_words(text))
    if not counts:
        raise ValueError("no text holds a word: there is nothing to make a vocabulary of")
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    vocab = [*SPECIAL_TOKENS, *ranked[: max(0, vocab_size - len(SPECIAL_TOKENS))]]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(vocab)}, unk_token="[UNK]")
    )
    split = _splitter()
    tokenizer.normalizer, tokenizer.pre_tokenizer = split.normalizer, split.pre_tokenizer
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    save_tokenizer(tokenizer, folder)
    return tokenizer


def backend_of(tokenizer: Any) -> Tokenizer:
    """The ``tokenizers.Tokenizer`` of a fast ``transformers`` tokenizer, or the argument itself."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        raise ValueError(
            f"{type(tokenizer).__name__} has no fast version: open it with "
            "load_tokenizer, or convert it to one that has a tokenizer.json"
        )
    return backend


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1


def _read_json_tokenizer(folder: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # The library raises bare Exception.
        raise ValueError(f"{folder / 'tokenizer.json'} is not a tokenizer file: {error}") from error
    config_file = folder / "tokenizer_config.json"
    if isinstance(tokenizer.normalizer, normalizers.BertNormalizer) and config_file.is_file():
        _apply_bert_options(tokenizer.normalizer, config_file)
    return tokenizer


def _apply_bert_options(normalizer: Any, config_file: Path) -> None:
    """BERT folders say twice whether to lower-case; Hugging Face believes the config."""
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config_file} is not JSON: {error}") from error
    for key, option in (
        ("do_lower_case", "lowercase"),
        ("strip_accents", "strip_accents"),
        ("tokenize_chinese_chars", "handle_chinese_chars"),
    ):
        if key in config:
            setattr(normalizer, option, config[key])


def _auto_tokenizer(name: str) -> Tokenizer:
    # Two seconds to import, and needed for hub names and old folders only.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, use_fast=True)
        # A folder with config.json alone gives one that knows nothing, and no error.
        if len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise ValueError("its vocabulary is empty")
        return backend_of(tokenizer)
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        if Path(name).is_dir():
            files = sorted(path.name for path in Path(name).iterdir())[:10]
            message = f"no fast tokenizer in {name} (it holds {files}): expected tokenizer.json"
        else:
            message = (
                f"tokenizer {name!r} is no local folder and could not be fetched from the hub: "
                "check the name and the network (HF_HUB_OFFLINE?), or give the folder of a copy"
            )
        cause = (str(error) or repr(error)).splitlines()[0]
        raise ValueError(f"{message}. Cause: {cause}") from error


def split_words(text: str) -> list[str]:
    """What BERT's and our tokenizers cut a text into before word pieces, in lower case.

    >>> split_words("AB-1 naïve 中文")
    ['ab', '-', '1', 'naive', '中', '文']
    """
    split = _splitter()
    normal = split.normalizer.normalize_str(text)
    return [word for word, _ in split.pre_tokenizer.pre_tokenize_str(normal)]


@functools.cache
def _splitter() -> Tokenizer:
    return _bare_wordpiece({"[UNK]": 0})


def _bare_wordpiece(vocab: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    texts = iter(texts)
    while block := list(itertools.islice(texts, _TEXTS_PER_BLOCK)):
        yield block


def _alphabet(
    texts: Iterable[str], tokenizer: Tokenizer, limit: int
) -> tuple[list[str], list[str]]:
    """The most frequent characters after normalisation; ``##c`` for those found inside words."""
    counts = np.zeros(0x110000, np.int64)
    for block in _blocks(texts):
        codes = np.frombuffer("".join(block).encode("utf-32-le", "surrogatepass"), np.uint32)
        block_counts = np.bincount(codes)
        counts[: len(block_counts)] += block_counts
    if counts[0xD800:0xE000].any():
        raise ValueError("a text holds half a surrogate pair: read its file as utf-8 or latin-1")
    normalised: dict[str, int] = {}
    for code in np.flatnonzero(counts):
        for char in tokenizer.normalizer.normalize_str(chr(code)):
            if not char.isspace():
                normalised[char] = normalised.get(char, 0) + int(counts[code])
    if not normalised:
        raise ValueError("no text holds a character: there is nothing to train a tokenizer on")
    alphabet = sorted(sorted(normalised, key=lambda char: (-normalised[char], char))[:limit])
    # Punctuation and Chinese characters are words of their own: ## pieces would never be used.
    split = tokenizer.pre_tokenizer.pre_tokenize_str
    inner = [f"##{char}" for char in alphabet if _stays_inside(char, tokenizer, split)]
    return alphabet, inner


def _stays_inside(char: str, tokenizer: Tokenizer, split: Any) -> bool:
    return len(split(tokenizer.normalizer.normalize_str(f"a{char}"))) == 1
