"""People's own data: one file or a folder, ids or texts, JSON Lines, TSV, CSV."""

from __future__ import annotations

import re

import numpy as np
import pytest
from layout_files import json_lines, write

from xmc_jax.data import splits
from xmc_jax.data.readers import formats


def as_lists(split, label_texts):
    """Text -> label texts."""
    return {
        text: [label_texts[i] for i in split.labels[row].indices]
        for row, text in enumerate(split.texts)
    }


def test_label_texts_are_numbered_as_met(tmp_path):
    rows = [{"text": "a", "labels": ["z", " y "]}, {"text": "b", "labels": ["x", "y", ""]}]
    write(tmp_path / "train.jsonl", json_lines(rows))
    write(tmp_path / "test.jsonl", json_lines([{"text": "c", "labels": ["w", "z"]}]))
    dataset = formats.load(tmp_path)
    assert list(dataset.label_texts) == ["z", "y", "x", "w"]
    assert as_lists(dataset.train, dataset.label_texts) == {"a": ["z", "y"], "b": ["y", "x"]}
    assert as_lists(dataset.test, dataset.label_texts) == {"c": ["z", "w"]}
    assert dataset.notes == ()


def one_file_rows(n=200):
    """Row i has labels i + 1, i - 1 and a common one: most pairs are another pair's reverse."""
    return [
        {"text": f"Text {i}", "labels": [f"text {(i + 1) % n}", f"text {(i - 1) % n}", "all"]}
        for i in range(n)
    ]


@pytest.fixture
def repeated(tmp_path):
    """A thousand rows; of 300 of them the text is the same, 100 have none."""
    rows = [{"text": "Other", "labels": ["x"]}] * 300 + [{"text": " ", "labels": ["x"]}] * 100
    rows += [{"text": f"Text {i}", "labels": ["x", f"y {i % 9}"]} for i in range(600)]
    path = tmp_path / "mine.jsonl"
    write(path, json_lines(rows))
    return path


def test_the_test_rows_are_a_fifth_of_the_rows(repeated):
    """Those of a text that fills more stay in training, which is said; so do blank ones."""
    dataset = formats.load(repeated)
    assert (len(dataset.train), len(dataset.test)) == (800, 200)
    assert {text[:4] for text in dataset.test.texts} == {"Text"}
    said = [note for note in dataset.notes if "stay in training" in note]
    assert said == [
        "300 of 1,000 rows have the text 'Other': more than the 200 that are held out, so they "
        "stay in training"
    ]


def test_a_run_of_before_reads_its_own_split(repeated, tmp_path, monkeypatch):
    """A fifth of the texts, as 6654296 drew them; canonical copies of both are kept."""
    before = formats.load(repeated, share_of="texts")
    assert before.digest == "dc868c7fb66396e8a2cbea1afb900b98" and len(before.test) == 219
    monkeypatch.setattr(formats, "_SMALL_BYTES", 0)
    for share_of in (*splits.SHARES, *splits.SHARES):
        options = {"text": "title", "cache_root": tmp_path / "cache", "share_of": share_of}
        found = formats.load(formats.ensure_canonical(repeated, **options))
        assert found.digest == formats.load(repeated, share_of=share_of).digest
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_one_file_is_split_without_reverse_pairs(tmp_path):
    write(tmp_path / "mine.jsonl.gz", json_lines(one_file_rows()))
    dataset = formats.load(tmp_path / "mine.jsonl.gz")
    assert dataset.name == "mine" and len(dataset.label_texts) == 201
    assert (len(dataset.train), len(dataset.test)) == (160, 40)
    assert (np.diff(dataset.test.labels.indptr) == 3).all()
    train, test = (as_lists(s, dataset.label_texts) for s in (dataset.train, dataset.test))
    for text, labels in train.items():
        number = int(text.split()[1])
        expected = [
            f"text {other % 200}"
            for other in (number + 1, number - 1)
            if f"Text {other % 200}" not in test
        ]
        assert sorted(labels) == sorted([*expected, "all"])
    assert len(splits.reverse_pairs(dataset.train, dataset.test, dataset.label_texts)[0]) == 0
    assert "no test file; 40 rows split off" in dataset.notes[-1]
    again = formats.load(tmp_path / "mine.jsonl.gz")
    assert again.digest == dataset.digest


