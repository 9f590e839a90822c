"""Metrics against golden values, the worked examples of the field, and plain loops."""

from __future__ import annotations

import json
import time
import warnings

import hypothesis
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import strategies as st

from xmc_jax import metrics
from xmc_jax.metrics.propensity import label_frequency

# The worked examples: 5 labels seen 1, 2, 10, 100 and 0 times in 1,000 rows, A = 0.55, B = 1.5.
WEIGHTS = np.array([6.90776, 5.90967, 3.55215, 1.77043, 8.82419])


def csr(rows: list[list[int]], num_labels: int) -> sp.csr_matrix:
    dense = np.zeros((len(rows), num_labels), np.float32)
    for row, labels in zip(dense, rows):
        row[labels] = 1.0
    return sp.csr_matrix(dense)


EXAMPLE_1 = (np.array([[3, 1, 0], [4, 3, -1], [0, 1, 2]]), csr([[0, 3], [3], []], 5))
EXAMPLE_2 = (np.array([[4, 0, 1]]), csr([[0, 1, 2, 3]], 5))


@pytest.mark.parametrize("name", ["plain", "amazon_filtered", "wiki_short_empty"])
def test_golden(golden, name: str) -> None:
    expected = json.loads((golden / f"metrics_{name}.json").read_text())
    with np.load(golden / f"metrics_{name}.npz") as z:
        truth = sp.csr_matrix(
            (z["te_data"], z["te_indices"], z["te_indptr"]), shape=tuple(z["te_shape"])
        )
        found = metrics.evaluate(
            z["pred_idx"],
            truth,
            inverse_propensity=z["inv_prop"],
            filter_pairs=z["filter"],
            ks=(1, 3, 5, 10),
        )
    wanted = {f"{m}@{k}": v for k, values in expected.items() for m, v in values.items()}
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=1e-9, abs=1e-9), key


def test_worked_example_1() -> None:
    found = metrics.evaluate(*EXAMPLE_1, inverse_propensity=WEIGHTS, ks=(1, 2, 3))
    expected = {
        "P": [0.33333, 0.33333, 0.33333],
        "nDCG": [0.33333, 0.41469, 0.51688],
        "PSP": [0.20401, 0.33888, 1.0],
        "PSnDCG": [0.20401, 0.32919, 0.64571],
        "R": [0.16667, 0.5, 0.66667],
        "C": [0.5, 0.5, 1.0],
    }
    for name, values in expected.items():
        for k, value in zip((1, 2, 3), values):
            assert found[f"{name}@{k}"] == pytest.approx(100 * value, abs=6e-4), (name, k)
    by_hand = 100 * 1.77043 / (6.90776 + 1.77043)
    assert found["PSP@1"] == pytest.approx(by_hand, rel=1e-12)


def test_worked_example_1_filtered() -> None:
    with pytest.warns(UserWarning, match="3 deep, expected 4"):
        found = metrics.evaluate(
            *EXAMPLE_1, inverse_propensity=WEIGHTS, filter_pairs=np.array([[0, 1]]), ks=(1, 2, 3)
        )
    for name, values in {"P": [1 / 3, 0.5, 1 / 3], "PSP": [0.204010, 1.0, 1.0]}.items():
        for k, value in zip((1, 2, 3), values):
            assert found[f"{name}@{k}"] == pytest.approx(100 * value, abs=6e-4), (name, k)


def test_worked_example_2() -> None:
    found = metrics.evaluate(*EXAMPLE_2, inverse_propensity=WEIGHTS, ks=(1, 2, 3))
    expected = {
        "P": [0.0, 0.5, 0.66667],
        "nDCG": [0.0, 0.38685, 0.53072],
        "PSP": [0.0, 0.53893, 0.78300],
        "PSnDCG": [0.0, 0.40976, 0.58918],
        "R": [0.0, 0.25, 0.5],
    }
    for name, values in expected.items():
        for k, value in zip((1, 2, 3), values):
            assert found[f"{name}@{k}"] == pytest.approx(100 * value, abs=6e-4), (name, k)


def test_worked_example_3_ties() -> None:
    _, ids = metrics.rank(np.full((1, 3), 0.5), np.array([[3, 0, 1]]), 3)
    np.testing.assert_array_equal(ids, [[0, 1, 3]])
    found = metrics.evaluate(ids, csr([[0]], 5), ks=(1, 2, 3))
    assert [found[f"P@{k}"] for k in (1, 2, 3)] == pytest.approx([100, 50, 100 / 3])


