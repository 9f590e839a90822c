"""Files as people bring them: separators, lists, headers, encodings, quotes, twins."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

import pytest
from layout_files import write

from xmc_jax.data.readers import formats
from xmc_jax.data.readers.reading import Reading
from xmc_jax.data.texts import clean

LABELS = ["sql", "css", "git", "java script", "python", "docker"]
WORDS = "how do i join center list table window file undo merge print remove folder".split()


def made(count: int = 60, most: int = 3) -> list[tuple[str, list[str]]]:
    """Texts that differ, with one to ``most`` labels."""
    rng = random.Random(0)
    draw = lambda: rng.sample(LABELS, rng.randint(1, most))
    return [(f"{' '.join(rng.sample(WORDS, 6))} {i}", draw()) for i in range(count)]


ROWS = made()


def pairs(dataset) -> set[tuple[str, str]]:
    """Pairs of a text and a label."""
    return {
        (text, dataset.label_texts[i])
        for split in (dataset.train, dataset.test)
        for row, text in enumerate(split.texts)
        for i in split.labels[row].indices
    }


EXPECTED = {(text, label) for text, labels in ROWS for label in labels}


def load(path, content, **flags):
    write(path, content)
    return formats.load(path, reading=Reading.of(flags))


def refused(path, content, **flags) -> str:
    with pytest.raises(formats.DataError) as error:
        load(path, content, **flags)
    return str(error.value)


def tsv(join=lambda labels: "|".join(labels), header="", rows=ROWS) -> str:
    return header + "".join(f"{text}\t{join(labels)}\n" for text, labels in rows)


def csv_(join) -> str:
    quoted = lambda cell: '"' + cell.replace('"', '""') + '"'
    return "".join(f"{text},{quoted(join(labels))}\n" for text, labels in ROWS)


def jsonl(text="text", labels="labels", join=lambda labels: labels) -> str:
    return "".join(json.dumps({text: t, labels: join(ls)}) + "\n" for t, ls in ROWS)


MARKS = [", ", ",", " ,", "; ", ";", " / ", "/", "、", "\uff0c", " > ", " - ", "·", "#"]


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl", "jsonl list"])
def test_a_separator_that_was_not_named_is_refused_with_the_flag_that_reads_it(
    tmp_path, mark, kind
):
    path = tmp_path / f"mine.{kind.split()[0]}"
    content = {
        "tsv": lambda: tsv(mark.join),
        "csv": lambda: csv_(mark.join),
        "jsonl": lambda: jsonl(join=mark.join),
        "jsonl list": lambda: jsonl(join=lambda labels: [mark.join(labels)]),
    }[kind]()
    message = refused(path, content)
    assert f"{path}, line 1: found label" in message and "--separator='|'" in message
    flag = re.search(r"--separator=(?:'([^']+)'|([^ ;]+))", message)
    assert pairs(load(path, content, separator=flag[1] or flag[2])) == EXPECTED
    kept = load(path, content, separator="|")
    assert len(kept.label_texts) == len({mark.join(labels).strip() for _, labels in ROWS})


def test_a_separator_is_seen_in_all_files_together(tmp_path):
    """In each alone no part recurs; one never does."""
    train = ["red apple > old apple", "small river > loud river", "new castle > old castle"]
    test = ["old apple > small river", "loud river > red apple", "new castle"]
    for name, cells in (("train.tsv", train), ("test.tsv", test)):
        write(tmp_path / name, "".join(f"{name} {cell}\t{cell}\n" for cell in cells))
    with pytest.raises(formats.DataError, match=r"train\.tsv, line 1: .* --separator=' > '"):
        formats.load(tmp_path)
    (tmp_path / "test.tsv").unlink()
    assert len(formats.load(tmp_path / "train.tsv").label_texts) == len(train)


@pytest.mark.parametrize(
    "join",
    [
        json.dumps,
        str,
        lambda labels: f"[{' '.join(map(repr, labels))}]",  # an array of NumPy
        lambda labels: f"({', '.join(map(repr, labels))},)",
        lambda labels: "{" + ", ".join(f'"{label}"' for label in labels) + "}",
        lambda labels: "".join(f"<{label}>" for label in labels),
        lambda labels: ", ".join(f"<{label}>" for label in labels),
        "|".join,
        "||".join,
        " | ".join,
    ],
)
@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl"])
def test_lists_and_tags_in_a_cell(tmp_path, join, kind):
    content = {"tsv": tsv, "csv": csv_, "jsonl": lambda join: jsonl(join=join)}[kind](join)
    dataset = load(tmp_path / f"mine.{kind}", content)
    assert pairs(dataset) == EXPECTED
    assert len(dataset.label_texts) == len(LABELS)


def test_braces_of_a_database_are_read_with_the_separator(tmp_path):
    content = tsv(lambda labels: "{" + ",".join(labels) + "}")
    assert "--separator=," in refused(tmp_path / "a.tsv", content)
    assert pairs(load(tmp_path / "a.tsv", content, separator=",")) == EXPECTED


@pytest.mark.parametrize("unseen", ["\u200b", "\ufeff \u00ad", "\u2060\ufe0f"])
def test_texts_of_which_nothing_is_seen_are_blank(tmp_path, unseen):
    """So they never go to test; labels of old runs stay as they were."""
    content = "".join(f"{text}\t{label}\n" for text, label in sorted(EXPECTED))
    blank = "".join(f"{unseen}\t{label}\n" for label in LABELS)
    dataset = load(tmp_path / "a.tsv", content + blank)
    assert [*dataset.train.texts].count("") > 0 and "" not in [*dataset.test.texts]
    assert unseen in [*load(tmp_path / "a.tsv", content + blank, version=1).train.texts]


def test_line_breaks_in_a_cell_of_csv_separate(tmp_path):
    assert pairs(load(tmp_path / "a.csv", csv_("\n".join))) == EXPECTED


@pytest.mark.parametrize(
    "labels",
    [
        ["London, England", "Paris, France", "Rome, Italy"],  # parts that are no other label's
        ["health and beauty", "toys and games", "health", "beauty"],  # a blank is no reason
        ["c", "c++", "c#", "f#"],
        ["asp.net", "asp", "net", "node.js"],
        ["e-mail", "e-book", "mail", "book"],
    ],
)
def test_one_label_a_point_passes(tmp_path, labels):
    rows = [(text, labels[i % len(labels)]) for i, (text, _) in enumerate(ROWS)]
    dataset = load(tmp_path / "a.tsv", "".join(f"{text}\t{label}\n" for text, label in rows))
    assert pairs(dataset) == set(rows)


@pytest.fixture(scope="module")
def real(mini_folder) -> dict[str, list[tuple[str, list[str]]]]:
    """Points of the bundled data, and of a cut of the set that they are a part of."""
    mini = formats.load(mini_folder)
    labels = [[mini.label_texts[i] for i in row.indices] for row in mini.train.labels]
    cut = (Path(__file__).parent / "wordnet" / "points.tsv").read_text(encoding="utf-8")
    fields = [line.split("\t") for line in cut.splitlines()]
    return {
        "mini": list(zip(mini.train.texts, labels)),
        "wordnet": [(text, cell.split("|")) for text, cell in fields],
    }


@pytest.mark.parametrize("count", [5, 20, 100, 400])
@pytest.mark.parametrize("form", ["first", "any", "long", "shuffled"])
@pytest.mark.parametrize("source", ["mini", "wordnet"])
def test_cuts_of_real_data_with_one_label_a_point_pass(tmp_path, real, source, form, count):
    """Labels of several words, with commas and colons; also rows of one text in the long form."""
    rng = random.Random(count)
    cut = []
    for text, labels in rng.sample(real[source], count):
        if form in ("first", "any") and labels:
            labels = [labels[0] if form == "first" else rng.choice(labels)]
        cut += [(text, label) for label in labels]
    if form == "shuffled":
        rng.shuffle(cut)
    dataset = load(tmp_path / "a.tsv", "".join(f"{text}\t{label}\n" for text, label in cut))
    reverse = sum("reverse" in note for note in dataset.notes)
    assert reverse and set(dataset.label_texts) == {label for _, label in cut}
    assert pairs(dataset) <= set(cut)


@pytest.mark.parametrize("join", ["|".join, ", ".join, lambda labels: labels[0]])
def test_swapped_columns_are_named(tmp_path, join):
    content = "".join(f"{join(labels)}\t{text}\n" for text, labels in ROWS)
    message = refused(tmp_path / "a.tsv", content)
    assert "line 1: found columns that look swapped" in message
    assert "--text_column=2 --label_column=1" in message
    if join != ", ".join:
        dataset = load(tmp_path / "a.tsv", content, text_column="2", label_column="1")
        assert {text for text, _ in pairs(dataset)} == {text for text, _ in ROWS}
    dataset = load(tmp_path / "a.tsv", content, text_column="1", label_column="2")
    assert len(dataset.label_texts) == len(ROWS)


NAMES = [
    ("headline", "topics"),
    ("body", "tags"),
    ("comment_text", "label"),
    ("Comment Text", "Label IDs"),
    ("标题", "主题"),
    ("Titel", "Schlagworte"),
    ("TEXT", "Labels"),
    ("query", "category"),
    ("abstract", "keywords"),
    ("keywords", "category"),
]


@pytest.mark.parametrize("names", NAMES)
def test_usual_names_are_known_in_every_format(tmp_path, names):
    text, label = names
    assert pairs(load(tmp_path / "a.tsv", tsv(header=f"{text}\t{label}\n"))) == EXPECTED
    assert pairs(load(tmp_path / "a.csv", f"{text},{label}\n{csv_('|'.join)}")) == EXPECTED
    assert pairs(load(tmp_path / "a.jsonl", jsonl(text, label))) == EXPECTED
    wide = "".join(f"{i}\t{'|'.join(labels)}\t{text}\n" for i, (text, labels) in enumerate(ROWS))
    assert pairs(load(tmp_path / "b.tsv", f"Id\t{label}\t{text}\n{wide}")) == EXPECTED


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_swapped_columns_of_few_rows_are_named(tmp_path, seed, most):
    """Texts that are hardly longer than their labels; no row has two, so rows could be merged."""
    rng = random.Random(seed)
    rows = []
    for i in range(30):
        first, second = rng.sample(["red", "old", "small", "loud"], 2)
        topic = rng.choice(["apple", "river"])
        labels = [f"{first} {topic}", f"{second} {topic}"][: rng.randint(1, most)]
        rows.append(f"{'|'.join(labels)}\t{first} {topic} {second} n{i}x\n")
    assert "--text_column=2 --label_column=1" in refused(tmp_path / "a.tsv", "".join(rows))


def test_names_that_are_not_known(tmp_path):
    content = tsv(header="foo\tbar\n")
    message = refused(tmp_path / "a.tsv", content)
    assert "line 1: found a first row that reads like names (foo, bar)" in message
    assert "--text_column=foo --label_column=bar" in message
    names = {"text_column": "foo", "label_column": "bar"}
    assert pairs(load(tmp_path / "a.tsv", content, **names)) == EXPECTED
    as_data = load(tmp_path / "a.tsv", content, text_column="1", label_column="2")
    assert pairs(as_data) == EXPECTED | {("foo", "bar")}
    assert "found keys foo, bar; expected a text" in refused(
        tmp_path / "a.jsonl", jsonl("foo", "bar")
    )
    assert "no row with labels, but text, bar" in refused(
        tmp_path / "a.jsonl", jsonl("text", "bar")
    )
    assert pairs(load(tmp_path / "a.jsonl", jsonl("foo", "bar"), **names)) == EXPECTED
    assert "expected 'fo' among them" in refused(
        tmp_path / "a.jsonl", jsonl("foo", "bar"), text_column="fo"
    )


def test_more_columns_than_two(tmp_path):
    content = "".join(f"{i}\t{t}\t{'|'.join(ls)}\n" for i, (t, ls) in enumerate(ROWS))
    assert "as in --text_column=1 --label_column=2" in refused(tmp_path / "a.tsv", content)
    flags = {"text_column": "2", "label_column": "3"}
    assert pairs(load(tmp_path / "a.tsv", content, **flags)) == EXPECTED
    several = "name\tbody\ttags\n" + content
    message = refused(tmp_path / "a.tsv", several)
    assert "Say --text_column=name or --text_column=body" in message
    assert pairs(load(tmp_path / "a.tsv", several, text_column="body")) == EXPECTED
    assert "expected one called nope" in refused(tmp_path / "a.tsv", several, text_column="nope")


def test_a_first_row_of_data_is_kept(tmp_path):
    """A label that no other row has is no reason where texts are as short as names."""
    rows = [("plum", ["fruit tree"]), *((f"w{i}", ["a", "b"][: 1 + i % 2]) for i in range(50))]
    assert pairs(load(tmp_path / "a.tsv", tsv(rows=rows))) == {(t, x) for t, ls in rows for x in ls}


GOOD = tsv(rows=[(f"{text} \u00e9", labels) for text, labels in ROWS])


def test_one_bad_byte_costs_its_line_alone(tmp_path):
    content = GOOD.encode() + "caf\u00e9 don".encode() + b"\x92t\tsql\n"
    dataset = load(tmp_path / "a.tsv", content)
    assert ("caf\u00e9 don\u2019t", "sql") in pairs(dataset)
    assert {text for text, _ in pairs(dataset)} >= {f"{text} \u00e9" for text, _ in ROWS}
    note = "a.tsv, line 61: byte 0x92 is not UTF-8, read as cp1252; 1 such lines in all"
    assert note in dataset.notes


def test_many_bad_lines_are_another_encoding(tmp_path):
    content = GOOD.encode("cp1252")
    message = refused(tmp_path / "a.tsv", content)
    assert "a.tsv, line 1: found byte 0xe9, and 60 of 60 lines" in message
    assert "--encoding=cp1252" in message
    expected = {(f"{text} \u00e9", label) for text, label in EXPECTED}
    assert pairs(load(tmp_path / "a.tsv", content, encoding="cp1252")) == expected
    few = b"".join(b"\xe9 %d\tsql|css\n" % i for i in range(10))
    assert len(load(tmp_path / "b.tsv", few + GOOD.encode()).label_texts) == len(LABELS)
    more = b"".join(b"\xe9 %d\tsql|css\n" % i for i in range(11))
    assert "--encoding=" in refused(tmp_path / "b.tsv", more + GOOD.encode())
    assert load(tmp_path / "b.tsv", more + 20 * GOOD.encode())  # below 1 %
    chinese = GOOD.replace("\u00e9", "标题").encode("gb18030")
    assert "--encoding=" in refused(tmp_path / "c.tsv", chinese)
    texts = {text for text, _ in pairs(load(tmp_path / "c.tsv", chinese, encoding="gb18030"))}
    assert texts == {f"{text} 标题" for text, _ in ROWS}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["train.tsv", "train.tsv.gz"])
def test_utf_16_is_read_by_its_mark_or_by_name(tmp_path, name, encoding):
    content = GOOD.encode(encoding)
    content = gzip.compress(content) if name.endswith("gz") else content
    (tmp_path / name).write_bytes(content)
    expected = {(f"{text} \u00e9", label) for text, label in EXPECTED}
    if encoding.endswith("e"):
        with pytest.raises(formats.DataError, match=rf"--encoding={encoding}"):
            formats.load(tmp_path / name)
        reading = Reading(encoding=encoding)
    else:
        reading = Reading()
    assert pairs(formats.load(tmp_path / name, reading=reading)) == expected


def test_an_encoding_that_does_not_exist():
    for name in ("cp1253x", "hex"):
        with pytest.raises(ValueError, match=f"--encoding={name}: found no encoding"):
            Reading(encoding=name)


def test_quotes_of_spreadsheets(tmp_path):
    quoted = lambda cell: '"' + cell.replace('"', '""') + '"'
    texts = [f'{text} "so" {i}' for i, (text, _) in enumerate(ROWS)]
    expected = {(text, label) for text, (_, labels) in zip(texts, ROWS) for label in labels}
    rows = [(quoted(text), quoted("|".join(labels))) for text, (_, labels) in zip(texts, ROWS)]
    for mark, name in (("\t", "a.tsv"), (", ", "a.csv"), (",", "a.csv"), (" \t ", "a.tsv")):
        content = "".join(f"{text}{mark}{labels}\n" for text, labels in rows)
        assert pairs(load(tmp_path / name, content)) == expected
    half = "".join(f'"{text}\t{labels[0]}\n' for text, labels in ROWS)  # no spreadsheet's
    assert {t for t, _ in pairs(load(tmp_path / "b.tsv", half))} == {f'"{t}' for t, _ in ROWS}


def test_semicolons_of_half_of_europe(tmp_path):
    content = "Titel;Kategorie\n" + "".join(f"{t};{'|'.join(ls)}\n" for t, ls in ROWS)
    assert pairs(load(tmp_path / "a.csv", content)) == EXPECTED


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_the_long_form_is_merged_and_said(tmp_path, order):
    rows = [(text, [label]) for text, labels in ROWS for label in labels]
    if order == "shuffled":
        random.Random(1).shuffle(rows)
    dataset = load(tmp_path / "a.tsv", tsv(rows=rows))
    assert len(dataset.train) + len(dataset.test) == len(ROWS)
    assert pairs(dataset) == EXPECTED
    said = f"no row has two labels, so rows of one text were merged: {len(rows)} rows, 60 texts"
    assert any(said in note for note in dataset.notes)
    several = load(tmp_path / "b.tsv", tsv(rows=[*rows, ("x y", ["sql", "css"])]))
    assert len(several.train) + len(several.test) == len(rows) + 1


TWINS = [
    ("a b", ["java\u00a0script", "SQL"]),
    ("c d", ["java  script", "py\u200bthon"]),
    ("e f", ["caf\u00e9"]),
    ("g h", ["cafe\u0301"]),
]


def test_twins_are_named_and_joined_by_the_flag(tmp_path):
    content = tsv(rows=[*ROWS, *TWINS])
    dataset = load(tmp_path / "a.tsv", content)
    assert len(dataset.label_texts) == len(LABELS) + 6
    (note,) = (note for note in dataset.notes if "--merge_labels" in note)
    assert "5 labels differ" in note and r"'java script' and 'java\xa0script'" in note
    merged = load(tmp_path / "a.tsv", content, merge_labels=True)
    assert sorted(merged.label_texts) == sorted([*LABELS, "caf\u00e9"])
    assert {("a b", "java script"), ("a b", "sql"), ("g h", "caf\u00e9")} <= pairs(merged)
    # With a label file no id is shifted: the later twin has no points.
    write(tmp_path / "b" / "train.tsv", "x\tSQL|css\ny\tsql\n" * 5)
    write(tmp_path / "b" / "labels.txt", "sql\nSQL\ncss\n")
    twins = formats.load(tmp_path / "b", reading=Reading(merge_labels=True))
    assert list(twins.label_texts) == ["sql", "SQL", "css"]
    assert pairs(twins) == {("x", "sql"), ("x", "css"), ("y", "sql")}
    write(tmp_path / "b" / "train.tsv", "x\t1|2\ny\t0\n" * 5)
    assert pairs(formats.load(tmp_path / "b", reading=Reading(merge_labels=True))) == pairs(twins)


def test_version_1_reads_as_commit_6654296(tmp_path):
    """Labels are cut at | alone, nothing is merged, one odd byte makes a file latin-1."""
    old = {"version": 1}
    joined = load(tmp_path / "a.tsv", tsv(", ".join), **old)
    assert set(joined.label_texts) == {", ".join(labels) for _, labels in ROWS}
    lists = load(tmp_path / "a.tsv", tsv(json.dumps), **old)
    assert set(lists.label_texts) == {json.dumps(labels) for _, labels in ROWS}
    quoted = load(tmp_path / "a.tsv", '"a"\t"b"\n' * 5, **old)
    assert list(quoted.label_texts) == ['"b"'] and quoted.train.texts[0] == '"a"'
    assert len(load(tmp_path / "a.tsv", "a\tb\na\tc\n" * 5, **old).train) == 10
    header = load(tmp_path / "a.tsv", tsv(header="headline\ttopics\n"), **old)
    assert ("headline", "topics") in pairs(header)
    odd = load(tmp_path / "a.tsv", GOOD.encode() + b"don\x92t\tsql\n", **old)
    assert any(clean(text).endswith("\u00c3\u00a9") for text, _ in pairs(odd))
    assert "a.tsv: not utf-8, read as latin-1" in odd.notes


def test_flags_that_have_nothing_to_say_are_refused(tmp_path, mini_folder):
    with pytest.raises(formats.DataError, match=r"your own rows .* for --separator=,"):
        formats.reading_for(mini_folder, Reading(separator=","))
    assert formats.reading_for(mini_folder, Reading(encoding="utf-8")).encoding == "utf-8"
    write(tmp_path / "a.tsv", tsv(", ".join))
    reading = Reading(separator=",")
    formats.write_canonical(tmp_path / "a.tsv", tmp_path / "out", text="title", reading=reading)
    assert formats.reading_for(tmp_path / "out", Reading()) == reading
    with pytest.raises(formats.DataError, match="where the rows are prepared"):
        formats.reading_for(tmp_path / "out", reading)


def test_copies_of_other_flags_are_other_copies(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_SMALL_BYTES", 0)
    write(tmp_path / "a.tsv", tsv(", ".join))
    copy = lambda separator: formats.ensure_canonical(
        tmp_path / "a.tsv", text="title", cache_root=tmp_path, reading=Reading(separator=separator)
    )
    sizes = [len(formats.load(copy(separator)).label_texts) for separator in (",", "|", ",")]
    assert sizes == [len(LABELS), len({", ".join(labels) for _, labels in ROWS}), len(LABELS)]
