"""Held-out rows: how many, which, and that their answers cannot be read backwards."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from xmc_jax.data import splits
from xmc_jax.data.dataset import Split
from xmc_jax.data.readers import formats

NO_PAIRS = np.zeros((0, 2), dtype=np.int64)


def make_split(texts, rows, num_labels, pairs=NO_PAIRS):
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    indices = np.array([label for row in rows for label in sorted(row)], dtype=np.int32)
    data = np.ones(len(indices), np.float32)
    return Split(texts, csr_matrix((data, indices, indptr), (len(texts), num_labels)), pairs)


def random_split(seed, num_rows=400, num_labels=50, num_texts=60):
    """Rows and labels with texts from one small vocabulary, so that reverse pairs abound."""
    rng = np.random.default_rng(seed)
    names = [f"Text {i}" for i in range(num_texts)]
    label_texts = [names[i] for i in rng.integers(num_texts, size=num_labels)]  # some repeated
    texts = [
        names[i].upper() + " " if rng.random() < 0.3 else names[i]
        for i in rng.integers(num_texts, size=num_rows)
    ]
    rows = [set(rng.choice(num_labels, rng.integers(0, 9), replace=False)) for _ in range(num_rows)]
    pairs = np.unique(rng.integers([num_rows, num_labels], size=(200, 2)), axis=0)
    return make_split(texts, rows, num_labels, pairs), label_texts


def key(text):
    return text.strip().casefold()


def as_pairs(split, label_texts):
    """Plain loops: the set of (text, label text) pairs of a split."""
    return {
        (key(split.texts[row]), key(label_texts[label]))
        for row in range(len(split))
        for label in split.labels[row].indices
    }


@pytest.mark.parametrize("seed", range(4))
def test_reverse_pairs_and_only_they_leave_training(seed):
    split, label_texts = random_split(seed)
    train, held_out = splits.hold_out(split, label_texts, share=0.3, max_rows=1_000, seed=seed)
    answers = as_pairs(held_out, label_texts)
    removed = 0
    for place, row in enumerate(train.rows):
        kept = set(train.labels[place].indices.tolist())
        for label in split.labels[row].indices:
            reverse = (key(label_texts[label]), key(split.texts[row])) in answers
            assert reverse != (label in kept)
            removed += reverse
    assert removed > 20  # the case is there
    assert not {(b, a) for a, b in answers} & as_pairs(train, label_texts)
    assert (train.labels.data == 1).all()


def test_rows_texts_and_filter_pairs_follow():
    split, label_texts = random_split(9)
    train, held_out = splits.hold_out(split, label_texts, share=0.25, max_rows=1_000, seed=1)
    np.testing.assert_array_equal(np.sort(np.concatenate([train.rows, held_out.rows])), range(400))
    found = set()
    for part in (train, held_out):
        assert list(part.texts) == [split.texts[row] for row in part.rows]
        found |= {(int(part.rows[row]), int(label)) for row, label in part.filter_pairs}
    assert found == {tuple(pair) for pair in split.filter_pairs.tolist()}
    assert (np.diff(held_out.labels.indptr) > 0).all()
    np.testing.assert_array_equal(held_out.labels.toarray(), split.labels[held_out.rows].toarray())


def test_how_many_and_seed():
    split, label_texts = random_split(3)
    split = dataclasses.replace(split, texts=[f"{i}" for i in range(400)])
    count = lambda **options: len(splits.hold_out(split, label_texts, **options)[1])
    assert count(share=0.05, seed=0) == 20
    assert count(share=0.05, max_rows=7, seed=0) == 7
    assert count(share=0.0, seed=0) == 0
    rows = [splits.hold_out(split, label_texts, seed=seed)[1].rows for seed in (5, 5, 6)]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])


def test_rows_of_equal_text_stay_on_one_side():
    split, label_texts = random_split(3)  # 60 texts in 400 rows
    options = {"share": 0.2, "max_rows": 400, "seed": 0}
    train, test = splits.hold_out(split, label_texts, **options)
    assert {key(text) for text in test.texts}.isdisjoint(
        key(split.texts[row]) for row in train.rows if split.labels[row].nnz
    )
    assert 75 < len(test) <= 80  # a text has about seven rows
    assert len(train) + len(test) == 400 and (np.diff(test.labels.indptr) > 0).all()
    np.testing.assert_array_equal(splits.hold_out(split, label_texts, **options)[1].rows, test.rows)
    fewer = splits.hold_out(split, label_texts, **{**options, "max_rows": 50})[1]
    assert 40 < len(fewer) <= 50
    one = make_split(["a", "A "], [[0], [1]], 2)
    assert len(splits.hold_out(one, ["x", "y"], **options)[1]) == 0


def grouped(sizes, extra=()):
    """Rows of texts that occur so often, each with one label; and texts of further rows."""
    texts = [f"text {i}" for i, size in enumerate(sizes) for _ in range(size)]
    order = np.random.default_rng(0).permutation(len(texts))
    texts = [*(texts[i] for i in order), *extra]
    return make_split(texts, [[0]] * len(texts), 1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "sizes", [[333, *[1] * 667], [150, *[1] * 850], [90] * 5 + [50] * 11, [2] * 500]
)
def test_the_share_is_of_rows_and_groups_stay_whole(sizes, seed):
    split = grouped(sizes)
    train, test = splits.hold_out(split, ["x"], share=0.2, max_rows=1000, seed=seed)
    smallest = min(sizes)
    assert len(train) + len(test) == 1000 and 200 - smallest < len(test) <= 200
    assert not set(train.texts) & set(test.texts)


def test_texts_that_fill_more_than_the_share_are_named():
    split = grouped([333, *[1] * 667])
    notes: list[str] = []
    _, test = splits.hold_out(split, ["x"], share=0.2, max_rows=1000, seed=0, notes=notes)
    assert "text 0" not in test.texts and len(test) == 200
    assert notes == [
        "333 of 1,000 rows have the text 'text 0': more than the 200 that are held out, "
        "so they stay in training"
    ]
    notes.clear()
    split = grouped([150] * 5 + [1] * 250)
    splits.hold_out(split, ["x"], share=0.1, max_rows=1000, seed=0, notes=notes)
    assert len(notes) == 4 and notes[-1] == "so do the rows of 2 more texts"
    notes.clear()
    splits.hold_out(grouped([1] * 100), ["x"], share=0.1, seed=0, notes=notes)
    splits.hold_out(grouped([2] * 5), ["x"], share=0.1, seed=0, notes=notes)
    assert notes == []


def test_blank_texts_stay_in_training():
    split = grouped([1] * 60, extra=["", " ", "\t", "\u00a0"] * 10)
    for share in (0.2, 0.55):
        _, test = splits.hold_out(split, ["x"], share=share, max_rows=100, seed=0)
        assert len(test) == round(100 * share) and all(text.strip() for text in test.texts)
    only = make_split(["", " "], [[0], [0]], 1)
    assert len(splits.hold_out(only, ["x"], share=0.5, seed=0)[1]) == 0


@pytest.mark.parametrize("seed", range(3))
def test_shares_of_texts_are_those_of_before(seed):
    """Of distinct texts shares of rows are the same; of others as many texts are drawn."""
    texts = [f"{i}" for i in range(400)]
    distinct = dataclasses.replace(random_split(3)[0], texts=texts)
    draw = lambda split, share_of: splits.hold_out(
        split, ["x"] * 50, share=0.2, max_rows=400, seed=seed, share_of=share_of
    )[1]
    rows = [draw(distinct, share_of).rows for share_of in splits.SHARES]
    np.testing.assert_array_equal(*rows)
    split, _ = random_split(3)  # 60 texts in 400 rows
    assert len({key(text) for text in draw(split, "texts").texts}) == 12


def test_no_rows_left_over():
    split, label_texts = random_split(3)
    train, held_out = splits.hold_out(split, label_texts, share=0.0, seed=0)
    assert len(train) == 400 and train.labels.nnz == split.labels.nnz
    assert len(held_out.texts) == 0 and held_out.labels.shape == (0, 50)
    lonely = make_split(["a", "b"], [[], [0]], 1)
    train, held_out = splits.hold_out(lonely, ["x"], share=0.9, seed=0)
    assert len(held_out) == 0  # the only row with labels stays in training


def test_rows_of_a_part_count_in_the_first_split():
    split, label_texts = random_split(4)
    train, _ = splits.hold_out(split, label_texts, share=0.2, seed=0)
    _, held_out = splits.hold_out(train, label_texts, share=0.2, seed=1)
    assert list(held_out.texts) == [split.texts[row] for row in held_out.rows]


@pytest.mark.parametrize("options", [{"share": 1.0}, {"share": -0.1}, {"max_rows": -1}])
def test_bad_options(options):
    split, label_texts = random_split(0)
    with pytest.raises(ValueError, match="expected"):
        splits.hold_out(split, label_texts, seed=0, **options)


def test_text_codes_ignore_case_and_blanks():
    first, second = splits.text_codes(["Straße ", "b", ""], ["STRASSE", "c", " "])
    assert first[0] == second[0] and first[2] == second[2]
    assert len({*first, *second}) == 4


def test_bundled_set_has_no_reverse_pairs(mini_folder):
    mini = formats.load(mini_folder)
    removed, given_away = splits.reverse_pairs(mini.train, mini.test, mini.label_texts)
    assert len(removed) == len(given_away) == 0
    train, held_out = splits.hold_out(mini.train, mini.label_texts, share=0.2, seed=0)
    removed, given_away = splits.reverse_pairs(train, held_out, mini.label_texts)
    assert len(removed) == len(given_away) == 0
    assert train.labels.nnz + held_out.labels.nnz < mini.train.labels.nnz
