"""Word vectors of GloVe and fastText files, and the vocabulary of whole words."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import tiny

from xmc_jax.data.tokens import tokenizer, word_vectors
from xmc_jax.runs import launch, open_runs, settings

TEXTS = ["Red apple, red river", "the red VIOLIN", "Apple über the river"]
WORDS = {"[PAD]": 0, "red": 1, "apple": 2, "river": 3, "uber": 4, "naïve": 5}
GLOVE = "the 0.1 0.2\nred 1 -2\nriver 3e-1 4\nred 9 9\nnaïve 0 5\n"


def written(folder, text: str, name: str = "vectors.txt"):
    path = folder / name
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("header", ["", "5 2\n"])
def test_glove_and_fasttext(header, tmp_path):
    rows, vectors = word_vectors.read(written(tmp_path, header + GLOVE), WORDS)
    assert rows.tolist() == [1, 3, 5] and vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, [[1, -2], [0.3, 4], [0, 5]])


def test_gzip(tmp_path):
    path = tmp_path / "vectors.vec.gz"
    path.write_bytes(gzip.compress(GLOVE.encode()))
    assert word_vectors.is_file(str(path)) and word_vectors.read(path, WORDS)[0].tolist() == [
        1,
        3,
        5,
    ]


def test_words_that_the_file_lacks_are_noise_of_its_deviation(tmp_path):
    rng = np.random.default_rng(0)
    words = {f"w{i}": i for i in range(400)}
    lines = [f"w{i} " + " ".join(map(str, 3 * rng.normal(size=50))) for i in range(200)]
    path = written(tmp_path, "\n".join(lines))
    made = word_vectors.table(path, words, seed=7)
    np.testing.assert_array_equal(made[:200], word_vectors.read(path, words)[1])
    assert made[200:].std() == pytest.approx(made[:200].std(), rel=0.02)
    np.testing.assert_array_equal(made, word_vectors.table(path, words, seed=7))
    assert (made[200:] != word_vectors.table(path, words, seed=8)[200:]).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("red 1 x\n", r"line 1: .*; expected word vectors as text"),
        ("red 1 2\nriver 1 2 3\n", r"line 2: 3 numbers for 'river'; expected 2"),
        ("red 1 nan\n", r"line 1: 2 numbers for 'red'; .* finite"),
        ("red\n", r"line 1: 0 numbers"),
        ("blue 1 2\n", r"has none of the 6 words of the texts"),
        ("PK\3\4 zipped", r"is no text file; .*unpacked"),
    ],
)
def test_bad_files(content, message, tmp_path):
    with pytest.raises(ValueError, match=message) as found:
        word_vectors.read(path := written(tmp_path, content), WORDS)
    assert str(path) in str(found.value)


WHOLE = gzip.compress(GLOVE.encode(), mtime=0)  # the time of writing would be in the test's name


@pytest.mark.parametrize("content", [b"red 1 2", WHOLE[:-12]], ids=["plain", "cut"])
def test_broken_gzip(content, tmp_path):
    (tmp_path / "vectors.vec.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"vectors\.vec\.gz is no whole gzip file"):
        word_vectors.read(tmp_path / "vectors.vec.gz", WORDS)


def test_a_missing_file_says_where_to_get_one(own_data, tmp_path):
    """It is taken for a file by its name, not for a model on the hub."""
    config = tiny.frugal_config("astec", own_data, encoder__embeddings="no/glove.6B.300d.txt")
    with pytest.raises(ValueError, match=r"glove\.6B\.300d\.txt: no such file; .*fasttext\.cc"):
        launch.start(config, tmp_path / "run")


def test_vocabulary_of_words(tmp_path):
    made = tokenizer.train_words(TEXTS, vocab_size=10, folder=tmp_path)
    vocab = sorted(made.get_vocab(), key=made.get_vocab().get)
    assert vocab == [*tokenizer.SPECIAL_TOKENS, "red", "apple", "river", "the", ","]
    assert made.encode("a RED, river").tokens == ["[UNK]", "red", ",", "river"]
    again = tokenizer.load_tokenizer(tmp_path)
    assert again.encode("a RED, river").ids == made.encode("a RED, river").ids
    with pytest.raises(ValueError, match="no text holds a word"):
        tokenizer.train_words([" "], vocab_size=10, folder=tmp_path)


@pytest.mark.parametrize("family", ["unidec", "frugal"])
def test_runs_start_from_the_files_vectors(family, own_data, tmp_path):
    """And their tokens are whole words; a run without a file has them by ``vocabulary``."""
    make = (
        tiny.config if family == "unidec" else lambda *a, **k: tiny.frugal_config("astec", *a, **k)
    )
    changes = dict(epochs=1, encoder__name="bag")
    plain = make(own_data, encoder__vocabulary="words", **changes)
    launch.start(plain, tmp_path / "plain")
    words = tokenizer.load_tokenizer(tmp_path / "plain" / "tokenizer").get_vocab()
    assert "apple" in words and not any(word.startswith("##") for word in words)
    rng = np.random.default_rng(1)
    vectors = {word: rng.normal(size=16).astype(np.float32) for word in list(words)[5:25]}
    lines = [" ".join([word, *map(str, v)]) for word, v in vectors.items()]
    config = make(own_data, encoder__embeddings=str(written(tmp_path, "\n".join(lines))), **changes)
    tables, prepare = [], launch.prepare

    def prepared(*arguments):
        begun = prepare(*arguments)
        params = begun.weights.params
        params = params if family == "frugal" else params["encoder"]
        tables.append(np.array(params["tokens"]["embedding"]))
        return begun

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "prepare", prepared)
        launch.start(config, tmp_path / "run")
    ids = tokenizer.load_tokenizer(tmp_path / "run" / "tokenizer").get_vocab()
    rows = np.stack([tables[0][ids[word]] for word in vectors])
    expected = np.stack(list(vectors.values()))
    np.testing.assert_allclose(rows / rows[0, 0], expected / expected[0, 0], rtol=1e-4)
    (tmp_path / "vectors.txt").unlink()  # it is not needed any more
    open_runs.open_run(tmp_path / "run")


def test_a_models_embeddings_have_their_own_pieces(golden):
    config = tiny.config(
        "x", encoder__name="bag", encoder__vocabulary="words",
        encoder__embeddings=str(golden / "encoder_bert"),
    )  # fmt: skip
    with pytest.raises(settings.PlanError, match="vocabulary = 'words'"):
        settings.check(config)
