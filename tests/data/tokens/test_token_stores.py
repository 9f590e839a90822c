"""Tokenizers and the token store, compared with Hugging Face's own calls, text by text."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from xmc_jax import files
from xmc_jax.data.tokens import token_stores
from xmc_jax.data.tokens.tokenizer import load_tokenizer, save_tokenizer, train_wordpiece

ODD_TEXTS = [
    "",
    "   ",
    "Café, ÜBER-naïve!",
    "東京 tower",
    "a\nb\x00c",
    "\U0001d518nicode 🙂",
    "x" * 300,
]


@pytest.fixture(scope="module")
def texts(mini_folder: Path) -> list[str]:
    with gzip.open(mini_folder / "trn.json.gz", "rt", encoding="utf-8") as file:
        titles = [json.loads(line)["title"] for line in file]
    return [*titles[:600], *ODD_TEXTS]


@pytest.fixture(scope="module")
def folder(texts: list[str], tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_wordpiece(texts, vocab_size=1500, folder=folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def hugging_face(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def all_ids(store: token_stores.TokenStore) -> list[list[int]]:
    ids, lengths = store.gather(np.arange(len(store)))
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


# Tokenizers.


def test_trained_vocabulary_is_bert_like(tokenizer):
    vocab = tokenizer.get_vocab()
    assert sorted(vocab.values()) == list(range(len(vocab))) and len(vocab) <= 1500
    assert [tokenizer.id_to_token(i) for i in range(5)] == [
        *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    ]
    # Lower-cased, accents removed, punctuation apart; no word-internal pieces for punctuation.
    tokens = tokenizer.encode("The CAFÉ, the").tokens
    assert tokens[:2] == ["[CLS]", "the"] and tokens[-1] == "[SEP]" and "," in tokens
    assert "##e" in vocab and "##," not in vocab and "E" not in vocab


def test_same_texts_same_vocabulary_in_other_processes(folder, texts, tmp_path):
    (tmp_path / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    code = (
        "import json, sys; from xmc_jax.data.tokens.tokenizer import train_wordpiece;"
        "texts = json.load(open(sys.argv[1], encoding='utf-8'));"
        "train_wordpiece(texts, vocab_size=1500, folder=sys.argv[2])"
    )
    for threads in ("1", "4"):
        arguments = [
            sys.executable,
            "-c",
            code,
            str(tmp_path / "texts.json"),
            str(tmp_path / threads),
        ]
        env = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        subprocess.run(arguments, check=True, env=env)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / threads / name).read_bytes() == (folder / name).read_bytes()


def test_without_special_tokens(texts, tokenizer, tmp_path):
    bare = train_wordpiece(texts, vocab_size=1500, folder=tmp_path, special_tokens=False)
    assert bare.get_vocab() == tokenizer.get_vocab()
    assert bare.encode("the").tokens == ["the"]
    assert load_tokenizer(tmp_path).to_str() == bare.to_str()
    assert hugging_face(tmp_path)("the").input_ids == bare.encode("the").ids
    store = token_stores.encode(texts, tokenizer, max_length=9, special_tokens=False)
    assert all_ids(store) == all_ids(token_stores.encode(texts, bare, max_length=9))


def test_small_alphabet_keeps_the_frequent_characters(tmp_path):
    texts = [f"{chr(0x1200 + i)}abc" for i in range(200)] * 2 + ["abc"]
    vocab = train_wordpiece(texts, vocab_size=256, folder=tmp_path).get_vocab()
    assert {"a", "##b", "##c", "\u1200"} <= vocab.keys() and chr(0x1200 + 199) not in vocab
    assert sum(len(token) == 1 for token in vocab) == 64


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        (["a"], 255, "vocab_size=255"),
        (iter(["a"]), 1000, "iterator"),
        (["", " "], 1000, "no text holds a character"),
        (["a\ud800"], 1000, "surrogate"),
    ],
)
def test_training_bad_input(texts, vocab_size, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train_wordpiece(texts, vocab_size=vocab_size, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_lower_casing_is_the_configs_as_in_hugging_face(texts, folder, tmp_path):
    save_tokenizer(load_tokenizer(folder), tmp_path)
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "strip_accents": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = load_tokenizer(tmp_path), hugging_face(tmp_path)
    assert "[UNK]" in ours.encode("The").tokens and "[UNK]" not in ours.encode("the").tokens
    texts = [text for text in texts if len(text) <= 200]  # BERT cuts no words
    assert [ours.encode(text).ids for text in texts] == theirs(texts).input_ids


def test_old_folder_with_a_vocabulary_only(texts, folder, tokenizer, tmp_path):
    vocab = tokenizer.get_vocab()
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(vocab, key=vocab.get)), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    loaded = load_tokenizer(tmp_path)
    texts = [text for text in texts if len(text) <= 200]  # BERT cuts no words
    assert [loaded.encode(text).ids for text in texts] == [tokenizer.encode(t).ids for t in texts]


def test_loading_switches_padding_and_truncation_off(folder, tokenizer, tmp_path):
    other = load_tokenizer(folder)
    other.enable_padding(length=16)
    other.enable_truncation(4)
    save_tokenizer(other, tmp_path)
    assert load_tokenizer(tmp_path).to_str() == tokenizer.to_str()


def test_loading_bad_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"no such folder: .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no fast tokenizer in .* expected tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')  # a model without a tokenizer
    with pytest.raises(ValueError, match=r"no fast tokenizer in .*config.json.* vocabulary is emp"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"could not be fetched from the hub.*HF_HUB_OFFLINE"):
        load_tokenizer("no-such-owner/no-such-name")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="is not a tokenizer file"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        load_tokenizer(tmp_path / "tokenizer.json")


# The token store.


@pytest.mark.parametrize("max_length", [3, 8, 64])
def test_ids_are_hugging_faces(texts, folder, tokenizer, max_length, tmp_path):
    theirs = hugging_face(folder)
    expected = theirs(texts, truncation=True, max_length=max_length).input_ids
    store = token_stores.tokenize(texts, tokenizer, max_length=max_length, folder=tmp_path)
    assert len(store) == len(texts)
    assert (
        all_ids(store)
        == expected
        == all_ids(token_stores.encode(texts, theirs, max_length=max_length))
    )
    np.testing.assert_array_equal(store.lengths(), [len(row) for row in expected])
    assert store.ids.dtype == np.uint16 and isinstance(store.ids, np.memmap)
    assert store.offsets.dtype == np.int64 and isinstance(store.offsets, np.memmap)
    assert store.lengths(np.array([600])) == [2]  # The empty text: [CLS] [SEP].
    assert tokenizer.truncation is None and tokenizer.padding is None


def test_blocks_and_workers_do_not_change_the_ids(texts, tokenizer, monkeypatch, tmp_path):
    expected = all_ids(token_stores.encode(texts, tokenizer, max_length=12))
    monkeypatch.setattr(token_stores, "_MAX_BLOCK_TEXTS", 7)
    monkeypatch.setattr(token_stores, "_MAX_BLOCK_CHARACTERS", 250)
    for num_workers in (1, 2, 5):
        folder = tmp_path / str(num_workers)
        store = token_stores.tokenize(
            texts, tokenizer, max_length=12, folder=folder, num_workers=num_workers
        )
        assert all_ids(store) == expected


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.data())
def test_gather_is_a_loop_over_rows(data):
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=12))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    store = token_stores.TokenStore(np.arange(offsets[-1], dtype=np.uint16), offsets)
    rows = np.array(data.draw(st.lists(st.integers(-1, len(lengths) - 1), max_size=20)), np.int32)
    ids, sizes = store.gather(rows)
    wanted = [store.ids[offsets[r] : offsets[r + 1]].tolist() if r >= 0 else [] for r in rows]
    assert ids.dtype == np.uint16 and sizes.dtype == np.int32
    assert ids.tolist() == list(itertools.chain(*wanted)) and sizes.tolist() == [
        len(row) for row in wanted
    ]
    np.testing.assert_array_equal(store.lengths(rows), sizes)


def test_gather_refuses_rows_that_are_not_there():
    store = token_stores.TokenStore(np.arange(3, dtype=np.uint16), np.array([0, 1, 3]))
    for row in (-2, 2):
        with pytest.raises(ValueError, match=f"row {row} asked of a store of 2 texts"):
            store.gather(np.array([0, row]))


def test_joined_stores_are_the_concatenated_texts():
    first = token_stores.TokenStore(np.arange(9, dtype=np.uint16), np.array([0, 2, 2, 9]))
    second = token_stores.TokenStore(np.arange(100, 104, dtype=np.uint32), np.array([0, 1, 4, 4]))
    whole = token_stores.TokenStore(
        np.concatenate([first.ids, second.ids]), np.array([0, 2, 2, 9, 10, 13, 13])
    )
    joined = token_stores.JoinedTokens(first, second)
    assert len(joined) == 6
    np.testing.assert_array_equal(joined.lengths(), whole.lengths())
    rows = np.array([5, 3, 2, -1, 0, 4, 4, 1, -1])
    for found, expected in zip(joined.gather(rows), whole.gather(rows)):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(joined.lengths(rows), whole.lengths(rows))
    with pytest.raises(ValueError, match="row 3 asked of a store of 3 texts"):
        joined.gather(np.array([6]))


def test_second_call_opens_and_every_setting_has_its_own_store(
    texts, tokenizer, tmp_path, monkeypatch
):
    first = token_stores.tokenize(texts, tokenizer, max_length=12, folder=tmp_path)
    monkeypatch.setattr(token_stores, "_write", None)  # Nothing is written from here on.
    again = token_stores.tokenize(tuple(texts), tokenizer, max_length=12, folder=tmp_path)
    assert again.ids.filename == first.ids.filename
    monkeypatch.undo()
    # Same characters, other boundaries: another store.
    shifted = [*texts[:-2], texts[-2] + texts[-1][:1], texts[-1][1:]]
    token_stores.tokenize(shifted, tokenizer, max_length=12, folder=tmp_path)
    token_stores.tokenize(texts[:-1], tokenizer, max_length=12, folder=tmp_path)
    token_stores.tokenize(texts, tokenizer, max_length=13, folder=tmp_path)
    token_stores.tokenize(texts, tokenizer, max_length=12, folder=tmp_path, special_tokens=False)
    other = train_wordpiece(texts, vocab_size=600, folder=tmp_path / "other")
    token_stores.tokenize(texts, other, max_length=12, folder=tmp_path)
    assert len(list(tmp_path.glob("tokens-*"))) == 6


def damage_cut_ids(store: Path) -> None:
    content = (store / "ids.bin").read_bytes()
    (store / "ids.bin").write_bytes(content[:-2])


def damage_flip_a_bit(store: Path) -> None:
    content = bytearray((store / "ids.bin").read_bytes())
    content[100] ^= 1
    (store / "ids.bin").write_bytes(content)


def damage_offsets(store: Path) -> None:
    content = (store / "offsets.bin").read_bytes()
    (store / "offsets.bin").write_bytes(bytes(8) + content[:-8])


def damage_no_meta(store: Path) -> None:
    (store / "meta.json").unlink()


def damage_cut_meta(store: Path) -> None:
    (store / "meta.json").write_text('{"num_texts": 6')


def damage_a_word_of_meta(store: Path) -> None:
    meta = (store / "meta.json").read_text()
    (store / "meta.json").write_text(meta.replace('"uint16"', '"int16"'))


@pytest.mark.parametrize(
    "damage",
    [
        damage_cut_ids,
        damage_flip_a_bit,
        damage_offsets,
        damage_no_meta,
        damage_cut_meta,
        damage_a_word_of_meta,
    ],
)
def test_damaged_store_is_built_again(damage, texts, tokenizer, tmp_path, caplog):
    expected = all_ids(token_stores.tokenize(texts, tokenizer, max_length=12, folder=tmp_path))
    (store,) = tmp_path.iterdir()
    damage(store)
    assert (
        all_ids(token_stores.tokenize(texts, tokenizer, max_length=12, folder=tmp_path)) == expected
    )
    assert "making it again" in caplog.text
    assert list(tmp_path.iterdir()) == [store]


def test_a_store_of_before_its_meta_data_had_a_checksum(texts, tokenizer, tmp_path, caplog):
    token_stores.tokenize(texts, tokenizer, max_length=12, folder=tmp_path)
    (path,) = tmp_path.glob("*/meta.json")
    meta = json.loads(path.read_text())
    del meta["crc32"]
    path.write_text(json.dumps(meta))
    token_stores.tokenize(texts, tokenizer, max_length=12, folder=tmp_path)
    assert not caplog.text and "crc32" not in json.loads(path.read_text())


def test_nothing_is_left_behind_by_an_error(texts, tokenizer, tmp_path, monkeypatch):
    def full_disk(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_record", full_disk)
    with pytest.raises(OSError, match="No space left"):
        token_stores.tokenize(texts, tokenizer, max_length=12, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tokenizer, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file/cache cannot be written to .*XMC_CACHE to a folder"):
        token_stores.tokenize(["a"], tokenizer, max_length=5, folder=tmp_path / "file" / "cache")


def test_leftovers_of_a_killed_run_are_removed_and_a_live_ones_kept(texts, tokenizer, tmp_path):
    token_stores.tokenize(texts, tokenizer, max_length=12, folder=tmp_path)
    (store,) = tmp_path.iterdir()
    (store / "meta.json").unlink()
    for name, age in (("dead", 7 * 3600), ("alive", 3600)):
        leftover = tmp_path / f".{store.name}.{name}.tmp"
        leftover.mkdir()
        (leftover / "ids.bin").write_bytes(b"12")
        for path in (leftover / "ids.bin", leftover):
            os.utime(path, (time.time() - age, time.time() - age))
    token_stores.tokenize(texts, tokenizer, max_length=12, folder=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {store.name, f".{store.name}.alive.tmp"}


def test_no_texts_and_texts_without_tokens(tokenizer, tmp_path):
    empty = token_stores.tokenize([], tokenizer, max_length=5, folder=tmp_path)
    assert len(empty) == 0 and len(empty.lengths()) == 0
    for store in (empty, token_stores.encode([], tokenizer, max_length=5)):
        ids, lengths = store.gather(np.array([-1, -1]))
        assert ids.size == 0 and lengths.tolist() == [0, 0]
    options = {"max_length": 5, "special_tokens": False}
    bare = token_stores.tokenize(["", " "], tokenizer, folder=tmp_path, **options)
    assert len(bare) == 2 and bare.lengths().tolist() == [0, 0]


@pytest.mark.parametrize(("size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_id_type_follows_the_vocabulary(size, dtype, tmp_path):
    vocab = {f"w{i}": i for i in range(size)}
    large = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    large.pre_tokenizer = pre_tokenizers.Whitespace()
    store = token_stores.tokenize([f"w{size - 1} w1"], large, max_length=5, folder=tmp_path)
    assert store.ids.dtype == dtype and store.ids.tolist() == [size - 1, 1]
    in_memory = token_stores.encode([f"w{size - 1} w1"], large, max_length=5)
    assert in_memory.ids.dtype == dtype and in_memory.ids.tolist() == [size - 1, 1]


def test_bad_input(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"text 1 .* is None, expected a string"):
        token_stores.tokenize(["a", None], tokenizer, max_length=5, folder=tmp_path)
    with pytest.raises(ValueError, match=r"text 2 .* is no valid Unicode"):
        token_stores.tokenize(["a", "b", "c\udc80"], tokenizer, max_length=5, folder=tmp_path)
    with pytest.raises(ValueError, match=r"max_length=2, but .* adds 2 special tokens"):
        token_stores.tokenize(["a"], tokenizer, max_length=2, folder=tmp_path)
    with pytest.raises(ValueError, match="num_workers=0"):
        token_stores.tokenize(["a"], tokenizer, max_length=5, folder=tmp_path, num_workers=0)
    with pytest.raises(ValueError, match="dict has no fast version"):
        token_stores.encode(["a"], {}, max_length=5)
    assert not list(tmp_path.iterdir())