def test_folder_without_test_file(tmp_path):
    write(tmp_path / "train.csv", "text,labels\n" + "".join(f"t{i},a|b\n" for i in range(20)))
    write(tmp_path / "filter_labels_train.txt", "".join(f"{i} 1\n" for i in range(20)))
    dataset = formats.load(tmp_path)
    assert (len(dataset.train), len(dataset.test)) == (16, 4)
    assert dataset.test.filter_pairs.tolist() == [[i, 1] for i in range(4)]
    assert len(dataset.train.filter_pairs) == 16


def test_label_file_keeps_order_and_labels_without_points(tmp_path):
    write(tmp_path / "labels.jsonl", json_lines([{"text": "unused"}, "b", {"title": "a"}, "a"]))
    write(tmp_path / "train.tsv", "x\ta|b\ny\t\n\nz\tb\n")
    write(tmp_path / "test.tsv", "w\ta\n")
    dataset = formats.load(tmp_path)
    assert list(dataset.label_texts) == ["unused", "b", "a", "a"]
    assert dataset.train.labels.toarray().tolist() == [[0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert dataset.notes == (
        "labels.jsonl: 1 label texts stand there more than once",
        "train.tsv: 1 rows without labels, kept empty (lines 2)",
    )


def test_csv_quotes_line_breaks_columns_and_long_fields(tmp_path):
    long = "word " * 50_000
    write(
        tmp_path / "train.csv",
        'id,label,Text\n1,a|b,"one, ""two""\nthree"\n2, c |,four\n' + f'3,d,"{long}"\n',
    )
    write(tmp_path / "test.csv", "text,labels\nx,a\n")
    dataset = formats.load(tmp_path)
    assert dataset.train.texts[:2] == ['one, "two" three', "four"]
    assert dataset.train.texts[2] == long.strip()
    assert list(dataset.label_texts) == ["a", "b", "c", "d"]


def test_digits_are_texts_in_json_and_ids_elsewhere(tmp_path):
    rows = [{"text": f"x{i}", "labels": ["1", "0"]} for i in range(10)]
    write(tmp_path / "a" / "train.jsonl", json_lines(rows))
    assert list(formats.load(tmp_path / "a").label_texts) == ["1", "0"]
    write(tmp_path / "b" / "train.tsv", "".join(f"x{i}\t1|0\n" for i in range(10)))
    with pytest.raises(ValueError, match=r"train\.tsv, line 1: found labels that are ids \(1\)"):
        formats.load(tmp_path / "b")
    write(tmp_path / "b" / "labels.txt", "zero\none\n")
    assert formats.load(tmp_path / "b").train.labels.nnz == 16
    write(tmp_path / "b" / "labels.txt", "1\n0\n7\n")  # label texts that are digits
    assert formats.load(tmp_path / "b").train.labels[0].indices.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("labels.csv", "labels.txt"),
        ("label.txt", "labels.txt"),
        ("Labels.txt.zip", "labels.txt"),
        ("test.txt", "test.tsv"),
    ],
)
def test_a_file_of_labels_or_test_rows_is_not_left_out_without_a_word(tmp_path, name, right):
    for place in ("train.tsv", "test.py", "labels.npy", name):
        write(tmp_path / place, "a label\ta label\n" * 5)
    role, _, ending = right.partition(".")
    with pytest.raises(formats.DataError, match=rf"{name}: found a file of .*{role}\.{ending}"):
        formats.load(tmp_path)
    write(tmp_path / right, "a label\ta label\n" if role == "test" else "a label\nanother\n")
    if name.startswith(role):  # the others may hold something else
        with pytest.raises(formats.DataError, match=rf"{right}: found {name} beside it"):
            formats.load(tmp_path)
        (tmp_path / name).unlink()
    assert len(formats.load(tmp_path).label_texts) == 1 + (role == "labels")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("train.tsv", "train.csv"),
        ("train.jsonl", "train.tsv"),
        ("train.tsv", "train.tsv.gz"),
        ("train.tsv", "Train.TSV"),
        ("test.jsonl", "test.tsv"),
        ("test.csv", "test.txt"),
        ("labels.txt", "labels.jsonl"),
        ("labels.txt", "labels.csv"),
    ],
)
def test_two_files_for_one_role_are_both_named(tmp_path, one, other):
    for name in ("train.tsv", "labels.txt", one, other):
        if name.partition(".")[0] != one.partition(".")[0] or name in (one, other):
            write(tmp_path / name, "a\n" if name.startswith("labels") else "x\ta\n" * 9)
    expected = rf"{one}: found {other} beside it; expected one file of .* Move away or rename"
    with pytest.raises(formats.DataError, match=expected):
        formats.ensure_canonical(tmp_path, text="title")
    with pytest.raises(formats.DataError, match=expected):
        formats.load(tmp_path)
    if "labels" in one:
        with pytest.raises(formats.DataError, match=expected):
            formats.load(tmp_path / "train.tsv")
    if one.endswith(("tsv", "txt")):
        before = formats.load(tmp_path, reading=formats.Reading(version=1))  # a run of 6654296
        assert list(before.label_texts) == ["a"]
        (tmp_path / other).rename(tmp_path / f"old_{other}")
        assert list(formats.load(tmp_path).label_texts) == ["a"]


