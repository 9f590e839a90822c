"""Damaged and hostile raw files: one error with the file and its place, soon, and nothing left."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time

import numpy as np
import pytest
import tiny
from layout_files import json_lines, write, write_json, write_lines_layout
from scipy import sparse

from xmc_jax.data.readers import formats
from xmc_jax.data.readers.decoding import Decoder


def refused(folder, expected: str) -> None:
    with pytest.raises(formats.DataError, match=expected):
        formats.load(folder)


def row(**changes):
    return {"title": "x", "target_ind": [0], **changes}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (row(target_rel=1), r"target_rel 1; expected a list of numbers"),
        (row(target_rel=0), r"target_rel 0; expected a list of numbers"),
        (row(target_rel=True), r"target_rel True; expected"),
        (row(target_rel=[True]), r"target_rel \[True\]; expected"),
        (row(target_rel=["1"]), r"target_rel \['1'\]; expected"),
        (row(target_rel=[float("nan")]), r"target_rel \[nan\]; expected a list of numbers"),
        (row(target_rel={"0": 1}), r"target_rel \{'0': 1\}; expected"),
        (row(target_ind=[True]), r"target_ind \[True\]; expected a list of label ids"),
        (row(target_ind=[0.9]), r"target_ind \[0\.9\]; expected"),
        (row(target_ind=[1.0]), r"target_ind \[1\.0\]; expected"),
        (row(target_ind=0), r"target_ind 0; expected"),
        (row(target_ind="0"), r"target_ind '0'; expected"),
        (row(target_ind={"0": 1}), r"target_ind \{'0': 1\}; expected"),
        (row(target_ind=[10**30]), r"target_ind \[10{30}\]; expected"),
        (row(content=3), r"content 3; expected a string"),
    ],
)
def test_values_of_json_rows(tmp_path, changed, expected):
    folder = write_json(tmp_path)
    write(folder / "trn.json.gz", json_lines([row(), changed]))
    with pytest.raises(formats.DataError, match=rf"trn\.json\.gz, line 2: found {expected}"):
        formats.load(folder, text="title+content")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"title": "x", "target_ind": ' + "[" * 100_000,
        '{"title": ' + "9" * 5000 + "}",
    ],
    ids=["nested", "nested value", "long number"],
)
def test_json_that_would_break_the_reader(tmp_path, text):
    folder = write_json(tmp_path / "public")
    write(folder / "trn.json.gz", f"{json.dumps(row())}\n{text}\n")
    refused(folder, r"trn\.json\.gz, line 2: found '.*; expected one JSON object a line")
    for name in ("train", "labels"):
        write(tmp_path / "own" / "train.jsonl", '{"text": "a", "labels": ["b"]}\n')
        write(tmp_path / "own" / f"{name}.jsonl", f"{text}\n")
        refused(tmp_path / "own", rf"{name}\.jsonl, line 1: found '")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("4 4\n0_1:1\n\n\n\n", r"line 2: found '0_1:1'; expected 'id:value' with a whole number"),
        ("4 4\n0:1_0\n\n\n\n", r"line 2: found '0:1_0'"),
        ("4 4\n0:nan\n\n\n\n", r"line 2: found '0:nan'; .* a number behind it"),
        ("4 4\n0:1 # x\n1:NaN\n\n\n", r"line 3: found '1:NaN'"),
        ("4 4\n0.9:1\n\n\n\n", r"line 2: found '0\.9:1'"),
        (f"4 4\n{'9' * 31}:1\n\n\n\n", r"line 2: found '9{31}:1'"),
        (f"4 4\n{'9' * 5000}:1\n\n\n\n", r"line 2: found '9{60}'"),
        (f"4 {'9' * 5000}\n0:1\n", r"line 1: found '4 9{58}'; expected a header"),
        ("4_0 4\n0:1\n", r"line 1: found '4_0 4'; expected a header"),
        ("-4 4\n", r"line 1: found '-4 4'"),
    ],
)
def test_numbers_of_text_matrices(tmp_path, content, expected):
    folder = write_lines_layout(tmp_path)
    write(folder / "trn_X_Y.txt", content)
    refused(folder, rf"trn_X_Y\.txt, {expected}")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (f"{'9' * 31} 1", "'9{31} 1'"),
        (f"1 {'9' * 5000}", "'1 9{58}'"),
        ("1 0_1", "'1 0_1'"),
        ("1 0.9", r"'1 0\.9'"),
        ("1 inf", "'1 inf'"),
        ("1 99999999999", r"pair \(1, 99999999999\)"),
    ],
)
def test_numbers_of_filter_files(tmp_path, line, found):
    folder = write_lines_layout(tmp_path)
    write(folder / "trn_filter_labels.txt", f"0 1\n{line}\n")
    refused(folder, rf"trn_filter_labels\.txt, line 2: found {found}; expected")


def arrays(path, **changes):
    """A matrix as SciPy writes it, some of whose arrays are changed; None = missing."""
    matrix = sparse.csr_matrix(np.eye(4))
    made = {
        "indices": matrix.indices,
        "indptr": matrix.indptr,
        "format": np.array(b"csr"),
        "shape": np.array([4, 4]),
        "data": matrix.data,
        **changes,
    }
    np.savez(path, **{name: array for name, array in made.items() if array is not None})


COO = {"format": np.array(b"coo"), "indices": None, "indptr": None}
BAD_ARRAYS = {
    "shape nan": dict(shape=np.array([np.nan, 4])),
    "shape of one": dict(shape=np.array([4])),
    "shape text": dict(shape=np.array(["4", "4"])),
    "no data": dict(data=None),
    "no shape": dict(shape=None),
    "no format": dict(format=None),
    "unknown format": dict(format=np.array(b"lil")),
    "values nan": dict(data=np.array([1, np.nan, 1, 1])),
    "text": dict(data=np.array(["a", "b", "c", "d"])),
    "complex": dict(data=np.ones(4, complex)),
    "objects": dict(data=np.array([{}, {}, {}, {}])),
    "ids 0.9": dict(indices=np.array([0, 0.9, 2, 3])),
    "ids nan": dict(indices=np.array([0, np.nan, 2, 3])),
    "pointers go down": dict(indptr=np.array([0, 3, 1, 3, 4])),
    "too few pointers": dict(indptr=np.array([0, 4])),
    "csc out of range": dict(format=np.array(b"csc"), indices=np.array([0, 9, 2, 3])),
    "coo out of range": dict(COO, row=np.array([0, 9, 2, 3]), col=np.arange(4)),
    "coo below 0": dict(COO, row=np.array([0, -1, 2, 3]), col=np.arange(4)),
    "more entries than cells": dict(data=np.ones(17), indices=np.zeros(17, np.int32)),
}


@pytest.mark.parametrize("kind", BAD_ARRAYS)
def test_arrays_of_an_npz(tmp_path, kind):
    folder = write_lines_layout(tmp_path, npz=True)
    arrays(folder / "Y.trn.npz", **BAD_ARRAYS[kind])
    refused(folder, r"Y\.trn\.npz: found a file SciPy cannot read \(.+\); expected a sparse matrix")


def test_files_that_are_no_npz(tmp_path):
    folder = write_lines_layout(tmp_path, npz=True)
    whole = (folder / "Y.trn.npz").read_bytes()
    np.save(tmp_path / "an.npy", np.eye(4))
    for content in ((tmp_path / "an.npy").read_bytes(), b"", b"PK\3\4", whole[:-9], b"4 4\n0:1\n"):
        (folder / "Y.trn.npz").write_bytes(content)
        refused(folder, r"Y\.trn\.npz: found a file SciPy cannot read")
    damaged = bytearray(whole)
    damaged[100:140] = bytes(40)
    (folder / "Y.trn.npz").write_bytes(damaged)
    refused(folder, r"Y\.trn\.npz: found a file SciPy cannot read")


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "bsr", "dia"])
@pytest.mark.parametrize("make", [sparse.csr_matrix, sparse.csr_array])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, bool])
def test_every_sparse_format_is_read(tmp_path, kind, make, dtype):
    folder = write_lines_layout(tmp_path, npz=True)
    expected = formats.load(folder).train.labels.toarray()
    sparse.save_npz(folder / "Y.trn.npz", make(expected.astype(dtype)).asformat(kind))
    np.testing.assert_array_equal(formats.load(folder).train.labels.toarray(), expected)


def test_an_npz_with_millions_of_entries_for_a_few_cells(tmp_path):
    folder = write_lines_layout(tmp_path, npz=True)
    number = 60_000_000
    zeros = np.zeros(number, np.int8)
    pointers = np.array([0, number, number, number, number])
    np.savez_compressed(
        folder / "Y.trn.npz",
        data=zeros,
        indices=zeros,
        indptr=pointers,
        shape=np.array([4, 4]),
        format=np.array(b"csr"),
    )
    begun = time.perf_counter()
    refused(folder, r"Y\.trn\.npz: .*60000000 entries for 4 x 4 cells")
    assert time.perf_counter() - begun < 1  # its values are not read


def test_a_blank_last_line_of_arrows(tmp_path):
    folder = write_json(tmp_path)
    (folder / "lbl.json.gz").unlink()
    write(folder / "Yf.txt", "0->apple\n1->pear\n2->fruit\n3->never used\n\n  \n")
    labels = formats.load(folder).label_texts
    assert labels[:4] == ["apple", "pear", "fruit", "never used"]


@pytest.mark.parametrize("name", ["trn_X.txt", "Y.txt", "trn_X_Y.txt", "trn_filter_labels.txt"])
def test_damaged_gzip_files(tmp_path, name):
    folder = write_lines_layout(tmp_path)
    whole = gzip.compress((folder / name).read_bytes() * 50)
    (folder / name).unlink()
    for place, content in {
        "first byte": b"\0" + whole[1:],
        "header": whole[:2] + b"\xff" * 6 + whole[8:],
        "middle": whole[:20] + b"\xff" * 9 + whole[29:],
        "checksum": whole[:-8] + bytes(8),
        "cut": whole[: len(whole) // 2],
        "end": whole + b"garbage",
        "two bytes": whole[:2],
    }.items():
        (folder / f"{name}.gz").write_bytes(content)
        with pytest.raises(
            formats.DataError, match=rf"{name}\.gz.*: found .*(gzip|compressed).*; expected"
        ) as error:
            formats.load(folder)
        assert "UnicodeDecode" not in str(error.value), place


def test_a_file_that_lost_its_compression_is_read(tmp_path):
    folder = write_json(tmp_path)
    expected = formats.load(folder).digest
    (folder / "trn.json.gz").write_bytes(gzip.decompress((folder / "trn.json.gz").read_bytes()))
    assert formats.load(folder).digest == expected


@pytest.mark.parametrize(
    ("start", "found"),
    [
        (b"PK\3\4", "a zip file"),
        (b"\xfd7zXZ\0", "an xz file"),
        (b"PAR1\x15", "a Parquet file"),
        (
            gzip.compress(gzip.compress(b"a\tb\n", mtime=0), mtime=0),
            "a gzip file within a gzip file",
        ),
        (
            gzip.compress(b"PK\3\4", mtime=0),
            r"a zip file \(a spreadsheet is one\) within a gzip file",
        ),
        (
            gzip.compress(b"a.tsv" + bytes(252) + b"ustar", mtime=0),
            "a tar archive within a gzip file",
        ),
    ],
)
@pytest.mark.parametrize("name", ["train.tsv", "train.csv", "train.jsonl", "labels.txt"])
def test_other_formats_under_the_name_of_a_text_file(tmp_path, name, start, found):
    write(tmp_path / "train.tsv", "a\tb\n")
    write(tmp_path / name, start + bytes(range(256)))
    if name != "labels.txt" and name != "train.tsv":
        (tmp_path / "train.tsv").unlink()
    refused(tmp_path, rf"{name}: found {found}.*; expected text")


@pytest.fixture
def canonical(tmp_path):
    formats.save(formats.load(write_json(tmp_path / "raw")), tmp_path / "made")
    return tmp_path / "made"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (dict(name=None), "found name = None; expected a str"),
        (dict(digest=3), "found digest = 3; expected a str"),
        (dict(notes="x"), "found notes = 'x'; expected a list"),
        (dict(files=[]), r"found files = \[\]; expected a dict"),
        (dict(files={}), "found files without labels.txt, labels_offsets.npy, test.txt"),
        (dict(format_version=None), "found format version None; expected version 1"),
    ],
)
def test_keys_of_a_description(canonical, change, expected):
    path = canonical / "dataset.json"
    description = json.loads(path.read_text())
    path.write_text(json.dumps({**description, **change}))
    refused(canonical, r"dataset\.json: found a description that cannot be read .*changed since")
    del description["crc32"]  # as if it had been written so
    path.write_text(json.dumps({**description, **change}))
    refused(canonical, rf"dataset\.json: {expected}")
    (key,) = change
    path.write_text(json.dumps({name: x for name, x in description.items() if name != key}))
    refused(canonical, rf"dataset\.json: found .*{key}")
    for text in ("[]", "3", "{", "[" * 100_000, "", "\0"):
        path.write_text(text)
        refused(canonical, r"dataset\.json: found a description that cannot be read")


@pytest.mark.parametrize("name", ["train_labels.npz", "test_offsets.npy", "train_filter.npy"])
def test_arrays_of_a_canonical_form(canonical, name):
    path = canonical / name
    path.write_bytes(bytes(path.stat().st_size))
    refused(canonical, rf"{name}: found other bytes than were written")
    description = json.loads((canonical / "dataset.json").read_text())
    del description["crc32"]  # earlier versions wrote no checksums
    sizes = {name: entry[0] for name, entry in description["files"].items()}
    (canonical / "dataset.json").write_text(json.dumps({**description, "files": sizes}))
    refused(canonical, rf"{name}: found an array that cannot be read .*; expected one as it was")


def odd(path, kind):
    if kind == "link":
        path.symlink_to("nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir(parents=True)


FOUND = {"link": "a link to nowhere, which is not there", "pipe": "a pipe", "folder": "a folder"}


@pytest.mark.parametrize("kind", FOUND)
@pytest.mark.parametrize(
    "name",
    ["test.tsv", "test.csv.gz", "labels.txt", "labels.jsonl", "filter_labels_train.txt"],
)
def test_siblings_that_are_no_files(tmp_path, kind, name):
    write(tmp_path / "train.tsv", "a\tb|c\n" * 9)
    odd(tmp_path / name, kind)
    refused(tmp_path, rf"{name}: found {FOUND[kind]}; expected a file\. Put the file there, or")
    if name.startswith("labels"):
        refused(tmp_path / "train.tsv", rf"{name}: found {FOUND[kind]}; expected a file")


@pytest.mark.parametrize("kind", FOUND)
@pytest.mark.parametrize(
    "name", ["trn_X.txt", "Y.txt", "tst_X_Y.txt", "tst_filter_labels.txt", "Y.trn.npz", "train.tsv"]
)
def test_files_of_public_layouts_that_are_no_files(tmp_path, kind, name):
    folder = write_lines_layout(tmp_path) if name != "train.tsv" else tmp_path
    (folder / name).unlink(missing_ok=True)
    odd(folder / name, kind)
    if name == "Y.trn.npz":  # the text matrix is there and comes first
        assert formats.load(folder).train.labels.nnz
    else:
        refused(folder, rf"{name}: found {FOUND[kind]}; expected a file")


def test_a_folder_that_hinders_no_one(tmp_path):
    folder = write_json(tmp_path)
    (folder / "labels.txt").mkdir()  # a name of another layout
    (folder / "raw").mkdir()
    assert len(formats.load(folder).train) == 4


def test_a_folder_called_like_a_bundled_set_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XMC_DATA", raising=False)
    for name in ("wordnet-mini", "LF-WordNetTitles-Mini"):
        write(tmp_path / name / "mine.tsv", "a\tb|c\n" * 9)
        with pytest.raises(formats.DataError, match=rf"{name}: found only mine\.tsv"):
            formats.find_folder(name)
        with pytest.raises(formats.DataError, match=rf"{name}: found only mine\.tsv"):
            formats.find_folder(name, str(tmp_path / name))
        (tmp_path / name / "mine.tsv").rename(tmp_path / name / "train.tsv")
        assert formats.find_folder(name).absolute() == tmp_path / name
        done = tiny.run("prepare", f"--input={tmp_path / name}")
        assert done.returncode == 0 and "training rows 9 " in done.stdout
    os.mkfifo(tmp_path / "pipe.tsv")
    done = tiny.run("prepare", f"--input={tmp_path / 'pipe.tsv'}")
    assert done.returncode == 1 and "pipe.tsv: found a pipe; expected" in done.stderr
    done = tiny.run("prepare", "--input=~nobody-of-this-name/x.tsv")
    assert done.returncode == 1 and "no data for '~nobody-of-this-name/x.tsv'" in done.stderr


def test_a_thousand_equal_errors(tmp_path):
    lines = ["a\tb", *["no labels"] * 1000, "x\ty\tz"]
    write(tmp_path / "mine.tsv", "\n".join(lines))
    done = tiny.run("prepare", f"--input={tmp_path / 'mine.tsv'}")
    assert done.returncode == 1
    shown = done.stderr.splitlines()[-6:]
    assert shown[1].startswith("1,001 bad rows:") or shown[0].startswith("1,001 bad rows:")
    assert done.stderr.count("mine.tsv, line ") == 3 and len(done.stderr) < 2000


@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_a_pipe_is_opened_once(tmp_path, pack):
    os.mkfifo(tmp_path / "pipe")
    text = "".join(f"line {i}\n" for i in range(20_000))
    writing = (tmp_path / "pipe").write_bytes
    writer = threading.Thread(target=writing, args=[pack(text.encode())], daemon=True)
    writer.start()
    assert list(Decoder(tmp_path / "pipe").lines()) == text.splitlines()
    writer.join()


def test_rows_without_labels_beside_a_label_file(tmp_path):
    rows = [json.dumps({"text": f"text {i}", "y": [i % 3]}) for i in range(9)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "labels.txt").write_text("a\nb\nc\n")
    refused(tmp_path, r"train\.jsonl: found no row with labels, but .*y.*--label_column=NAME")