def test_negative_scores_rank_and_filter() -> None:
    # Example 1 with 1 taken from every score: a filtered pair must not come first as a "0".
    scores = np.array([[-0.3, -0.2, -0.1], [-0.1, -0.5, 9.0], [-0.1, -0.5, -0.9]])
    ids = np.array([[0, 1, 3], [4, 3, -1], [0, 1, 2]])
    scores, ids = metrics.rank(scores, ids, 3)
    np.testing.assert_array_equal(ids, EXAMPLE_1[0])
    np.testing.assert_array_equal(scores[1], [-0.1, -0.5, -np.inf])
    with pytest.warns(UserWarning):
        found = metrics.evaluate(ids, EXAMPLE_1[1], filter_pairs=np.array([[0, 1]]), ks=(1, 2, 3))
    assert [found[f"P@{k}"] for k in (1, 2, 3)] == pytest.approx([100 / 3, 50, 100 / 3])


def test_rank_none_comes_last_and_is_padded() -> None:
    scores = np.array([[np.nan, -np.inf, -5.0], [np.inf, np.nan, np.nan]], np.float32)
    ids = np.array([[-1, 9, 2], [-1, -7, -1]], np.int32)
    scores, ids = metrics.rank(scores, ids, 4)
    np.testing.assert_array_equal(ids, [[2, 9, -1, -1], [-1, -1, -1, -1]])
    np.testing.assert_array_equal(scores[0], np.array([-5.0, -np.inf, -np.inf, -np.inf]))
    assert (ids.dtype, scores.dtype) == (np.int32, np.float32)


def test_rank_refuses_nan_and_shapes() -> None:
    with pytest.raises(ValueError, match="NaN among the scores of row 1"):
        metrics.rank(np.array([[1.0], [np.nan]]), np.array([[0], [1]]), 1)
    with pytest.raises(ValueError, match="expected both"):
        metrics.rank(np.zeros((2, 3)), np.zeros((2, 2), int), 1)


@hypothesis.settings(derandomize=True, deadline=None, max_examples=50)
@hypothesis.given(
    st.lists(
        st.dictionaries(st.integers(0, 9), st.sampled_from([-1.0, -0.0, 0.0, 0.25, 2.0])),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 6),
)
def test_rank_equals_sorting(rows: list[dict[int, float]], k: int) -> None:
    width = max(max(map(len, rows)), 1)
    scores, ids = np.zeros((len(rows), width)), np.full((len(rows), width), -1)
    for i, row in enumerate(rows):
        ids[i, : len(row)], scores[i, : len(row)] = list(row), list(row.values())
    _, found = metrics.rank(scores, ids, k)
    for i, row in enumerate(rows):
        expected = sorted(row, key=lambda label: (-row[label], label))[:k]
        assert found[i].tolist() == expected + [-1] * (k - len(expected))


def loop_metrics(predictions, truth, weights, pairs, filter_truth, ks) -> dict[str, float]:
    """The definitions as plain loops in float64."""
    dense = truth.toarray() > 0
    removed = {tuple(pair) for pair in pairs.tolist()}
    num_rows, num_labels = dense.shape
    true = [
        [y for y in range(num_labels) if dense[i, y] and not (filter_truth and (i, y) in removed)]
        for i in range(num_rows)
    ]
    given = [
        [p for p in row if p >= 0 and (i, p) not in removed] for i, row in enumerate(predictions)
    ]
    out = {}
    for k in ks:
        p = ndcg = recall = psp = psp_best = psn = psn_best = 0.0
        hit_labels: set[int] = set()
        for t, g in zip(true, given):
            hits = [(j, y) for j, y in enumerate(g[:k]) if y in t]
            ideal = sum(1 / np.log2(j + 2) for j in range(min(k, len(t)))) or 1.0
            ranked = sorted((weights[y] for y in t), reverse=True)[:k]
            p += len(hits) / k
            ndcg += sum(1 / np.log2(j + 2) for j, _ in hits) / ideal
            recall += len(hits) / max(len(t), 1)
            psp += sum(weights[y] for _, y in hits)
            psp_best += sum(ranked)
            psn += sum(weights[y] / np.log2(j + 2) for j, y in hits) / ideal
            psn_best += sum(w / np.log2(j + 2) for j, w in enumerate(ranked)) / ideal
            hit_labels |= {y for _, y in hits}
        out[f"P@{k}"], out[f"nDCG@{k}"] = p / num_rows, ndcg / num_rows
        out[f"R@{k}"] = recall / num_rows
        out[f"PSP@{k}"] = psp / psp_best if psp_best else 0.0
        out[f"PSnDCG@{k}"] = psn / psn_best if psn_best else 0.0
        out[f"C@{k}"] = len(hit_labels) / max(len({y for t in true for y in t}), 1)
    return {key: 100 * value for key, value in out.items()}


