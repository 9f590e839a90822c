"""Vocabularies made of own data: runs without blanks, marks, very long words, unknown tokens."""

from __future__ import annotations

import random
import re
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import tiny
from tokenizers import Tokenizer, models

from xmc_jax.data.tokens import token_stores
from xmc_jax.data.tokens import tokenizer as tokenizers

MAKERS = {"wordpiece": tokenizers.train_wordpiece, "words": tokenizers.train_words}
SCRIPTS = {  # first and last of the letters that words are drawn from
    "Khmer": (0x1780, 0x17B3),
    "Thai": (0x0E01, 0x0E30),
    "Lao": (0x0E81, 0x0E82),
    "Burmese": (0x1000, 0x1020),
    "kana": (0x3041, 0x3090),
    "Katakana": (0x30A1, 0x30F0),
    "Latin": (0x61, 0x7A),
    "Devanagari": (0x0905, 0x0939),
}


def words_of(script: str, number: int = 60) -> list[str]:
    rng = random.Random(0)
    first, last = SCRIPTS[script]
    letter = lambda: chr(rng.randint(first, last))
    return ["".join(letter() for _ in range(rng.randint(3, 8))) for _ in range(number)]


def runs(words: list[str], rows: int = 400, length: int = 20, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(words, k=length)) for _ in range(rows)]


def make(name: str, texts, folder: Path, size: int = 2000, **marks: bool) -> Tokenizer:
    return MAKERS[name](texts, vocab_size=size, folder=folder, **marks)


def unknown(tokenizer: Tokenizer, texts: list[str]) -> float:
    ids = token_stores.encode(texts, tokenizer, max_length=512, special_tokens=False).ids
    counts = np.bincount(ids, minlength=tokenizer.get_vocab_size())
    return tokenizers.unknown_share(tokenizer, counts)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_words_run_together_are_known(name, script, tmp_path):
    """Also those of texts that the vocabulary has not seen; and no text is but one token."""
    words, length = words_of(script), 40 if script in ("Latin", "Devanagari") else 20
    tokenizer = make(name, runs(words, length=length), tmp_path)
    new = runs(words, length=length, seed=1)
    assert unknown(tokenizer, new) == 0
    lengths = token_stores.encode(new, tokenizer, max_length=512, special_tokens=False).lengths()
    assert lengths.min() >= 10
    assert tokenizers.load_tokenizer(tmp_path).to_str() == tokenizer.to_str()


def test_words_between_blanks_stay_whole(tmp_path):
    texts = ["red apple ไทยABC ひらがな ok", "a" * 100, "b" * 101]
    tokenizer = make("words", texts, tmp_path, strip_accents=False)
    cut = lambda text: tokenizer.encode(text).tokens
    assert cut(texts[0]) == ["red", "apple", *"ไทย", "abc", *"ひらがな", "ok"]
    assert cut(texts[1]) == ["a" * 100] and cut(texts[2]) == ["b"] * 101
    assert cut("zebra") == ["[UNK]"]


MARKED = [("ban", "bán", "bàn", "bạn"), ("कि", "की", "कु", "के"), ("סַ", "סֶ"), ("e", "é", "è", "ê")]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("words", MARKED)
def test_marks_are_kept_or_taken_off(name, words, tmp_path):
    """Composed or not they are the same; upper case is kept with ``lower=False``."""
    texts = [" ".join(words), " ".join(words).upper()] * 3
    kept = make(name, texts, tmp_path, strip_accents=False)
    ids = [tuple(kept.encode(word).ids) for word in words]
    assert len(set(ids)) == len(words) and unknown(kept, texts) == 0
    for form in ("NFC", "NFD"):
        assert [tuple(kept.encode(unicodedata.normalize(form, w)).ids) for w in words] == ids
        assert tuple(kept.encode(words[-1].upper()).ids) == ids[-1]
    decomposed = make(
        name, [unicodedata.normalize("NFD", t) for t in texts], tmp_path, strip_accents=False
    )
    assert decomposed.to_str() == kept.to_str()
    stripped = make(name, texts, tmp_path)
    if unicodedata.category(unicodedata.normalize("NFD", words[1])[-1]) == "Mn":
        assert stripped.encode(words[0]).ids == stripped.encode(words[1]).ids
    cased = make(name, ["Red red"] * 3, tmp_path, lower=False)
    assert cased.encode("Red").ids != cased.encode("red").ids


