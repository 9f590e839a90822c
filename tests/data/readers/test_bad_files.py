"""Broken, odd and mismatched files: repaired with a note, or one error with file and line."""

from __future__ import annotations

import gzip
import json
import re

import numpy as np
import pytest
from layout_files import LABELS, TRAIN, json_lines, write, write_json, write_lines_layout
from scipy import sparse

from xmc_jax.data.readers import formats, label_files
from xmc_jax.data.readers.reading import Reading


def error_of(folder) -> str:
    with pytest.raises(formats.DataError) as error:
        formats.load(folder)
    message = str(error.value)
    assert re.search(r"found .*; expected .*\. ?", message)
    return message


def json_row(**changes):
    return {"title": "x", "target_ind": [0], **changes}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([json_row(), json_row(target_ind=[1, 4])], r"line 2: found label id 4 in row 1"),
        ([json_row(target_ind=[-1])], r"line 1: found label id -1"),
        ([json_row(target_ind=[2**40])], r"line 1: found target_ind \[1099511627776\]"),
        ([json_row(target_ind=["a"])], r"line 1: found target_ind \['a'\]"),
        ([json_row(), {"title": "x"}], r"line 2: found target_ind None"),
        ([json_row(), {"text": "x"}], r"line 2: found fields text; expected .*'title'"),
        ([json_row(title=3)], r"line 1: found title 3"),
        ([json_row(target_ind=[1, 2], target_rel=[0.0])], "found 2 target_ind and 1 target_rel"),
        ([[1, 2]], r"line 1: found \[1, 2\]"),
    ],
)
def test_bad_json_rows(tmp_path, rows, expected):
    folder = write_json(tmp_path)
    write(folder / "trn.json.gz", json_lines(rows))
    assert re.search(rf"trn\.json\.gz, .*{expected}", error_of(folder))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"title": "x", "target_ind": [0]}\n{"title": "x", "targ', r"line 2: found '\{\"title\""),
        ('{"title": "x", "target_ind": [0]}\n\n{"title": "x"}\n', "line 2: found a blank line"),
        ("", "found no rows"),
        ("\n\n", "found no rows"),
    ],
)
def test_bad_json_files(tmp_path, content, expected):
    folder = write_json(tmp_path)
    write(folder / "trn.json.gz", content)
    assert re.search(expected, error_of(folder))


