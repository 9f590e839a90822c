"""Data of the shape of LF-AmazonTitles-1.3M: its sizes, its skew, and topics that can be found.

A topic has sixteen words of its own and eight that it shares with the seven other topics of its
family; a text draws three words in four from these and one from the whole vocabulary, all by Zipf's
law. Labels and points belong to topics of very unequal size. Nine in ten labels of a point come
from its topic, popular ones first. Every second point bears the text of one of its topic's labels,
which is then its filter pair, as in the real data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix

from xmc_jax import catalog
from xmc_jax.data import texts
from xmc_jax.data.readers import formats

SHAPE = catalog.get("LF-AmazonTitles-1.3M")
LABELS_A_POINT = 22.2  # preprint, table 4
TEST_ROWS = 2000  # enough to show a search
OWN_WORDS, FAMILY_WORDS, FAMILY = 8, 4, 8  # words of a topic, of a family; topics of a family
TOPIC_WORDS, TOPIC_LABELS = OWN_WORDS + FAMILY_WORDS, 50  # of a topic; labels on average
COMMON = 1 / 5  # share of words from the whole vocabulary
BLOCK = 1 << 16
SYLLABLES = np.array([c + v for c in "bdfghjklmnprstvz" for v in "aeiou"])


@dataclasses.dataclass(frozen=True)
class Topics:
    """Where each topic's labels are, and its words.

    Attributes:
      starts: ``[T + 1]``: labels of topic t are ``starts[t]`` to ``starts[t + 1]``.
      words: ``[T, 24]`` word numbers.
      num_words: of the vocabulary.
    """

    starts: np.ndarray
    words: np.ndarray
    num_words: int


def write(folder: Path, scale: float, *, seed: int = 0) -> None:
    """Writes the canonical form of the data set.

    Args:
      folder: new; a finished one is left as it is.
      scale: share of LF-AmazonTitles-1.3M's points and labels.
      seed: of everything.
    """
    if (folder / "dataset.json").exists():
        return
    rng = np.random.default_rng(seed)
    num_train, num_labels = (
        max(500, round(scale * n)) for n in (SHAPE.num_train, SHAPE.num_labels)
    )
    topics = _topics(rng, num_labels)
    label_topic = np.repeat(np.arange(len(topics.words)), np.diff(topics.starts))
    label_words = _words(rng, topics, label_topic)
    words = np.array(list(_spell(topics.num_words)), dtype=object)
    scratch = folder.parent / f"{folder.name}-texts"
    scratch.mkdir(parents=True, exist_ok=True)
    label_texts = texts.write_lines(scratch / "labels", _texts(label_words, words))
    splits = {}
    for name, rows in (("train", num_train), ("test", min(TEST_ROWS, num_train))):
        topic = _zipf(rng, rows, len(topics.words), 0.5)
        point_words = _words(rng, topics, topic)
        twin = np.flatnonzero(rng.random(rows) < 0.5)
        own = _labels_of(rng, topics, topic[twin])
        for column in range(2):
            point_words[column][twin] = label_words[column][own]
        pairs = np.stack([twin, own], axis=1).astype(np.int64)
        splits[name] = formats.Split(
            texts.write_lines(scratch / name, _texts(point_words, words)),
            _labels(rng, topics, topic, num_labels, pairs),
            pairs,
        )
    made = formats.make_dataset(folder.name, splits["train"], splits["test"], label_texts)
    formats.save(made, folder, recipe="title")
    for path in scratch.iterdir():
        path.unlink()
    scratch.rmdir()


def titles(scale: float, queries: int, *, seed: int = 0) -> tuple[list[str], list[str]]:
    """Label texts alone, and texts of points."""
    rng, num_labels = np.random.default_rng(seed), max(500, round(scale * SHAPE.num_labels))
    topics = _topics(rng, num_labels)
    words = np.array(list(_spell(topics.num_words)), dtype=object)
    of_labels = np.repeat(np.arange(len(topics.words)), np.diff(topics.starts))
    of_points = _zipf(rng, queries, len(topics.words), 0.5)
    labels, points = (list(_texts(_words(rng, topics, x), words)) for x in (of_labels, of_points))
    return labels, points


def label_matrix(scale: float, *, seed: int = 0) -> csr_matrix:
    """``[N, L]`` of training points alone, labels numbered at random as in real data."""
    rng = np.random.default_rng(seed)
    num_train, num_labels = (
        max(500, round(scale * n)) for n in (SHAPE.num_train, SHAPE.num_labels)
    )
    topics = _topics(rng, num_labels)
    topic = _zipf(rng, num_train, len(topics.words), 0.5)
    made = _labels(rng, topics, topic, num_labels, np.zeros((0, 2), np.int64))
    numbers = rng.permutation(num_labels).astype(np.int32)
    made = csr_matrix((made.data, numbers[made.indices], made.indptr), made.shape)
    made.sort_indices()
    return made


def _zipf(rng: np.random.Generator, size, number: int, skew: float) -> np.ndarray:
    """Numbers below ``number`` whose probability falls about as 1 / rank^skew, skew below 1."""
    ranks = number * rng.random(size) ** (1 / (1 - skew))
    return np.minimum(ranks.astype(np.int64), number - 1)


def _topics(rng: np.random.Generator, num_labels: int) -> Topics:
    number = max(2, num_labels // TOPIC_LABELS)
    num_words = max(200, round(60_000 * (num_labels / SHAPE.num_labels) ** 0.5))
    sizes = 1 + np.bincount(_zipf(rng, num_labels - number, number, 0.5), minlength=number)
    own = _zipf(rng, (number, OWN_WORDS), num_words, 0.5)
    family = _zipf(rng, (-(-number // FAMILY), FAMILY_WORDS), num_words, 0.5)
    shared = np.repeat(family, FAMILY, axis=0)[:number]
    words = np.concatenate([own, shared], axis=1)
    words = words[:, rng.permutation(TOPIC_WORDS)]  # so that both kinds are among the frequent ones
    return Topics(np.concatenate([[0], np.cumsum(sizes)]), words, num_words)


def _words(rng: np.random.Generator, topics: Topics, topic: np.ndarray) -> list[np.ndarray]:
    """Word numbers ``[n, 13]`` of one text a topic given, and how many of them are its words."""
    shape = (len(topic), 13)
    words = topics.words[topic[:, None], _zipf(rng, shape, TOPIC_WORDS, 0.5)].astype(np.int32)
    common = rng.random(shape, np.float32) < COMMON
    words[common] = _zipf(rng, int(common.sum()), topics.num_words, 0.7)
    return [words, rng.integers(5, 14, len(topic)).astype(np.int8)]  # nine on average


def _spell(number: int) -> Iterator[str]:
    """Distinct words of three or four syllables."""
    base = len(SYLLABLES)
    for word in range(number):
        places = [word % base, word // base % base, word // base**2 % base]
        yield "".join(SYLLABLES[places]) + ("n" if word % 7 == 3 else "")


def _texts(words_and_lengths: list[np.ndarray], words: np.ndarray) -> Iterator[str]:
    numbers, lengths = words_and_lengths
    for start in range(0, len(numbers), BLOCK):
        block = words[numbers[start : start + BLOCK]].tolist()
        for row, length in zip(block, lengths[start : start + BLOCK].tolist()):
            yield " ".join(row[:length])


def _labels_of(rng: np.random.Generator, topics: Topics, topic: np.ndarray) -> np.ndarray:
    """One label of each topic given, popular ones more often."""
    sizes = np.diff(topics.starts)[topic]
    return topics.starts[topic] + (sizes * rng.random(len(topic)) ** 1.5).astype(np.int64)


def _labels(
    rng: np.random.Generator,
    topics: Topics,
    topic: np.ndarray,
    num_labels: int,
    filter_pairs: np.ndarray,
) -> csr_matrix:
    """``[n, L]``: 22.2 labels a point on average, a few points with hundreds."""
    # Log-normal numbers; some draws repeat a label, hence a little more than the mean wanted.
    counts = rng.lognormal(np.log(1.5 * LABELS_A_POINT) - 0.5, 1.0, len(topic))
    counts = np.clip(counts, 1, 0.2 * num_labels).astype(np.int64)
    barred = np.full(len(topic), -1, np.int64)
    barred[filter_pairs[:, 0]] = filter_pairs[:, 1]
    indices, sizes = [], []
    for start in range(0, len(topic), BLOCK):
        count = counts[start : start + BLOCK]
        row = np.repeat(np.arange(len(count)), count)
        drawn = np.repeat(topic[start : start + BLOCK], count)
        elsewhere = rng.random(len(drawn)) < 0.1
        drawn[elsewhere] = _zipf(rng, int(elsewhere.sum()), len(topics.words), 0.5)
        keys = np.unique(row * num_labels + _labels_of(rng, topics, drawn))
        row, label = np.divmod(keys, num_labels)
        kept = label != barred[start + row]
        indices.append(label[kept].astype(np.int32))
        sizes.append(np.bincount(row[kept], minlength=len(count)))
    indptr = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    flat = np.concatenate(indices)
    matrix = csr_matrix(
        (np.ones(len(flat), np.float32), flat, indptr), shape=(len(topic), num_labels)
    )
    matrix.has_canonical_format = True
    return matrix
