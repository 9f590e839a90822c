"""Baselines: measured numbers of the bundled data set, and plain loops."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import Counter

import numpy as np
import pytest
import scipy.sparse as sp

from xmc_jax import metrics
from xmc_jax.data.graph import gandalf
from xmc_jax.data.summaries import baselines
from xmc_jax.metrics import propensity


@pytest.fixture(scope="module")
def mini(mini_folder):
    """Texts and label matrices of the bundled set, read here from its JSON."""

    def rows(name: str) -> list[dict]:
        with gzip.open(mini_folder / f"{name}.json.gz", "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    files = {name: rows(name) for name in ("trn", "tst", "lbl")}
    num_labels = len(files["lbl"])
    out = {name: [row["title"] for row in content] for name, content in files.items()}
    for name in ("trn", "tst"):
        indptr = np.cumsum([0] + [len(row["target_ind"]) for row in files[name]])
        indices = np.concatenate([row["target_ind"] for row in files[name]]).astype(np.int32)
        shape = (len(files[name]), num_labels)
        out[f"{name}_labels"] = sp.csr_matrix((np.ones(len(indices)), indices, indptr), shape=shape)
    out["pairs"] = np.loadtxt(mini_folder / "filter_labels_test.txt", dtype=np.int64, ndmin=2)
    return out


def measure(mini, predictions: np.ndarray) -> list[float]:
    found = metrics.evaluate(
        predictions,
        mini["tst_labels"],
        inverse_propensity=propensity.inverse_propensity(mini["trn_labels"], a=0.55, b=1.5),
        filter_pairs=mini["pairs"],
        ks=(1, 3, 5, 100),
    )
    keys = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "R@100")
    return [round(found[key], 2) for key in keys]


def test_popularity_on_mini(mini) -> None:
    predictions = baselines.popularity(mini["trn_labels"], len(mini["tst"]), 110)
    assert measure(mini, predictions) == [2.67, 2.0, 2.08, 1.06, 1.23, 1.79, 30.37]


def test_tfidf_on_mini(mini) -> None:
    """The figures that were measured independently on these files."""
    predictions, scores = baselines.tfidf_nearest_label(
        mini["tst"], mini["lbl"], 110, training_texts=mini["trn"]
    )
    assert measure(mini, predictions) == [34.93, 26.49, 21.17, 37.0, 39.87, 41.38, 74.8]
    assert (np.diff(scores, axis=1) <= 0).all()
    assert 0 <= scores.min() and scores.max() <= 1 + 1e-6


def test_popularity_ties_and_short_lists() -> None:
    labels = sp.csr_matrix(np.array([[1, 0, 1, 0], [0, 0, 1, 1]]))
    predictions = baselines.popularity(labels, 2, 6)
    np.testing.assert_array_equal(predictions, [[2, 0, 3, 1, -1, -1]] * 2)
    assert baselines.popularity(labels, 0, 2).shape == (0, 2)


TEXTS = [
    "The red car",
    "a red, red apple",
    "apple apple pie",
    "",
    "Ünïcode naïve",
    "pie chart of cars",
]
LABELS = ["red", "Apple pie", "car", "???", "red", "naïve apple", "a chart"]


def loop_scores(queries: list[str], labels: list[str], training: list[str]) -> np.ndarray:
    """TF-IDF cosines as the textbook has them."""
    words = lambda text: re.findall(r"\w+", text.lower())
    seen = [set(words(text)) for text in labels + training]

    def vector(text: str) -> dict[str, float]:
        out = {}
        for word, count in Counter(words(text)).items():
            df = sum(word in one for one in seen)
            if df:
                out[word] = (1 + math.log(count)) * (1 + math.log((1 + len(seen)) / (1 + df)))
        length = math.sqrt(sum(x * x for x in out.values())) or 1.0
        return {word: x / length for word, x in out.items()}

    table = [vector(text) for text in labels]
    return np.array(
        [[sum(x * z.get(w, 0) for w, x in vector(q).items()) for z in table] for q in queries]
    )


@pytest.mark.parametrize("block", [1, 3, 10**6])
def test_tfidf_equals_loops(block: int) -> None:
    expected = loop_scores(TEXTS, LABELS, TEXTS[:3])
    ids, scores = baselines.tfidf_nearest_label(
        TEXTS, LABELS, 4, training_texts=TEXTS[:3], block=block
    )
    for row, found, score in zip(expected, ids, scores):
        order = [y for y in sorted(range(len(row)), key=lambda y: (-row[y], y)) if row[y] > 0][:4]
        assert found.tolist() == order + [-1] * (4 - len(order))
        np.testing.assert_allclose(score[: len(order)], row[order], rtol=1e-6)
        assert not score[len(order) :].any()
    assert (ids.dtype, scores.dtype) == (np.int32, np.float32)


def test_pieces_of_words_find_what_words_do_not() -> None:
    queries, labels = ["gardens", "zzz"], ["house", "gardener", "guarded"]
    by_word, _ = baselines.tfidf_nearest_label(queries, labels, 2)
    np.testing.assert_array_equal(by_word, -1)
    by_piece, _ = baselines.tfidf_nearest_label(queries, labels, 2, analyzer="word+char")
    np.testing.assert_array_equal(by_piece, [[1, 2], [-1, -1]])


def test_empty_inputs_and_errors() -> None:
    ids, _ = baselines.tfidf_nearest_label([], LABELS, 3)
    assert ids.shape == (0, 3)
    ids, _ = baselines.tfidf_nearest_label(TEXTS, [], 3)
    np.testing.assert_array_equal(ids, np.full((len(TEXTS), 3), -1))
    with pytest.raises(ValueError, match="expected one of"):
        baselines.tfidf_nearest_label(TEXTS, LABELS, 3, analyzer="char")


def test_label_of_the_same_text_is_gandalfs_target():
    rng = np.random.default_rng(0)
    held = sp.csr_matrix((rng.random((40, 6)) < 0.3).astype(np.float32))
    texts = ["a", "B ", "c", "d", "b", "f"]
    ids = baselines.label_of_the_same_text(["x", "b", "F", "b"], texts, held, 4)
    assert (ids[0] == -1).all() and (ids[1] == ids[3]).all()
    target = gandalf.gandalf_targets(held, delta=0.0).toarray()
    for row, label in ((1, 1), (2, 5)):
        order = np.lexsort((np.arange(6), -target[label]))  # the label itself has 1
        assert ids[row].tolist() == [label, *[i for i in order if i != label][:3]]
    nobody = baselines.label_of_the_same_text(["x"], texts, held, 4)
    assert nobody.tolist() == [[-1] * 4]
    assert baselines.label_of_the_same_text(["d"], texts, held, 1).tolist() == [[3]]
