"""Retrieval at inference: its score against plain loops, its candidates, its choice."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from scipy.sparse import random as random_sparse

from xmc_jax.data.graph.gandalf import gandalf_targets
from xmc_jax.data.search.exact_search import exact_search
from xmc_jax.data.search.keys import Keys
from xmc_jax.data.search.lexical import TextIndex
from xmc_jax.data.summaries import baselines
from xmc_jax.training import retrieval_choice
from xmc_jax.training.retrieval import RetrievalRanker, Setting
from xmc_jax.training.training_data import EvaluationSplit

Q, L, N, D = 23, 40, 60, 8
NAMES = [f"part {7919 * n} of {'red' if n % 3 else 'blue'} machine{n % 7}" for n in range(L)]
QUESTIONS = [f"machine{n % 7} {7919 * (n + 5)}{'x' * (n % 2)}" for n in range(Q)]


class Dense:
    """A ranker of given vectors; ``factor`` = scores are multiplied by the bonus's exponential."""

    heads: tuple[str, ...] = ("concat",)

    def __init__(self, labels: np.ndarray, bonus: np.ndarray | None = None, *, factor=False):
        self.labels, self.probabilities = labels, factor
        self.num_labels = len(labels)
        self.bonus = np.zeros(len(labels), np.float32) if bonus is None else bonus

    def query_vectors(self, tokens, rows, head):
        return np.asarray(tokens)[rows]

    def key_vectors(self, queries, head):
        return queries

    def tail_factor(self, ids):
        return np.exp(self.bonus[ids]) if self.probabilities else np.ones(ids.shape, np.float32)

    def score(self, queries, head, ids):
        scores = np.einsum("nd,nmd->nm", queries, self.labels[ids])
        added = np.where(self.probabilities, 0, self.bonus[ids])
        scores = ((scores + added) * self.tail_factor(ids)).astype(np.float32)
        return np.where(ids >= 0, scores, -np.inf)

    def terms(self, queries, head, ids):
        return {"model": self.score(queries, head, ids)}

    def search(self, queries, head, k):
        scores = self.score(queries, head, np.tile(np.arange(self.num_labels), (len(queries), 1)))
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, order, axis=1), order.astype(np.int32)