def test_files_of_another_use_or_folder_may_stand_beside(tmp_path):
    for name in ("train.tsv", "raw/train.csv", "labels.txt.zip", "train.parquet", "test.py"):
        write(tmp_path / name, "x\ta\n" * 9)
    write(tmp_path / "labels.txt", "a\n")
    assert list(formats.load(tmp_path).label_texts) == ["a"]


def test_labels_beside_one_file_are_read_or_refused_and_test_rows_are_not_looked_for(tmp_path):
    for place in ("train.tsv", "test.txt"):
        write(tmp_path / place, "a text\ta label\n" * 5)
    assert list(formats.load(tmp_path / "train.tsv").label_texts) == ["a label"]
    write(tmp_path / "labels.csv", "a label\n")
    with pytest.raises(formats.DataError, match=r"labels\.csv: found a file of labels"):
        formats.load(tmp_path / "train.tsv")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["train.tsv", "train.csv", "train.jsonl", "labels.txt"])
def test_utf_16_is_read_by_its_mark(tmp_path, name, encoding):
    contents = {
        "train.tsv": "a text\ta label\n",
        "train.csv": "a text,a label\n",
        "train.jsonl": '{"text": "a text", "labels": ["a label"]}\n',
        "labels.txt": "a label\n",
    }
    write(tmp_path / "train.tsv", contents["train.tsv"])
    if name.startswith("train"):
        (tmp_path / "train.tsv").unlink()
    write(tmp_path / name, f"\ufeff{contents[name]}".encode(encoding))
    dataset = formats.load(tmp_path)
    assert list(dataset.train.texts) == ["a text"] and list(dataset.label_texts) == ["a label"]


def test_latin_1(tmp_path):
    write(tmp_path / "train.tsv", "plain\tf\xfcr\ncaf\xe9\tf\xfcr\n".encode("latin-1") * 5)
    dataset = formats.load(tmp_path)
    assert list(dataset.label_texts) == ["f\xfcr"]
    assert dataset.notes[0] == (
        "train.tsv, line 1: byte 0xfc is not UTF-8, read as cp1252; 10 such lines in all"
    )


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("train.jsonl", '{"text": 3}\n', r"line 1: found \{'text': 3\}"),
        ("train.jsonl", '{"text": "a", "labels": [1.5]}\n', r"line 1: found labels \[1\.5\]"),
        ("train.jsonl", '{"text": "a", "labels": [true]}\n', r"line 1: found labels \[True\]"),
        ("train.jsonl", '{"text": "a", "labels": [1, "b"]}\n', "line 1: found label 'b' after 1"),
        ("train.jsonl", '{"text": "a", "labels": [3]}\n', "found labels that are ids"),
        ("train.jsonl", '{"text": "a"}\n', "found no row with labels"),
        ("train.jsonl", "[\n", r"line 1: found '\['"),
        ("train.tsv", "a\tb\nc\n", "line 2: found 1 columns; expected 2"),
        ("train.tsv", "a\tb\tc\n", r"line 1: found 3 columns \(a, b, c\); expected 2"),
        ("train.csv", 'a,b\n"c" d,e\n', "line 2: found a row that is not CSV"),
        ("train.csv", 'a,b\n"c\nd,e\n', "line 3: found a row that is not CSV"),
        ("train.tsv", "", "found no rows"),
    ],
)
def test_bad_rows(tmp_path, name, content, expected):
    write(tmp_path / name, content)
    with pytest.raises(formats.DataError) as error:
        formats.load(tmp_path)
    assert re.search(expected, str(error.value)) and name in str(error.value)