def test_truncated_gzip(tmp_path):
    folder = write_json(tmp_path)
    rows = [json_row(title=f"{i} {np.random.default_rng(i).bytes(20).hex()}") for i in range(2000)]
    whole = gzip.compress(json_lines(rows).encode())
    for cut, line in ((len(whole) // 2, r"line \d{3,4}: "), (12, "line 1: ")):
        (folder / "trn.json.gz").write_bytes(whole[:cut])
        assert re.search(rf"trn\.json\.gz, {line}found a broken compressed", error_of(folder))
    (folder / "trn.json.gz").write_bytes(whole[:1000] + b"\xff" * 50 + whole[1050:])
    assert "trn.json.gz, line " in error_of(folder)  # garbage before the checksum is reached
    write(folder / "trn.json.gz", json_lines([json_row()]))
    matrices = write_lines_layout(tmp_path / "lines")
    (matrices / "trn_X_Y.txt").rename(matrices / "trn_X_Y.txt.gz")
    (matrices / "trn_X_Y.txt.gz").write_bytes(gzip.compress(b"4 4\n0:1\n" * 999)[:-9])
    assert "broken compressed file" in error_of(matrices)


def test_notes_count_what_was_repaired(tmp_path):
    folder = write_json(tmp_path)
    rows = [
        json_row(target_ind=[2, 0, 2, 1]),
        json_row(title="line\nbreak\u2028and\x85more \ud800"),
        json_row(title=None, target_ind=[]),
        json_row(target_ind=[1, 3], target_rel=[0.0, 0.5]),
    ]
    write(folder / "trn.json.gz", json_lines(rows))
    train = (dataset := formats.load(folder)).train
    assert list(train.texts) == ["x", "line break and more ?", "", "x"]
    assert train.labels.toarray().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [0] * 4, [0, 0, 0, 1]]
    assert dataset.notes == (
        "trn.json.gz: 1 empty texts (lines 3)",
        "trn.json.gz: 1 rows with unsorted label ids (lines 1)",
        "trn.json.gz: 1 repeated label ids merged (lines 1)",
        "trn.json.gz: 1 rows without labels, kept empty (lines 3)",
        "trn.json.gz: 1 entries of value 0 or less left out",
        "trn.json.gz: 1 entries of other values than 1 count as 1",
    )


def test_label_matrix_repairs(tmp_path):
    folder = write_lines_layout(tmp_path)
    write(folder / "trn_X_Y.txt", "4 4\n2:1.0 0:1 2:0.5\n1:1\n\n3 0:0 # 2:1\n\n")
    dataset = formats.load(folder)
    expected = [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    assert dataset.train.labels.toarray().tolist() == expected
    assert "trn_X_Y.txt: 1 rows with unsorted label ids (lines 2)" in dataset.notes
    assert "trn_X_Y.txt: 1 rows without labels, kept empty (lines 4)" in dataset.notes
    assert "trn_X_Y.txt: 1 entries of value 0 or less left out" in dataset.notes
    assert "trn_X_Y.txt: 1 entries of other values than 1 count as 1" in dataset.notes
    write(folder / "trn_X_Y.txt", "4 4\n2:1.0 0:0.3\n1:1\n\n3:0.5\n")  # all at once
    assert "trn_X_Y.txt: 2 entries of other values than 1 count as 1" in formats.load(folder).notes


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("trn_X_Y.txt", "0:1\n", r"trn_X_Y\.txt, line 1: found '0:1'; expected a header"),
        ("trn_X_Y.txt", "", r"trn_X_Y\.txt, line 1: found ''"),
        ("trn_X_Y.txt", "4 4\n0:1\n", r"trn_X_Y\.txt, line 2: found 1 rows; expected 4"),
        ("trn_X_Y.txt", "1 4\n0:1\n1:1\n", r"trn_X_Y\.txt, line 3: found 2 rows; expected 1"),
        ("trn_X_Y.txt", "4 4\n\n0:1\n1:x\n0:1\n", r"trn_X_Y\.txt, line 4: found '1:x'"),
        ("trn_X_Y.txt", "4 4\n0:1\n1:1:1\n\n\n", r"trn_X_Y\.txt, line 3: found '1:1:1'"),
        ("trn_X_Y.txt", "4 4\n0:1\n\n2:1 4:1\n\n", r"trn_X_Y\.txt, line 4: found label id 4"),
        ("trn_X_Y.txt", "4 5\n0:1\n\n2:1\n\n", r"trn_X_Y\.txt, line 1: found 5 labels; expected 4"),
        ("trn_X.txt", "a\nb\nc\n", r"trn_X\.txt, line 4: found 3 texts; expected 4"),
        ("trn_X.txt", "a\nb\nc\nd\ne\n", r"trn_X\.txt, line 5: found 5 texts; expected 4"),
        ("Y.txt", "", r"Y\.txt: found no labels"),
        ("trn_filter_labels.txt", "0 1\n4 1\n", r"labels\.txt, line 2: found pair \(4, 1\)"),
        ("trn_filter_labels.txt", "\n0 4\n", r"labels\.txt, line 2: found pair \(0, 4\)"),
        ("trn_filter_labels.txt", "0 1\n1\n", r"labels\.txt, line 2: found '1'"),
        ("trn_filter_labels.txt", "0 1\n1 a\n", r"labels\.txt, line 2: found '1 a'"),
        ("trn_filter_labels.txt", "0 1\n1 1.5\n", r"labels\.txt, line 2: found '1 1\.5'"),
    ],
)
def test_bad_lines_layout(tmp_path, name, content, expected):
    folder = write_lines_layout(tmp_path)
    write(folder / name, content)
    assert re.search(expected, error_of(folder))