def random_case(seed: int, num_rows: int = 13, num_labels: int = 11, width: int = 7):
    rng = np.random.default_rng(seed)
    predictions = np.argsort(rng.random((num_rows, num_labels)), axis=1)[:, :width]
    predictions = np.where(rng.random(predictions.shape) < 0.2, -1, predictions)
    truth = sp.csr_matrix(rng.random((num_rows, num_labels)) < rng.random() * 0.5)
    pairs = np.argwhere(rng.random((num_rows, num_labels)) < 0.2)
    return predictions, truth, 1 + 9 * rng.random(num_labels), rng.permutation(pairs)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("filter_truth", [True, False])
def test_equals_plain_loops(monkeypatch, seed: int, filter_truth: bool) -> None:
    monkeypatch.setattr("xmc_jax.metrics.ranked_lists._BLOCK_ENTRIES", 30)  # several blocks
    predictions, truth, weights, pairs = random_case(seed)
    expected = loop_metrics(predictions, truth, weights, pairs, filter_truth, (1, 2, 5, 9))
    with pytest.warns(UserWarning, match="deep"):
        found = metrics.evaluate(
            predictions,
            truth,
            inverse_propensity=weights,
            filter_pairs=pairs,
            filter_truth=filter_truth,
            ks=(1, 2, 5, 9),
        )
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-12, abs=1e-12), key


def test_no_true_labels_at_all() -> None:
    found = metrics.evaluate(
        np.array([[0, 1]]), csr([[]], 3), inverse_propensity=np.ones(3), ks=(1, 2)
    )
    assert set(found.values()) == {0.0}


def test_without_weights_there_is_no_psp() -> None:
    found = metrics.evaluate(*EXAMPLE_2, ks=(1,))
    assert list(found) == ["P@1", "nDCG@1", "R@1", "C@1"]


def test_inputs_are_left_alone() -> None:
    predictions = np.array([[0, -1, 1]])
    truth = sp.csr_matrix((np.array([1.0, 0.0, 2.0]), [2, 1, 0], [0, 3]), shape=(1, 3))
    found = metrics.evaluate(predictions, truth, filter_pairs=np.array([[0, 2]]), ks=(1, 2))
    assert found["R@1"] == 100.0  # {0} is left: label 2 is filtered, label 1 is an explicit zero
    np.testing.assert_array_equal(predictions, [[0, -1, 1]])
    np.testing.assert_array_equal(truth.indices, [2, 1, 0])


