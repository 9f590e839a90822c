"""Tokenizers: any fast Hugging Face one, or word pieces or words of the data set's own texts."""

from __future__ import annotations

import collections
import functools
import itertools
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from xmc_jax import files

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LONGEST_WORD = 100  # characters; a longer run without blanks is cut (BERT's are unknown)
MOST_UNKNOWN = 0.05  # share of tokens from which on it is a warning
_TEXTS_PER_BLOCK = 8192
_COUNTED = 1000  # letters of one word that a vocabulary is made of: a file in a cell is no language
_LETTER = r"[^\W\u3400-\u9fff\uf900-\ufaff]"  # Chinese characters are words
_TOO_LONG = re.compile(f"({_LETTER}{{{_COUNTED}}}){_LETTER}+")
_NO_BLANKS = r"\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}\p{Hiragana}\p{Katakana}\u30fc"
_CHARACTERS = rf"[{_NO_BLANKS}]\p{{M}}*|[^{_NO_BLANKS}]+"  # of them, with their marks
_CUT = rf"\A.{{1,{LONGEST_WORD}}}\z|."


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
    lower: bool = True,
    strip_accents: bool = True,
) -> Tokenizer:
    """Trains a BERT-like WordPiece vocabulary and stores it: same texts, same vocabulary, always.

    The library's trainer numbers word-internal characters in the order of a hash map with a random
    seed, and breaks ties between merges by these numbers, so two runs differ. Here the characters
    are counted first and their pieces handed over in a fixed order, as reserved tokens, which
    leaves nothing to chance. Words of more than 100 characters are cut every 100.

    Args:
      texts: read twice, in blocks; only the distinct words are kept in memory.
      vocab_size: most pieces to have, the five special tokens ([PAD] = 0) included; at least 256.
      folder: where ``tokenizer.json`` and ``tokenizer_config.json`` are written.
      special_tokens: put [CLS] and [SEP] around a text; a bag of tokens needs neither.
      lower: lower-case texts.
      strip_accents: take marks off letters; else ``n`` and its tilde are one character (NFC).

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
    trained = _bare_wordpiece({"[UNK]": 0}, lower, strip_accents)
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
    tokenizer = _bare_wordpiece(trained.get_vocab(), lower, strip_accents)
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
    lower: bool = True,
    strip_accents: bool = True,
) -> Tokenizer:
    """Makes a vocabulary of the most frequent words and stores it; ties in alphabetical order.

    Texts are split at spaces and punctuation as for word pieces, without special tokens around
    them. In scripts that are written without blanks each character is a word, as Chinese ones are;
    so it is in words of more than 100 characters. A word that is not in the vocabulary is [UNK].

    Args:
      texts: read once, in blocks; only the distinct words are kept in memory.
      vocab_size: most words to have, the five special tokens ([PAD] = 0) included.
      folder: where ``tokenizer.json`` and ``tokenizer_config.json`` are written.
      lower, strip_accents: as of `train_wordpiece`.

    Returns:
      The tokenizer; ids lie below its ``get_vocab_size()``.

    Raises:
      ValueError: broken text, or no text.
    """
    split = _bare_wordpiece({"[UNK]": 0}, lower, strip_accents)
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in (_CHARACTERS, _CUT)]
    split.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), *cuts])
    counts: collections.Counter[str] = collections.Counter()
    for block in _blocks(texts):
        for text in block:
            counts.update(_words(split, text))
    if not counts:
        raise ValueError("no text holds a word: there is nothing to make a vocabulary of")
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    vocab = [*SPECIAL_TOKENS, *ranked[: max(0, vocab_size - len(SPECIAL_TOKENS))]]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(vocab)}, unk_token="[UNK]")
    )
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
    return _words(_splitter(), text)


def unknown_share(tokenizer: Tokenizer, counts: np.ndarray) -> float:
    """The share of unknown tokens among those that a text holds.

    Args:
      tokenizer: any; one that knows all (of bytes, for example) has no unknown token.
      counts: ``[vocab_size]``, how often each token occurs. Of special ones that of the unknown
        alone counts.
    """
    model = json.loads(tokenizer.to_str())["model"]
    unknown = model.get("unk_id")  # of a Unigram
    if model.get("unk_token") is not None:
        unknown = tokenizer.token_to_id(model["unk_token"])
    if unknown is None:
        return 0.0
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    others = counts.sum() - sum(counts[i] for i in special if i != unknown)
    return float(counts[unknown] / max(1, others))


def unknown_lines(shares: Mapping[str, float]) -> list[str]:
    """Says the `unknown_share` of texts, by their name; and what may be done about a large one."""
    said = ", ".join(f"{share:.1%} in {name} texts" for name, share in shares.items())
    lines = [f"unknown tokens: {said}"]
    if max(shares.values()) > MOST_UNKNOWN:
        lines.append(
            f"warning: more than {MOST_UNKNOWN:.0%} of the tokens are unknown, and nothing is "
            "learned from these. A larger vocab_size knows more; vocabulary=wordpiece knows more "
            "than words do, and a vocabulary of the data more than a pretrained model that was "
            "made for another language."
        )
    return lines


def _words(split: Tokenizer, text: str) -> list[str]:
    normal = split.normalizer.normalize_str(text)
    return [word for word, _ in split.pre_tokenizer.pre_tokenize_str(normal)]


@functools.cache
def _splitter() -> Tokenizer:
    return _bare_wordpiece({"[UNK]": 0}, lower=True, strip_accents=True)


def _bare_wordpiece(vocab: dict[str, int], lower: bool, strip_accents: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    bert = normalizers.BertNormalizer(lowercase=lower, strip_accents=strip_accents)
    one_form = normalizers.Sequence([normalizers.NFC(), bert])
    tokenizer.normalizer = bert if strip_accents else one_form
    cut = pre_tokenizers.FixedLength(LONGEST_WORD)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), cut])
    return tokenizer


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    texts = (_TOO_LONG.sub(r"\1", x) if len(x) > _COUNTED else x for x in texts)
    while block := list(itertools.islice(texts, _TEXTS_PER_BLOCK)):
        yield block


def _alphabet(
    texts: Iterable[str], tokenizer: Tokenizer, limit: int
) -> tuple[list[str], list[str]]:
    """The most frequent characters after normalisation; ``##c`` for those found inside words."""
    counts = np.zeros(0x110000, np.int64)
    for block in _blocks(texts):
        joined = unicodedata.normalize("NFC", "\n".join(block))  # as a letter and its mark count
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
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