def test_bad_npz(tmp_path):
    folder = write_lines_layout(tmp_path, npz=True)
    sparse.save_npz(folder / "Y.trn.npz", sparse.csr_matrix((4, 5)))
    assert "Y.trn.npz: found 5 labels; expected 4" in error_of(folder)
    whole = (folder / "Y.trn.npz").read_bytes()
    (folder / "Y.trn.npz").write_bytes(whole[: len(whole) // 2])
    assert "Y.trn.npz: found a file SciPy cannot read" in error_of(folder)


def test_trailing_blank_lines_and_windows_line_ends(tmp_path):
    folder = write_lines_layout(tmp_path)
    for name in ("trn_X.txt", "Y.txt", "trn_X_Y.txt", "trn_filter_labels.txt"):
        text = (folder / name).read_text().replace("\n", "\r\n")
        (folder / name).write_bytes((text + "\r\n").encode())
    (folder / "Y.txt").write_bytes(b"\xef\xbb\xbf" + (folder / "Y.txt").read_bytes())
    dataset = formats.load(folder)
    assert list(dataset.train.texts) == [text for text, _ in TRAIN]
    assert list(dataset.label_texts) == LABELS


def test_odd_bytes_are_read_as_cp1252(tmp_path):
    folder = write_lines_layout(tmp_path)
    texts = ["plain", "caf\xe9 \x85 next", "\xfcber", "d"]
    (folder / "trn_X.txt").write_bytes("\n".join(texts).encode("latin-1"))
    dataset = formats.load(folder)
    assert list(dataset.train.texts) == ["plain", "caf\xe9 \u2026 next", "\xfcber", "d"]
    note = "trn_X.txt, line 2: byte 0xe9 is not UTF-8, read as cp1252; 2 such lines in all"
    assert note in dataset.notes
    old = formats.load(folder, reading=Reading(version=1))
    assert old.train.texts[1] == "caf\xe9   next"
    assert "trn_X.txt: not utf-8, read as latin-1" in old.notes


def test_second_try_starts_afresh_on_disk(tmp_path):
    folder = write_json(tmp_path / "raw")
    rows = [json_row(title="x" * 50) for _ in range(3000)] + [json_row(title="caf\xe9")]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write(folder / "trn.json.gz", content.encode("latin-1"))
    old = Reading(version=1)
    dataset = formats.write_canonical(folder, tmp_path / "out", text="title", reading=old)
    assert len(dataset.train.texts) == 3001 and dataset.train.texts[3000] == "caf\xe9"
    assert dataset.train.texts[0] == "x" * 50


def test_json_without_labels_reads_the_matrix(tmp_path):
    folder = write_json(tmp_path)
    matrices = write_lines_layout(tmp_path / "other")
    write(folder / "trn.raw.json.gz", json_lines({"title": text} for text, _ in TRAIN))
    (folder / "trn.json.gz").unlink()
    assert "target_ind None" in error_of(folder)
    (matrices / "trn_X_Y.txt").rename(folder / "trn_X_Y.txt")
    assert formats.load(folder).train.labels.nnz == sum(len(labels) for _, labels in TRAIN)
    write(folder / "Yf.txt", "".join(f"{i}->{text}\n" for i, text in enumerate(LABELS)))
    (folder / "lbl.json.gz").unlink()
    assert list(formats.load(folder).label_texts) == LABELS
    content = (folder / "Yf.txt").read_text().encode()
    (folder / "Yf.txt").rename(folder / "Yf.txt.gz").write_bytes(gzip.compress(content))
    assert list(formats.load(folder).label_texts) == LABELS
    write(folder / "Yf.txt", "4 9\n0:1\n")  # that of a bag-of-words download
    assert "expected 'id->label text'" in error_of(folder)
    write(folder / "raw" / "lbl.json.gz", json_lines({"title": text} for text in LABELS))
    assert list(formats.load(folder).label_texts) == LABELS


@pytest.mark.parametrize("content", ["", "\n", " \n\n", "\ufeff0 1\n", "\ufeff0 1"])
def test_filter_files_without_pairs_or_with_a_mark(tmp_path, content):
    write(tmp_path / "filter.txt", content)
    pairs, _ = label_files.read_filter_pairs(tmp_path / "filter.txt", 2, 2)
    assert pairs.tolist() == ([[0, 1]] if "1" in content else [])


def test_bag_of_words_download_and_empty_folder(tmp_path):
    assert "an empty folder" in error_of(tmp_path)
    for name in ("train.txt", "test.txt", "Yf.txt"):
        write(tmp_path / name, "1 2 3\n")
    assert "bag-of-words download" in error_of(tmp_path)
    assert "no such file" in error_of(tmp_path / "nowhere")


def test_matrix_blocks_agree_with_lines(tmp_path, monkeypatch):
    """The fast parser equals the plain one, wherever blocks are cut."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 10**6, size=rng.integers(0, 9)) for _ in range(400)]
    lines = [" ".join(f"{i}:1.00000" for i in row) for row in rows]
    write(tmp_path / "m.txt", f"400 {10**6}\n" + "".join(line + "\n" for line in lines))
    expected = np.concatenate(rows)
    for size in (1 << 24, 997, 64):
        monkeypatch.setattr("xmc_jax.data.readers.raw_files._BLOCK_BYTES", size)
        raw = label_files.read_label_matrix(tmp_path / "m.txt")
        np.testing.assert_array_equal(raw.indices, expected)
        np.testing.assert_array_equal(np.diff(raw.indptr), [len(row) for row in rows])
    monkeypatch.setattr(label_files, "_parse_block", lambda block: None)
    np.testing.assert_array_equal(
        label_files.read_label_matrix(tmp_path / "m.txt").indices, expected
    )