def test_warns_only_where_too_shallow() -> None:
    predictions, truth = np.array([[0, 1, 2, 3, 4, 5]]), csr([[0]], 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.evaluate(predictions, truth, filter_pairs=np.array([[0, 7]]), ks=(5,))
        metrics.evaluate(predictions[:, :3], csr([[0]], 3), filter_pairs=np.array([[0, 2]]))
    with pytest.warns(UserWarning, match="6 deep, expected 7"):
        metrics.evaluate(predictions, truth, filter_pairs=np.array([[0, 7], [0, 8]]), ks=(5,))


@pytest.mark.parametrize(
    ("predictions", "options", "message"),
    [
        ([[0, 1], [2, 5]], {}, r"predictions\[1, 1\]: found label 5, expected below 5"),
        ([[0, 1], [2, 2]], {}, r"predictions\[1\]: found a label twice"),
        ([[0, 1]], {}, r"expected \[2, K\]"),
        ([[0, 1], [2, 3]], {"ks": (0,)}, "k: found 0"),
        ([[0, 1], [2, 3]], {"inverse_propensity": np.ones(4)}, r"expected \(5,\)"),
        ([[0, 1], [2, 3]], {"filter_pairs": np.array([[0, 1], [2, 0]])}, r"filter_pairs\[1\]"),
        ([[0, 1], [2, 3]], {"filter_pairs": np.array([0, 1])}, r"expected \[F, 2\]"),
        ([[0.0, 1.0], [2.0, 3.0]], {}, "expected signed label ids"),
    ],
)
def test_errors(predictions, options, message: str) -> None:
    options = {"ks": (1,)} | options
    with pytest.raises(ValueError, match=message):
        metrics.evaluate(np.array(predictions), csr([[0], [1]], 5), **options)
    with pytest.raises(ValueError, match="CSR"):
        metrics.evaluate(np.array([[0]]), np.ones((1, 5)))


def test_remove_filtered_moves_up() -> None:
    predictions = np.array([[4, 2, 0, 1], [3, -1, 2, 0], [0, 1, 2, 3]], np.int32)
    found = metrics.remove_filtered(predictions, np.array([[0, 2], [0, 1], [1, 4], [1, 3]]), 5)
    np.testing.assert_array_equal(found, [[4, 0, -1, -1], [2, 0, -1, -1], [0, 1, 2, 3]])
    assert found.dtype == np.int32
    unfiltered = metrics.remove_filtered(predictions, None, 5)
    np.testing.assert_array_equal(unfiltered, [[4, 2, 0, 1], [3, 2, 0, -1], [0, 1, 2, 3]])


def test_bins_have_equal_sums() -> None:
    frequency = np.array([1, 8, 1, 0, 4, 1, 4, 1])  # 20 positives: 8 | 4 | 4 | 4 x 1 and one 0
    train = csr([[y for y in range(8) if frequency[y] > i] for i in range(8)], 8)
    np.testing.assert_array_equal(metrics.frequency_bins(train, 4), [4, 1, 4, 4, 2, 4, 3, 4])
    np.testing.assert_array_equal(metrics.frequency_bins(train, 1), np.ones(8))
    bins = metrics.frequency_bins(train, 5)
    assert set(bins) == {1, 2, 3, 4, 5}
    order = np.lexsort((np.arange(8), -frequency))
    assert (np.diff(bins[order]) >= 0).all()


def test_bins_of_few_or_unseen_labels() -> None:
    np.testing.assert_array_equal(metrics.frequency_bins(csr([[0], [0], [1]], 3), 5), [1, 2, 3])
    np.testing.assert_array_equal(metrics.frequency_bins(csr([[]], 5), 5), [1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="num_bins"):
        metrics.frequency_bins(csr([[0]], 1), 0)


def test_a_label_worth_several_bins_gets_one() -> None:
    train = csr([[0]] * 100 + [[y] for y in (1, 2, 3, 4)], 5)
    np.testing.assert_array_equal(metrics.frequency_bins(train, 3), [1, 2, 3, 3, 3])
    np.testing.assert_array_equal(metrics.frequency_bins(train, 5), [1, 2, 3, 4, 5])


def test_bins_of_the_long_tail_are_even() -> None:
    counts = np.maximum(20_000 // np.arange(1, 5_001), 1)
    rows = np.concatenate([np.arange(c) for c in counts])
    labels = np.repeat(np.arange(5_000), counts)
    train = sp.csr_matrix((np.ones(len(rows)), (rows, labels)), shape=(20_000, 5_000))
    bins = metrics.frequency_bins(train)
    sums = np.bincount(bins, weights=counts)[1:]
    assert np.abs(sums - counts.sum() / 5).max() <= counts.max() / 2


@pytest.mark.parametrize("filter_truth", [True, False])
def test_bins_add_up_to_precision(filter_truth: bool) -> None:
    predictions, truth, _, pairs = random_case(3)
    bins = metrics.frequency_bins(truth)
    options = dict(filter_pairs=pairs, filter_truth=filter_truth)
    with pytest.warns(UserWarning):
        rows = metrics.evaluate_bins(
            predictions, truth, bins, frequency=label_frequency(truth), **options
        )
        whole = metrics.evaluate(predictions, truth, **options)
    assert sum(row["value"] for row in rows) == pytest.approx(whole["P@5"], rel=1e-12)
    assert [row["bin"] for row in rows] == [1, 2, 3, 4, 5]
    assert sum(row["labels"] for row in rows) == truth.shape[1]
    sums = [row["labels"] * row["mean_frequency"] for row in rows]
    assert sum(sums) == pytest.approx(truth.nnz)


def test_one_bin_by_hand() -> None:
    predictions, truth = np.array([[0, 3], [3, 1]]), csr([[0, 1], [3]], 4)
    rows = metrics.evaluate_bins(
        predictions, truth, np.array([1, 1, 2, 2]), frequency=np.array([6, 4, 1, 2]), k=2
    )
    assert rows == [
        {"bin": 1, "labels": 2, "mean_frequency": 5.0, "value": 25.0},
        {"bin": 2, "labels": 2, "mean_frequency": 1.5, "value": 25.0},
    ]


def test_thresholds_by_hand() -> None:
    scores = np.array([[0.9, 0.5, 0.1], [0.7, 0.5, 9.0]])
    predictions = np.array([[0, 1, 2], [3, 0, -1]])
    truth = csr([[0, 2], [0, 1]], 4)
    rows = metrics.precision_recall_thresholds(
        scores, predictions, truth, thresholds=[0.0, 0.5, 0.8, 1.0]
    )
    expected = [(0.0, 60.0, 75.0, 2.5), (0.5, 50.0, 50.0, 2.0), (0.8, 100.0, 25.0, 0.5)]
    expected += [(1.0, 0.0, 0.0, 0.0)]
    assert [tuple(row.values()) for row in rows] == expected
    assert list(rows[0]) == ["threshold", "precision", "recall", "predictions_per_row"]
    filtered = metrics.precision_recall_thresholds(
        scores, predictions, truth, thresholds=[0.0], filter_pairs=np.array([[0, 2], [1, 3]])
    )
    assert tuple(filtered[0].values()) == (0.0, pytest.approx(200 / 3), pytest.approx(200 / 3), 1.5)


def test_default_thresholds_span_the_scores() -> None:
    scores = np.array([[2.0, -1.0], [0.5, np.nan]])
    rows = metrics.precision_recall_thresholds(
        scores, np.array([[0, 1], [1, -1]]), csr([[0], []], 2)
    )
    np.testing.assert_allclose([row["threshold"] for row in rows], np.linspace(-1, 2, 11))
    assert rows[-1]["precision"] == 100.0
    empty = metrics.precision_recall_thresholds(scores[:1], np.full((1, 2), -1), csr([[0]], 2))
    assert empty == []


def test_size_of_amazontitles_131k() -> None:
    """134,835 rows x 131,073 labels, 100 deep, filter pairs up to 70 a row."""
    num_rows, num_labels, width = 134_835, 131_073, 100
    rng = np.random.default_rng(0)
    step = rng.integers(1, num_labels // width, (num_rows, width), dtype=np.int32)
    predictions = np.cumsum(step, axis=1, dtype=np.int32)  # distinct ids below L
    hit = predictions[np.arange(num_rows), rng.integers(0, width, num_rows)]
    labels = np.stack([hit, rng.integers(0, num_labels, num_rows)], axis=1)
    truth = sp.csr_matrix(
        (np.ones(2 * num_rows), labels.ravel(), np.arange(0, 2 * num_rows + 1, 2)),
        shape=(num_rows, num_labels),
    )
    rows = np.repeat(rng.choice(num_rows, 40_000, replace=False), 2)
    pairs = np.stack([rows, predictions[rows, rng.integers(0, width, len(rows))]], axis=1)
    start = time.process_time()
    found = metrics.evaluate(
        predictions,
        truth,
        inverse_propensity=1 + rng.random(num_labels),
        filter_pairs=pairs,
        ks=(1, 3, 5, 90),
    )
    assert time.process_time() - start < 30  # about 2 s where nothing else runs
    assert 0.8 < found["P@1"] < 1.2  # one hit among 100 ranks in each row


@pytest.mark.parametrize("k", [None, "3", 1.5, 0, -1, True, float("nan")])
def test_cut_offs_are_whole_numbers(k):
    predictions, truth = np.array([[0, 1], [1, 0]]), csr([[0], [1]], 3)
    zeros = np.zeros(3, int)
    for call in (
        lambda: metrics.evaluate(predictions, truth, ks=(1, k)),
        lambda: metrics.evaluate_bins(predictions, truth, zeros, frequency=zeros, k=k),
        lambda: metrics.rank(np.zeros((2, 2)), predictions, k),
    ):
        with pytest.raises(ValueError, match=r"k: found .*; expected a whole number, 1 or more"):
            call()
    for ks in (None, 5, "135"):
        with pytest.raises(ValueError, match=r"ks: found .*; expected cut-offs"):
            metrics.evaluate(predictions, truth, ks=ks)
    both = metrics.evaluate(predictions, truth, ks=np.array([2, 1]))
    assert both == metrics.evaluate(predictions, truth, ks=(1, 2))
