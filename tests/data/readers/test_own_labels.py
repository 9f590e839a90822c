"""The label file of own data: ids are understood or refused, and no label gets another's rows."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny
from layout_files import json_lines, write

from xmc_jax.data.readers import formats
from xmc_jax.data.readers.reading import Reading

TAGS = ["git", "sql", "css", "c, c++"]


def labels_of(folder, **reading) -> dict[str, set[str]]:
    """Text -> label texts, of both splits."""
    dataset = formats.load(folder, reading=Reading(**reading))
    return {
        text: {dataset.label_texts[i] for i in split.labels[row].indices}
        for split in (dataset.train, dataset.test)
        for row, text in enumerate(split.texts)
    }


def write_rows(folder, names, name="train.tsv"):
    """Row "about X" has label X, given as ``names[X]``."""
    lines = [f"about {tag} {i}\t{names[tag]}|{names['css']}\n" for i in range(5) for tag in TAGS]
    write(folder / name, "".join(lines))
    return {f"about {tag} {i}": {tag, "css"} for i in range(5) for tag in TAGS}


def numbered(first: int) -> dict[str, int]:
    return {tag: number for number, tag in enumerate(TAGS, first)}


CODES = {"git": "J45.0", "sql": "A00", "css": "Z99.1", "c, c++": "x/7"}
SHUFFLED = {"css": 2, "git": 0, "c, c++": 3, "sql": 1}
FILES = {
    "in order": ("{id}\t{tag}", numbered(0)),
    "another order": ("{id}\t{tag}", SHUFFLED),
    "from 1": ("{id}\t{tag}", numbered(1)),
    "far apart": ("{id}\t{tag}", {"sql": 70_001, "git": 5, "c, c++": 12, "css": 900}),
    "with zeros in front": ("{id:04d}\t{tag}", numbered(1)),
    "comma": ("{id},{tag}", SHUFFLED),
    "comma and quotes": ('{id},"{tag}"', SHUFFLED),
    "all in quotes": ('"{id}","{tag}"', SHUFFLED),
    "semicolon": ("{id};{tag}", SHUFFLED),
    "bar": ("{id} | {tag}", SHUFFLED),
    "id last": ("{tag}\t{id}", SHUFFLED),
    "id last, comma": ('"{tag}",{id}', SHUFFLED),
    "a list": ("{id}. {tag}", numbered(1)),
    "blanks": ("{id} {tag}", numbered(0)),
    "arrows": ("{id}->{tag}", SHUFFLED),
    "codes": ("{id}\t{tag}", CODES),
    "codes, comma": ('{id},"{tag}"', CODES),
}


HEADERS = ("id{}label", "Code{}Name", "kennung{}begriff")  # nothing tells the last from a code
CASES = [
    *((kind, "") for kind in FILES),
    *((kind, header) for kind in list(FILES)[:10] for header in HEADERS),
    *((kind, header) for kind in ("codes", "codes, comma") for header in HEADERS[:2]),
]


@pytest.mark.parametrize(("kind", "header"), CASES)
def test_an_id_column_is_understood(tmp_path, kind, header):
    line, ids = FILES[kind]
    mark = next((mark for mark in "\t,;|" if mark in line), None)
    rows = [line.format(id=number, tag=tag) for tag, number in ids.items()]
    rows = [header.format(mark), *rows] if header else rows
    write(tmp_path / "labels.txt", "\n".join(rows) + "\n\n")
    expected = write_rows(tmp_path, ids)
    assert labels_of(tmp_path) == expected
    assert list(formats.load(tmp_path).label_texts) == list(ids)  # nothing of ids or header
    assert labels_of(tmp_path / "train.tsv") == expected
    texts = {tag: tag for tag in TAGS}
    assert labels_of_texts(tmp_path, texts) == expected  # the rows may also give the texts


def labels_of_texts(folder, texts):
    write_rows(folder, texts)
    return labels_of(folder)


def test_ids_of_json_lines(tmp_path):
    for ids in (SHUFFLED, CODES):
        rows = [{"id": number, "text": tag} for tag, number in ids.items()]
        write(tmp_path / "labels.jsonl", json_lines(rows))
        expected = write_rows(tmp_path, ids)
        assert labels_of(tmp_path) == expected
        data = [{"text": f"t {tag} {i}", "labels": [ids[tag]]} for tag in TAGS for i in range(4)]
        write(tmp_path / "two" / "train.jsonl", json_lines(data))
        write(tmp_path / "two" / "labels.jsonl", json_lines(rows))
        assert labels_of(tmp_path / "two") == {
            row["text"]: {row["text"].split(" ", 1)[1].rsplit(" ", 1)[0]} for row in data
        }


@pytest.mark.parametrize("header", ["label", "Labels", "name", "category", "text"])
@pytest.mark.parametrize("by", ["ids", "texts"])
def test_a_header_is_no_label(tmp_path, header, by):
    write(tmp_path / "labels.txt", "\n".join([header, *TAGS]))
    names = numbered(0) if by == "ids" else {tag: tag for tag in TAGS}
    expected = write_rows(tmp_path, names)
    assert labels_of(tmp_path) == expected
    dataset = formats.load(tmp_path)
    assert list(dataset.label_texts) == TAGS
    assert f"labels.txt: line 1 ({header}) is taken for a header" in dataset.notes


def test_a_word_of_headers_that_is_a_label(tmp_path):
    labels = ["name", *TAGS]
    write(tmp_path / "labels.txt", "\n".join(labels))
    write(tmp_path / "train.tsv", "".join(f"t{i}\t{i % 5}\n" for i in range(20)))  # all five lines
    assert list(formats.load(tmp_path).label_texts) == labels
    write(tmp_path / "train.tsv", "".join(f"t{i}\tname|git\n" for i in range(20)))
    assert list(formats.load(tmp_path).label_texts) == labels
    write(tmp_path / "train.tsv", "".join(f"t{i}\t{i % 4 + 1}\n" for i in range(20)))
    with pytest.raises(formats.DataError, match=r"labels\.txt, line 1: found 'name', a label or a"):
        formats.load(tmp_path)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["1 star", "2 stars", "3 stars", "4 stars"], [0, 1, 2, 3]),
        (["1 star", "2 stars", "3 stars", "4 stars"], ["1 star", "4 stars"]),
        (["0 errors", "1 error", "2 errors", "3 errors"], [0, 1, 2, 3]),
        (["Paris, France", "Rome, Italy", "Nice, France"], [0, 1, 2]),
        (["2,4-D", "1,2-dichloroethane", "toluene"], [0, 1, 2]),
        (["git\tversions", "sql\tqueries", "css\tstyles"], [0, 1, 2]),
        (["12 angry men", "2001", "8 1/2"], [0, 1, 2]),
        (["1,5", "2,5", "3,5"], ["1,5", "3,5"]),
        (["J45.0\tasthma", "A00\tcholera"], [0, 1]),
    ],
)
def test_label_texts_with_numbers_stay_as_they_are(tmp_path, labels, names):
    write(tmp_path / "labels.txt", "\n".join(labels))
    rows = [(f"t{i}", names[i % len(names)]) for i in range(20)]
    write(tmp_path / "train.tsv", "".join(f"{text}\t{name}\n" for text, name in rows))
    expected = {text: {labels[name] if isinstance(name, int) else name} for text, name in rows}
    assert labels_of(tmp_path) == expected
    assert list(formats.load(tmp_path).label_texts) == labels


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        (
            "1\tgit\n2\tsql\n",
            "0|1",
            r"train\.tsv, line 1: found label '0'; .* or id of labels\.txt",
        ),
        ("0\tgit\n0\tsql\n", "0", r"labels\.txt, line 2: found id 0 a second time; .*each id once"),
        ("A1\tgit\nA1\tsql\n", "A1", r"labels\.txt, line 2: found id A1 a second time"),
        (
            "".join(f"{i}\tl{i}\n" for i in range(12)) + "12 l12\n",
            "0|12",
            r"line 13: found '12 l12'",
        ),
        ("".join(f"{i},l{i}\n" for i in range(12)) + "12,\n", "0|12", r"line 13: found '12,'"),
        ("id\tname\tparent\n0\tgit\t7\n", "0", r"line 1: found columns named id, name, parent"),
        (
            "git\nsql\ncss\n",
            "1|2|3",
            r"line 1: found label id 3, and no id 0: these ids count from",
        ),
        ("git\nsql\n", "9" * 31, r"line 1: found label id 9{31}; expected ids from 0 to 1"),
        ("git\nsql\n", "9" * 5000, r"line 1: found label id 9{60}; expected ids from 0 to 1"),
        (
            "0\tgit\n1\tsql\n",
            "9" * 5000,
            r"line 1: found label '9{59}; expected a label text or id",
        ),
    ],
)
def test_ids_that_do_not_fit_are_refused(tmp_path, labels, names, expected):
    write(tmp_path / "labels.txt", labels)
    write(tmp_path / "train.tsv", "".join(f"t{i}\t{names}\n" for i in range(9)))
    with pytest.raises(formats.DataError, match=expected):
        formats.load(tmp_path)


@pytest.mark.parametrize(("name", "ids"), [("train.tsv", "1|2"), ("train.jsonl", [1, 2])])
def test_ids_that_may_count_from_1_are_named(tmp_path, caplog, name, ids):
    """The last label has no row, so nothing is out of range; nothing is shifted."""
    write(tmp_path / "labels.txt", "git\nsql\ncss\n")
    rows = [f"t{i}\t{ids}\n" for i in range(9)]
    if name.endswith("jsonl"):
        rows = [json.dumps({"text": f"t{i}", "labels": ids}) + "\n" for i in range(9)]
    write(tmp_path / name, "".join(rows))
    dataset = formats.load(tmp_path)
    expected = (
        "labels.txt: no row has id 0 ('git'), so it is a label without rows, or the ids count from "
        "1 and every label is wrong. They were read as counting from 0: id 1 is line 2 ('sql'). If "
        "that is wrong: Write each label as ID<TAB>TEXT"
    )
    assert any(note.startswith(expected) for note in dataset.notes) and expected in caplog.text
    assert labels_of(tmp_path)["t0"] == {"sql", "css"}
    caplog.clear()
    write(tmp_path / "labels.txt", "1\tgit\n2\tsql\n3\tcss\n")  # as it says
    assert labels_of(tmp_path)["t0"] == {"git", "sql"} and not caplog.text


@pytest.mark.parametrize(
    "lines", [["label", *TAGS], [f"{i}\t{tag}" for tag, i in SHUFFLED.items()]]
)
def test_runs_begun_by_commit_6654296_keep_their_labels(tmp_path, lines):
    write(tmp_path / "labels.txt", "\n".join(lines))
    write_rows(tmp_path, numbered(0))
    old = formats.load(tmp_path, reading=Reading(version=1))
    assert list(old.label_texts) == lines
    assert labels_of(tmp_path, version=1)["about sql 0"] == {lines[1], lines[2]}  # lines from 0


@pytest.mark.parametrize("ids", [(7, 8, 9), ("A1", "a1", "B2")])
@pytest.mark.parametrize("by", ["ids", "texts"])
def test_merged_labels_with_ids(tmp_path, ids, by):
    write(tmp_path / "labels.txt", "{}\tgit\n{}\tGit\n{}\tcss\n".format(*ids))
    one, twin, other = ids if by == "ids" else ("GIT", "giT", "Css")
    write(tmp_path / "train.tsv", f"x\t{one}|{other}\ny\t{twin}\nz\t{other}\n" * 5)
    found = labels_of(tmp_path, merge_labels=True)
    assert found == {"x": {"git", "css"}, "y": {"git"}, "z": {"css"}}


def test_no_negative_id_becomes_a_label_by_merging(tmp_path):
    write(tmp_path / "labels.txt", "git\nGit\n")
    write(tmp_path / "train.jsonl", json_lines({"text": f"t{i}", "labels": [-1]} for i in range(9)))
    with pytest.raises(
        formats.DataError, match=r"train\.jsonl, line 1: found label id -1 in row 0"
    ):
        labels_of(tmp_path, merge_labels=True)


def test_through_the_binary(tmp_path):
    write(tmp_path / "mine" / "labels.txt", "1\tgit\n0\tsql\n")
    rows = [(f"t{i}", i % 2) for i in range(40)]
    write(tmp_path / "mine" / "train.tsv", "".join(f"{text}\t{label}\n" for text, label in rows))
    done = tiny.run("prepare", f"--input={tmp_path / 'mine'}", f"--output={tmp_path / 'made'}")
    assert done.returncode == 0, done.stderr
    assert "labels.txt: each line has an id and a label" in done.stdout
    assert (tmp_path / "made" / "labels.txt").read_text() == "git\nsql\n"
    made = formats.load(tmp_path / "made")
    expected = {text: ["sql", "git"][label] for text, label in rows}
    for split in (made.train, made.test):
        found = [made.label_texts[i] for i in split.labels.indices]
        assert found == [expected[text] for text in split.texts]
    assert json.loads((tmp_path / "made" / "dataset.json").read_text())["num_labels"] == 2
    assert np.diff(made.train.labels.indptr).tolist() == [1] * 32