@pytest.mark.parametrize("name", MAKERS)
def test_a_word_of_a_million_characters_is_next_to_nothing(name, tmp_path):
    """It takes seconds, and the vocabulary is that of the other texts and some letters."""
    rng = random.Random(0)
    long = ["a" * 1_000_000, "".join(rng.choices("abcdefghij", k=1_000_000)), "ខ" * 1_000_000]
    texts = [f"red apple {i % 7}" for i in range(300)]
    started = time.perf_counter()
    tokenizer = make(name, [*long, *texts], tmp_path, 30_000)
    ids = token_stores.encode([*long, *texts], tokenizer, max_length=64)
    assert time.perf_counter() - started < 30
    assert tokenizer.get_vocab_size() < 600 and unknown(tokenizer, texts) == 0
    assert (ids.lengths()[:3] == 64).all()


def test_of_a_long_word_the_tokens_that_are_kept_are_the_same(tmp_path):
    text = "".join(random.Random(0).choices("abcdef", k=5000)) + " end"
    tokenizer = make("wordpiece", [text, "red apple"], tmp_path)
    found = token_stores.encode([text], tokenizer, max_length=20, special_tokens=False)
    assert found.ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids[:20]


def test_unknown_share_of_other_tokenizers():
    words = {"[X]": 0, "a": 1, "b": 2}
    counts = np.array([1, 2, 1])
    level = Tokenizer(models.WordLevel(words, unk_token="[X]"))
    assert tokenizers.unknown_share(level, counts) == 0.25
    level.add_special_tokens(["[X]", "b"])
    assert tokenizers.unknown_share(level, counts) == pytest.approx(1 / 3)
    unigram = Tokenizer(models.Unigram([("a", -1.0), ("<unk>", -2.0), ("b", -3.0)], unk_id=1))
    assert tokenizers.unknown_share(unigram, counts) == 0.5
    assert tokenizers.unknown_share(Tokenizer(models.BPE({"a": 0}, [])), np.array([3])) == 0.0
    assert tokenizers.unknown_share(level, np.zeros(3, int)) == 0.0


def shares(text: str) -> list[float]:
    (line,) = re.findall(r"unknown tokens: (.*)", text)
    return [float(share) for share in re.findall(r"([\d.]+)% in", line)]


def test_prepare_says_the_share_and_warns_above_5_percent(tmp_path):
    known, rare = tmp_path / "known.tsv", tmp_path / "rare.tsv"
    lines = [f"{text}\tlabel {i % 7}\n" for i, text in enumerate(runs(words_of("Khmer")))]
    known.write_text("".join(lines), encoding="utf-8")
    # More characters than a vocabulary of 30,000 keeps: a fourth of it.
    several = [f"{chr(0x4E00 + i)}{chr(0x3400 + i % 6000)}\tx|y\n" for i in range(12_000)]
    rare.write_text("".join(several), encoding="utf-8")
    done = tiny.run("prepare", f"--input={known}")
    assert done.returncode == 0 and shares(done.stdout) == [0, 0, 0], done.stderr
    assert "more than 5% of the tokens" not in done.stdout
    done = tiny.run("prepare", f"--input={rare}")
    assert done.returncode == 0 and shares(done.stdout)[0] > 5, done.stderr
    assert "warning: more than 5% of the tokens are unknown" in done.stdout


@pytest.mark.parametrize(
    "options", ["unidec.py:{}", "frugal.py:astec,{}", "frugal.py:inceptionxml,{}"]
)
@pytest.mark.parametrize("vocabulary", MAKERS)
@pytest.mark.slow
@pytest.mark.campaign
def test_training_knows_runs_keeps_marks_and_says_so(options, vocabulary, tmp_path):
    source = tmp_path / "points.tsv"
    lines = [f"{text}\t{text[:3]} bán\n" for text in runs(words_of("Khmer"), 200)]
    source.write_text("".join(lines), encoding="utf-8")
    done = tiny.run(
        "train",
        f"--config=configs/{options.format(source)}",
        f"--config.encoder.vocabulary={vocabulary}",
        *("--config.epochs=1", "--config.max_minutes=0", "--config.encoder.dim=64"),
        f"--workdir={tmp_path}/run",
    )
    assert done.returncode == 0, done.stderr
    assert max(shares(done.stderr)[:2]) == 0
    said = "config.encoder.lower = True, config.encoder.strip_accents = False"
    assert said in done.stderr
    tokenizer = tokenizers.load_tokenizer(tmp_path / "run/tokenizer")
    assert tokenizer.encode("bán").ids != tokenizer.encode("ban").ids