@pytest.mark.parametrize(
    ("name", "good", "wrong"),
    [("train.tsv", "a\tb\n", "a\n"), ("train.jsonl", '{"text": "a", "labels": ["b"]}\n', "{\n")],
)
def test_bad_rows_are_listed_together(tmp_path, name, good, wrong):
    write(tmp_path / name, good + wrong + good + wrong + '{"text": 3}\n')
    with pytest.raises(formats.DataError, match=r"^3 bad rows:\n") as error:
        formats.load(tmp_path)
    found = re.findall(rf"{name}, line (\d+): found", str(error.value))
    assert found == ["2", "4", "5"]
    write(tmp_path / name, good + 30 * wrong)
    with pytest.raises(formats.DataError, match=r"^30 bad rows:") as error:
        formats.load(tmp_path)
    lines = str(error.value).splitlines()
    assert re.search(r"^  and 27 more rows where .* was expected$", lines[-1])
    assert [re.findall(r", line (\d+): found", line) for line in lines[1:-1]] == [
        ["2"],
        ["3"],
        ["4"],
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            "x\tb|a\ny\tb|c\n",
            r"train\.tsv, line 2: found label 'c'; expected a label text of labels",
        ),
        (
            "x\t0|1\ny\t2\n",
            r"train\.tsv, line 2: found label id 2 in row 1; expected ids from 0 to 1",
        ),
        (f"x\t{10**30}\n", r"train\.tsv, line 1: found label id"),
    ],
)
def test_labels_that_the_label_file_lacks(tmp_path, content, expected):
    write(tmp_path / "train.tsv", content)
    write(tmp_path / "labels.txt", "a\nb\n")
    with pytest.raises(formats.DataError, match=expected):
        formats.load(tmp_path)


def test_other_file_types_are_refused(tmp_path):
    write(tmp_path / "mine.xlsx", "x")
    with pytest.raises(ValueError, match=r"ends in '\.xlsx'; expected \.jsonl"):
        formats.load(tmp_path / "mine.xlsx")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("train.csv", "text,label_ids\nred,1|2\n", r"line 2: found labels that are ids \(1\)"),
        ("train.tsv", "Title\tLabels\nred\t1\n", r"line 2: found labels that are ids \(1\)"),
        (
            "train.tsv",
            "red\t3\nblue\t12 45\n",
            r"line 2: .* '12 45'; expected ids with \|",
        ),
        ("train.tsv", "red\t3;4\n", "line 1: found labels '3;4'"),
        ("train.csv", 'red,"[3, 4]"\n', r"line 1: found labels that are ids \(3\)"),
    ],
)
def test_what_looks_like_ids_is_not_taken_for_label_texts(tmp_path, name, content, expected):
    write(tmp_path / name, content)
    with pytest.raises(formats.DataError, match=expected):
        formats.load(tmp_path)
    if "that are ids" not in expected:
        write(tmp_path / "labels.txt", "a\nb\n")
        with pytest.raises(formats.DataError, match=expected):
            formats.load(tmp_path)


def test_words_of_headers_and_numbers_with_words_are_data(tmp_path):
    rows = ["name\ttitle|label", "1,2\tcalcium 2, 4", "x\t12 45"]
    write(tmp_path / "train.tsv", "".join(f"{row}\n" for row in rows))
    found = formats.load(tmp_path).label_texts
    assert sorted(found) == ["12 45", "calcium 2, 4", "label", "title"]