def unit(rng: np.random.Generator, rows: int) -> np.ndarray:
    x = rng.standard_normal((rows, D)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def sparse(rng: np.random.Generator, rows: int) -> csr_matrix:
    made = random_sparse(rows, L, 0.08, "csr", np.float32, random_state=rng)
    made.data[:] = 1
    return made


@pytest.fixture
def problem():
    """Queries, label vectors, bonus, and the keys of both parts."""
    rng = np.random.default_rng(0)
    labels = sparse(rng, N)
    parts = {
        "points": Keys(unit(rng, N).astype(np.float16), labels),
        "labels": Keys(unit(rng, L).astype(np.float16), gandalf_targets(labels)),
    }
    return unit(rng, Q), unit(rng, L), rng.random(L).astype(np.float32), parts


def plain(queries, base_scores, parts, setting) -> np.ndarray:
    """The score of the issue, by loops over dense arrays in 64 bits, ``[Q, L]``."""
    scores = base_scores.astype(np.float64)
    if setting.lexical:
        ids, cosines = baselines.tfidf_nearest_label(QUESTIONS, NAMES, L, analyzer="word+char")
        for row, label in zip(*np.nonzero(ids >= 0)):
            scores[row, ids[row, label]] += setting.lexical * cosines[row, label]
    for name, weight in (("points", setting.points), ("labels", setting.labels)):
        keys, values = parts[name].vectors.astype(np.float64), parts[name].labels.toarray()
        for row, query in enumerate(queries.astype(np.float64)):
            similarities = keys @ query
            near = np.argsort(-similarities, kind="stable")[: setting.neighbours]
            attention = np.exp((similarities[near] - similarities[near[0]]) / setting.temperature)
            attention /= attention.sum()
            for a, key in zip(attention, near):
                for label in range(L):
                    scores[row, label] += weight * a * values[key, label]
    return scores


@pytest.mark.parametrize("m", [1, 7, 1000])
@pytest.mark.parametrize(
    "weights", [(0.7, 2.0, 0.0), (0.0, 1.0, 0.0), (3.0, 0.0, 0.5), (0.5, 0.5, 2.0), (0.0, 0.0, 1.0)]
)
def test_equals_a_plain_loop(problem, m, weights):
    queries, labels, _, parts = problem
    setting = Setting(m, 0.1, *weights)
    base = Dense(labels)
    ranker = RetrievalRanker(base, parts, setting, TextIndex.of(NAMES))
    every = np.tile(np.arange(L), (Q, 1))
    expected = plain(queries, base.score(queries, "concat", every), parts, setting)
    queries = ranker.with_terms(queries, QUESTIONS)
    scores, ids = ranker.search(queries, "concat+retrieval", 10)
    np.testing.assert_allclose(scores, -np.sort(-expected, axis=1)[:, :10], atol=2e-5)
    found = np.take_along_axis(expected, ids.astype(int), axis=1)
    np.testing.assert_allclose(scores, found, atol=2e-5)
    np.testing.assert_allclose(
        ranker.score(queries, "concat+retrieval", every), expected, atol=2e-5
    )
    terms = ranker.terms(queries, "concat+retrieval", ids)
    np.testing.assert_allclose(sum(terms.values()), scores, atol=2e-5)
    voters = ranker.voters(queries, ids, 1000)
    assert set(terms) == {"model", *setting.weights}
    assert set(voters) == set(setting.weights) - {"lexical"}
    for name in voters:
        np.testing.assert_allclose(voters[name][1].sum(axis=2), terms[name], atol=2e-5)


@pytest.mark.parametrize("weights", [(50.0, 0.0, 0.0), (0.0, 0.0, 50.0)])
def test_candidates_are_those_of_all_parts(problem, monkeypatch, weights):
    queries, labels, _, parts = problem
    monkeypatch.setattr("xmc_jax.training.retrieval.BASE_CANDIDATES", 2)
    setting = Setting(5, 0.1, *weights)
    ranker = RetrievalRanker(Dense(labels), parts, setting, TextIndex.of(NAMES))
    every = np.tile(np.arange(L), (Q, 1))
    expected = plain(queries, Dense(labels).score(queries, "concat", every), parts, setting)
    queries = ranker.with_terms(queries, QUESTIONS)
    scores, _ = ranker.search(queries, "concat+retrieval", 3)
    np.testing.assert_allclose(scores[:, 0], expected.max(axis=1), atol=1e-4)
    # More than there are candidates: the model's own follow.
    assert (ranker.search(queries, "concat+retrieval", L + 5)[1].shape) == (Q, L)


def test_without_weights_the_model_comes_out_bit_for_bit(problem):
    queries, labels, bonus, parts = problem
    for base in (Dense(labels), Dense(labels, bonus), Dense(labels, bonus, factor=True)):
        ranker = RetrievalRanker(base, parts, Setting())
        for k in (1, 5, L):
            for a, b in zip(
                ranker.search(queries, "concat+retrieval", k), base.search(queries, "concat", k)
            ):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("factor", [False, True])
def test_a_tail_weight_counts_once(problem, factor):
    queries, labels, bonus, parts = problem
    setting, texts = Setting(10, 0.2, 0.5, 0.25, 0.75), TextIndex.of(NAMES)
    with_bonus = RetrievalRanker(Dense(labels, bonus, factor=factor), parts, setting, texts)
    without = RetrievalRanker(Dense(labels, factor=factor), parts, setting, texts)
    queries = without.with_terms(queries, QUESTIONS)
    every = np.tile(np.arange(L), (Q, 1))
    plain = without.score(queries, "concat+retrieval", every)
    expected = plain * np.exp(bonus) if factor else plain + bonus
    np.testing.assert_allclose(
        with_bonus.score(queries, "concat+retrieval", every), expected, atol=1e-5
    )
    scores, ids = with_bonus.search(queries, "concat+retrieval", 7)
    np.testing.assert_allclose(scores, np.take_along_axis(expected, ids.astype(int), 1), atol=1e-5)


def test_keys_by_inverted_lists_are_nearly_the_exact_ones():
    rng = np.random.default_rng(1)
    centres = unit(rng, 64)
    vectors = centres[rng.integers(0, 64, 8000)] + 0.3 * unit(rng, 8000)
    labels = csr_matrix((np.ones(8000), np.arange(8000) % L, np.arange(8001)), (8000, L))
    queries = vectors[:200] + 0.1 * unit(rng, 200)
    kept = vectors.astype(np.float16)
    exact, lists = Keys(kept, labels), Keys(kept, labels, kind="ivf")
    ids, near = exact.nearest(queries, 50)[1], lists.nearest(queries, 50)[1]
    recall = np.mean([len(set(a) & set(b)) / 50 for a, b in zip(ids, near)])
    assert recall >= 0.9
    np.testing.assert_array_equal(ids, exact_search(queries, kept.astype(np.float32), 50)[1])


class Asked(np.ndarray):
    """Vectors that stand for tokens, and the texts."""

    texts: list[str]


def split_of(queries: np.ndarray, truth: csr_matrix, pairs=(), texts=()) -> EvaluationSplit:
    pairs = np.array(pairs, np.int64).reshape(-1, 2)
    tokens = queries.view(Asked)
    tokens.texts = list(texts)
    return EvaluationSplit(tokens, np.arange(len(queries)), truth, pairs)


def right_points(rows: int, seed: int = 2):
    """Queries near points that have their labels, and a model that knows nothing."""
    rng = np.random.default_rng(seed)
    keys, labels = unit(rng, N), sparse(rng, N)
    own = rng.integers(0, N, rows)
    queries = keys[own] + 0.1 * unit(rng, rows)
    parts = {"points": Keys(keys.astype(np.float16), labels)}
    parts["labels"] = Keys(unit(rng, L).astype(np.float16), gandalf_targets(labels))
    return queries.astype(np.float32), parts, labels[own], rng


def test_what_helps_is_chosen_and_what_does_not_is_not():
    queries, parts, truth, rng = right_points(300)
    choice = retrieval_choice.choose(
        Dense(0.1 * unit(rng, L)), parts, split_of(queries, truth), np.ones(L)
    )
    assert choice.setting.points > 0 and choice.setting.labels == 0
    assert choice.chosen["P@5"] > choice.without["P@5"] + 10
    assert choice.best - choice.chosen["P@5"] < 3
    nothing = csr_matrix(truth.shape, dtype=np.float32)
    parts = {name: Keys(part.vectors, nothing[:1][[0] * len(part)]) for name, part in parts.items()}
    none = retrieval_choice.choose(Dense(unit(rng, L)), parts, split_of(queries, truth), np.ones(L))
    assert none.setting == Setting() and none.chosen == none.without


def test_words_are_chosen_where_they_help_alone():
    """A label is asked for by its part number, with a letter behind it."""
    rng = np.random.default_rng(3)
    own = rng.integers(0, L, 300)
    truth = csr_matrix((np.ones(300), own, np.arange(301)), (300, L), dtype=np.float32)
    asked = [f"machine{rng.integers(7)} {7919 * label}x" for label in own]
    split = split_of(unit(rng, 300), truth, texts=asked)
    base, none = Dense(0.1 * unit(rng, L)), {}
    choose = lambda split: retrieval_choice.choose(
        base, none, split, np.ones(L), texts=TextIndex.of(NAMES), choose_by="P@1"
    )
    choice = choose(split)
    assert choice.setting.weights.keys() == {"lexical"}
    assert choice.chosen["P@1"] > choice.without["P@1"] + 50
    assert choose(split_of(split.tokens, truth, texts=["zzz"] * 300)).setting == Setting()


def test_only_labels_that_cannot_win_are_left_out_of_the_choice(monkeypatch):
    """Every setting has the same first five without that."""
    queries, parts, truth, rng = right_points(90)
    texts, asked = TextIndex.of(NAMES), [QUESTIONS[row % Q] for row in range(90)]
    base = Dense(unit(rng, L))
    settings = retrieval_choice.grid((*parts, "lexical"))[::23]
    measure = lambda: retrieval_choice._measure(
        base,
        parts,
        split_of(queries, truth, [[3, 1], [4, 4]], asked),
        1 + np.arange(L),
        settings,
        retrieval_choice.METRICS,
        texts=texts,
    )
    found = measure()
    widths = []
    monkeypatch.setattr(
        retrieval_choice,
        "_possible",
        lambda scores, values, most: (
            widths.append(scores.shape[1]) or np.tile(np.arange(scores.shape[1]), (len(scores), 1))
        ),
    )
    for name, values in measure().items():
        np.testing.assert_array_equal(found[name], values)
    assert set(widths) == {L}


def test_rows_are_measured_as_an_evaluation_measures_them():
    from xmc_jax import metrics

    queries, parts, truth, rng = right_points(90)
    row, label = truth.nonzero()
    pairs = np.stack([row[::5], label[::5]], axis=1)
    inverse = 1 + rng.random(L)
    base = Dense(unit(rng, L))
    settings = [Setting(), Setting(20, 0.1, 0.5, 0.0), Setting(20, 0.1, 0.5, 1.0, 0.3)]
    texts, asked = TextIndex.of(NAMES), [QUESTIONS[row % Q] for row in range(90)]
    split = split_of(queries, truth, pairs, asked)
    values = retrieval_choice._measure(
        base, parts, split, inverse, settings, retrieval_choice.METRICS, texts=texts
    )
    for number, setting in enumerate(settings):
        ranker = RetrievalRanker(base, parts, setting, texts)
        asking = ranker.query_vectors(split.tokens, split.rows, "concat+retrieval")
        ids = ranker.search(asking, "concat+retrieval", 20)[1]
        expected = metrics.evaluate(ids, truth, inverse_propensity=inverse, filter_pairs=pairs)
        for name in retrieval_choice.METRICS:
            assert 100 * values[name][number].mean() == pytest.approx(expected[name], abs=1e-4)


def test_what_costs_the_first_answers_is_left_out():
    """A part that turns P@1 round for a better P@5 must not be chosen."""
    queries, _, truth, _ = right_points(300)
    first = np.asarray(truth.argmax(axis=1)).ravel()
    labels = np.zeros((L, D), np.float32)
    np.add.at(labels, first, queries)  # the model's first answer is mostly right
    labels /= np.maximum(np.linalg.norm(labels, axis=1, keepdims=True), 1e-9)
    wrong = np.roll(truth.toarray(), 1, axis=1)
    both = csr_matrix(3 * wrong + truth.toarray(), dtype=np.float32)
    parts = {"points": Keys(queries.astype(np.float16), both)}
    choice = retrieval_choice.choose(Dense(labels), parts, split_of(queries, truth), np.ones(L))
    error = choice.without["P@1"] - choice.chosen["P@1"]
    assert error < 5


def test_an_unknown_metric_is_told():
    queries, parts, truth, rng = right_points(10)
    with pytest.raises(ValueError, match=r"choose_by = 'P@7': expected one of P@1"):
        retrieval_choice.choose(
            Dense(unit(rng, L)), parts, split_of(queries, truth), np.ones(L), choose_by="P@7"
        )
