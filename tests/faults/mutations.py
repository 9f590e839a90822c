"""What people, tools and disks do to files: each changes a `Case` and says what must come of it."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import unicodedata
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.faults.bases import DANGLING, FIFO, FOLDER, Base, Content, csv_line

EITHER, ACCEPTED, REFUSED = "either", "accepted", "refused"
Rng = np.random.Generator
Mutation = Callable[["Case", Rng], bool | None]


@dataclasses.dataclass
class Case:
    """Mutated files.

    Attributes:
      base: what they were made from.
      files: content by path, as it lies on the disk; `FOLDER`, `FIFO`, `DANGLING`.
      names: of the mutations.
      expect: whether it must be read, refused, or one of both.
      all_rows: where it is read, every row of the base must be there, not only untouched ones.
      has_line: an error must name a line.
      mentions: an error must contain this, such as the switch that helps.
      more_labels: how many label texts may be there that the base did not have.
      loose: row by row nothing is known, as where quotes may join lines.
      packed: files whose content is what lies on the disk, though they are called ``.gz``.
    """

    base: Base
    files: dict[str, Content]
    names: list[str] = dataclasses.field(default_factory=list)
    expect: str = EITHER
    all_rows: bool = False
    has_line: bool = False
    mentions: str = ""
    more_labels: int = 6
    loose: bool = False
    packed: set[str] = dataclasses.field(default_factory=set)

    def text_files(self) -> list[str]:
        """Names of the files that hold lines of text."""
        return sorted(
            name
            for name, content in self.files.items()
            if isinstance(content, bytes) and not name.endswith(".npz") and content
        )

    def pick(self, rng: Rng, *, rows: bool = False) -> str:
        """A file of text; with ``rows`` one that holds rows."""
        with_rows = {file for file, _ in self.base.rows}
        names = [name for name in self.text_files() if not rows or name in with_rows]
        return str(rng.choice(names))

    def row_lines(self, name: str) -> list[int]:
        """Lines (from 0) of a file that hold rows."""
        return sorted(line for file, line in self.base.rows if file == name)


MUTATIONS: dict[str, tuple[tuple[str, ...], Mutation]] = {}


def mutation(*kinds: str) -> Callable[[Mutation], Mutation]:
    """Adds to `MUTATIONS`, for bases of these kinds (none: all); it may return False: not here."""

    def add(function: Mutation) -> Mutation:
        MUTATIONS[function.__name__] = kinds, function
        return function

    return add


# Bytes of any file of text.


@mutation()
def flip_a_bit(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    content = bytearray(case.files[name])
    content[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
    case.files[name] = bytes(content)
    case.loose = case.base.kind == "csv"


@mutation()
def a_strange_byte(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    content, at = case.files[name], int(rng.integers(len(case.files[name])))
    strange = [b"\xff", b"\x92", b"\xe9", b"\x00", b"\x1a", b"\x85", b"\xc3", b"\xed\xa0\x80"]
    case.files[name] = content[:at] + strange[int(rng.integers(len(strange)))] + content[at:]


@mutation()
def a_strange_character(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    text = case.files[name].decode()
    at = int(rng.integers(len(text)))
    strange = "\ufeff\u2028\u2029\x85\x0b\x0c\x1c\u200b\u00a0\u202e\ufffd\U0010ffff\r"
    case.files[name] = (text[:at] + str(rng.choice(list(strange))) + text[at:]).encode()


@mutation()
def cut_short(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    case.files[name] = case.files[name][: int(rng.integers(len(case.files[name])))]


@mutation()
def a_piece_is_lost(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    start, stop = sorted(rng.integers(0, len(case.files[name]) + 1, 2).tolist())
    case.files[name] = case.files[name][:start] + case.files[name][stop:]
    case.loose = case.base.kind == "csv"


@mutation()
def a_block_of_zeros(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    size = int(rng.choice([1, 16, 512]))
    at = int(rng.integers(len(case.files[name])))
    case.files[name] = case.files[name][:at] + b"\0" * size + case.files[name][at + size :]


@mutation()
def nothing_in_it(case: Case, rng: Rng) -> None:
    empty = [b"", b"\n", b"\n\n\n", b" ", b"\xef\xbb\xbf", b"\t\n", b"\r\n"]
    case.files[case.pick(rng)] = empty[int(rng.integers(len(empty)))]


# Whole files of other tools.


@mutation()
def other_line_ends(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    case.files[name] = case.files[name].replace(b"\n", b"\r\n")
    case.expect, case.all_rows, case.more_labels = ACCEPTED, True, 0


@mutation()
def a_byte_order_mark(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    case.files[name] = b"\xef\xbb\xbf" + case.files[name]
    case.expect, case.all_rows, case.more_labels = ACCEPTED, True, 0


@mutation()
def no_last_line_end(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    case.files[name] = case.files[name].removesuffix(b"\n")
    case.expect, case.all_rows, case.more_labels = ACCEPTED, True, 0


@mutation()
def blank_lines_at_the_end(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    case.files[name] += b"\n" * int(rng.integers(1, 4))
    case.expect, case.all_rows, case.more_labels = ACCEPTED, True, 0


@mutation("tsv", "csv", "jsonl")
def utf16(case: Case, rng: Rng) -> None:
    name = case.pick(rng, rows=True)
    case.files[name] = case.files[name].decode().encode("utf-16")
    case.all_rows, case.more_labels = True, 0


@mutation()
def an_older_encoding(case: Case, rng: Rng) -> bool | None:
    name, encoding = case.pick(rng), str(rng.choice(["latin-1", "cp1252", "gb18030", "utf-16-le"]))
    try:
        written = case.files[name].decode().encode(encoding)
    except UnicodeEncodeError:
        return False
    if written == case.files[name]:
        return False
    case.files[name], case.loose, case.more_labels = written, True, 60


@mutation()
def letters_apart_from_marks(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    case.files[name] = unicodedata.normalize("NFD", case.files[name].decode()).encode()
    case.loose, case.more_labels = True, 60


@mutation()
def lone_carriage_returns(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    case.files[name] = case.files[name].replace(b"\n", b"\r")


# Packing.


@mutation()
def packed_under_its_name(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    case.files[name] = gzip.compress(case.files[name], mtime=0)
    case.packed.add(name)
    case.expect, case.all_rows, case.more_labels = ACCEPTED, True, 0


@mutation()
def damaged_gzip(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    content = case.files[name]
    packed = bytearray(gzip.compress(content, mtime=0))
    case.packed.add(name)
    how = int(rng.integers(4))
    if how == 0:
        packed = packed[: int(rng.integers(3, len(packed)))]
    elif how == 1:
        packed[int(rng.integers(10, len(packed)))] ^= 1 << int(rng.integers(8))
    elif how == 2:
        packed[2:10] = rng.bytes(8)
    else:
        packed += b"rest of another file"
    case.files[name] = bytes(packed)
    try:
        is_sound = gzip.decompress(case.files[name]) == content
    except (OSError, EOFError, zlib.error):
        is_sound = False
    case.expect = EITHER if is_sound else REFUSED


@mutation()
def packed_twice(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    case.files[name] = gzip.compress(gzip.compress(case.files[name], mtime=0), mtime=0)
    case.packed.add(name)
    case.expect = REFUSED


@mutation()
def another_archive(case: Case, rng: Rng) -> None:
    name, out = case.pick(rng), io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(zipfile.ZipInfo(name), case.files[name])
    case.packed.add(name)
    heads = [out.getvalue(), b"BZh91AY&SY" + bytes(40), b"PAR1" + bytes(40), b"\xfd7zXZ\0" * 9]
    case.files[name] = heads[int(rng.integers(len(heads)))]
    case.expect = REFUSED


# Nodes.


@mutation()
def no_regular_file(case: Case, rng: Rng) -> None:
    name = str(rng.choice(sorted(case.files)))
    case.files[name] = str(rng.choice([FOLDER, FIFO, DANGLING]))
    case.expect = REFUSED


@mutation()
def a_file_is_gone(case: Case, rng: Rng) -> bool | None:
    if len(case.files) == 1:
        return False
    name = str(rng.choice(sorted(case.files)))
    optional = name.startswith(("filter", "test", "labels"))
    del case.files[name]
    case.expect, case.all_rows = EITHER if optional else REFUSED, False
    case.loose, case.more_labels = True, 60
    return None


# Lines.


def _split(case: Case, name: str) -> list[bytes]:
    return case.files[name].split(b"\n")


@mutation()
def a_line_is_gone(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    rows = _split(case, name)
    del rows[int(rng.integers(max(1, len(rows) - 1)))]
    case.files[name] = b"\n".join(rows)


@mutation()
def a_line_stands_twice(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    rows = _split(case, name)
    at = int(rng.integers(len(rows) - 1))
    case.files[name] = b"\n".join([*rows[: at + 1], *rows[at:]])


@mutation()
def a_blank_line(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    rows = _split(case, name)
    blank = [b"", b" ", b"\t", b"\xc2\xa0"][int(rng.integers(4))]
    rows.insert(int(rng.integers(len(rows))), blank)
    case.files[name] = b"\n".join(rows)


@mutation()
def lines_change_places(case: Case, rng: Rng) -> None:
    name = case.pick(rng)
    rows = _split(case, name)
    one, two = rng.integers(len(rows) - 1, size=2)
    rows[one], rows[two] = rows[two], rows[one]
    case.files[name] = b"\n".join(rows)


@mutation()
def a_long_word(case: Case, rng: Rng) -> None:
    name = case.pick(rng, rows=True)
    rows = _split(case, name)
    at = int(rng.choice(case.row_lines(name)))
    rows[at] = rows[at].replace(b"n", b"n" * 300_000, 1)
    case.files[name] = b"\n".join(rows)


@mutation()
def garbage_line(case: Case, rng: Rng) -> None:
    name = case.pick(rng, rows=True)
    rows = _split(case, name)
    junk = [b"<html>", b"{", b"[]", b"null", b"# comment", b"---", b'"', rng.bytes(30), b"0"]
    rows.insert(int(rng.integers(len(rows))), junk[int(rng.integers(len(junk)))])
    case.files[name] = b"\n".join(rows)
    case.loose = case.base.kind == "csv"


# Rows of people's own tables.


def _fields(case: Case, name: str) -> list[list[str]]:
    """Text and labels of every row of a file of own data, a header first where there is one."""
    text = case.files[name].decode()
    lines = text.removesuffix("\n").split("\n")
    if case.base.kind == "tsv":
        return [line.split("\t") for line in lines]
    import csv

    return list(csv.reader(lines))


def _write(case: Case, name: str, rows: list[list[str]]) -> None:
    join = "\t".join if case.base.kind == "tsv" else lambda fields: csv_line(*fields)
    case.files[name] = "".join(f"{join(row)}\n" for row in rows).encode()


def _tables(case: Case) -> list[str]:
    return sorted({name for name, _ in case.base.rows} & case.files.keys())


def _has_ids(case: Case) -> bool:
    return bool(case.base.label_lines)


def _first_row(case: Case) -> int:
    return min(line for _, line in case.base.rows)


@mutation("tsv", "csv")
def labels_are_written_as_lists(case: Case, rng: Rng) -> bool | None:
    if _has_ids(case):
        return False
    tags = lambda labels: "".join(f"<{label}>" for label in labels)
    writers = [json.dumps, repr, tags, lambda x: json.dumps(x, ensure_ascii=False)]
    write = writers[int(rng.integers(len(writers)))]
    for name in _tables(case):
        rows = _fields(case, name)
        for row in rows[_first_row(case) :]:
            row[1] = write(row[1].split("|"))
        _write(case, name, rows)
    case.expect, case.all_rows, case.more_labels = ACCEPTED, True, 0
    return None


@mutation("tsv", "csv")
def labels_have_another_separator(case: Case, rng: Rng) -> bool | None:
    if _has_ids(case) or any("," in label or "/" in label for label in case.base.labels):
        return False
    separator = str(rng.choice([", ", ",", ";", "; ", " / ", "、", " > "]))
    for name in _tables(case):
        rows = _fields(case, name)
        for row in rows[_first_row(case) :]:
            row[1] = row[1].replace("|", separator)
        _write(case, name, rows)
    case.expect, case.mentions = REFUSED, "--separator"
    return None


@mutation("jsonl")
def labels_are_one_string(case: Case, rng: Rng) -> bool | None:
    if _has_ids(case):
        return False
    for name in _tables(case):
        rows = [json.loads(line) for line in case.files[name].splitlines()]
        shown = [{**row, "labels": "|".join(row["labels"])} for row in rows]
        case.files[name] = "".join(json.dumps(row) + "\n" for row in shown).encode()
    case.expect, case.all_rows, case.more_labels = ACCEPTED, True, 0
    return None


@mutation("tsv", "csv")
def columns_are_swapped(case: Case, rng: Rng) -> bool | None:
    if _has_ids(case) or _first_row(case):
        return False
    for name in _tables(case):
        _write(case, name, [row[::-1] for row in _fields(case, name)])
    case.mentions, case.loose, case.more_labels = "_column", True, 60
    return None


@mutation("tsv", "csv")
def a_header_of_usual_names(case: Case, rng: Rng) -> bool | None:
    if _first_row(case):
        return False
    headers = ["text labels", "title tags", "Title Labels", "query label", "headline topics",
               "body tags", "comment_text label", "标题 主题"]  # fmt: skip
    header = str(rng.choice(headers)).split()
    for name in _tables(case):
        _write(case, name, [header, *_fields(case, name)])
    case.all_rows, case.more_labels = True, 0
    return None


@mutation("tsv", "csv")
def a_column_of_numbers(case: Case, rng: Rng) -> None:
    for name in _tables(case):
        rows, first = _fields(case, name), _first_row(case)
        numbers = [["Id"]] * first + [[str(i)] for i in range(len(rows) - first)]
        _write(case, name, [number + row for number, row in zip(numbers, rows)])
    case.all_rows, case.more_labels = True, 0


@mutation("tsv", "csv")
def everything_in_quotes(case: Case, rng: Rng) -> None:
    join = "\t" if case.base.kind == "tsv" else str(rng.choice([",", ", "]))
    for name in _tables(case):
        quoted = [[f'"{field}"' for field in row] for row in _fields(case, name)]
        case.files[name] = "".join(join.join(row) + "\n" for row in quoted).encode()
    case.expect, case.all_rows, case.more_labels = ACCEPTED, True, 0


@mutation("tsv", "csv")
def a_single_quote_mark(case: Case, rng: Rng) -> None:
    name = case.pick(rng, rows=True)
    rows = _fields(case, name)
    row, column = int(rng.integers(len(rows))), int(rng.integers(2))
    rows[row][column] = '"' + rows[row][column]
    join = "\t" if case.base.kind == "tsv" else ","
    case.files[name] = "".join(join.join(row) + "\n" for row in rows).encode()


@mutation("tsv", "csv")
def one_label_a_line(case: Case, rng: Rng) -> bool | None:
    if case.base.label_lines or _first_row(case):
        return False
    for name in _tables(case):
        rows = _fields(case, name)
        _write(case, name, [[t, label] for t, labels in rows for label in labels.split("|")])
    case.expect, case.all_rows, case.more_labels = ACCEPTED, True, 0
    return None


@mutation("tsv", "csv")
def an_odd_cell(case: Case, rng: Rng) -> None:
    name = case.pick(rng, rows=True)
    rows = _fields(case, name)
    row = rows[int(rng.integers(_first_row(case), len(rows)))]
    odd = ["", " ", "|", "||", "a||b", "|a", "a|", "NULL", "nan", "[]", "[", "<a", "a|a", "0", "-1",
           "1.0", "0.9", "1e3", "0_1", "+1", "007", "9" * 31, "\u0661", "0x1", "True", "a" * 5000,
           "|".join(f"l{i}" for i in range(200)), "{'a': 1}", "a,b", "9" * 5000]  # fmt: skip
    row[int(rng.integers(len(row)))] = odd[int(rng.integers(len(odd)))]
    case.more_labels = 210
    _write(case, name, rows)


@mutation("tsv", "csv")
def no_labels_in_some_rows(case: Case, rng: Rng) -> None:
    for name in _tables(case):
        rows = _fields(case, name)
        for row in rows[_first_row(case) :]:
            row[1] = "" if rng.random() < 0.3 else row[1]
        _write(case, name, rows)


@mutation("tsv", "csv")
def more_or_fewer_columns(case: Case, rng: Rng) -> None:
    name = case.pick(rng, rows=True)
    rows = _fields(case, name)
    row = rows[int(rng.integers(_first_row(case), len(rows)))]
    how = int(rng.integers(3))
    row[:] = [[*row, "more"], row[:1], [*row, *row]][how]
    case.has_line = True
    _write(case, name, rows)


@mutation("tsv", "csv", "jsonl")
def label_ids_are_odd(case: Case, rng: Rng) -> bool | None:
    if not _has_ids(case):
        return False
    name = case.pick(rng, rows=True)
    lines = _split(case, name)
    at = int(rng.choice(case.row_lines(name)))
    odd = str(rng.choice(["-1", "0.9", "1e0", "9999", "9" * 31, "0_1", "null", "true", "1 2"]))
    if case.base.kind == "jsonl":
        lines[at] = json.dumps({"text": "odd one", "labels": []}).replace("[]", f"[{odd}]").encode()
        case.has_line = True
    else:
        cut = lines[at].rindex(b"\t" if case.base.kind == "tsv" else b",") + 1
        lines[at] = lines[at][:cut] + odd.encode()
    case.files[name] = b"\n".join(lines)
    case.expect = REFUSED
    return None


@mutation("tsv", "csv", "jsonl")
def a_label_file_of_another_form(case: Case, rng: Rng) -> bool | None:
    if "labels.txt" not in case.files:
        return False
    texts, how = case.files["labels.txt"].decode().splitlines(), int(rng.integers(4))
    if how == 0:  # an id column: understood
        texts = [f"{i}\t{text}" for i, text in enumerate(texts)]
        order = rng.permutation(len(texts)) if rng.random() < 0.5 else range(len(texts))
        texts = [texts[i] for i in order]
    elif how == 1:
        texts = [f"{i},{text}" for i, text in enumerate(texts)]
    elif how == 2:
        texts = [str(rng.choice(["label", "labels", "name", "text"])), *texts]
    else:  # ids from 1: the same labels, or one message
        texts = [f"{i + 1}\t{text}" for i, text in enumerate(texts)]
    case.files["labels.txt"] = "".join(f"{text}\n" for text in texts).encode()
    case.all_rows, case.more_labels = how < 3, 0
    case.loose = how == 3
    return None


# Objects, one a line.

_DEEP = "[" * 100_000 + "]" * 100_000
_VALUES = ["null", "true", "3", "1.5", '""', '" "', "[]", "{}", '["a", 1]', "[null]", "[[1]]",
           "1e999", "-1", "[-1]", "[0.9]", "[1.0]", "[true]", '["0"]', "[" + "9" * 31 + "]",
           "NaN", "9" * 5000, _DEEP, '"\\ud800"', '"\\u0000"', '{"a": [1]}', '["a|b"]', '"a|b"',
           "[0, 0]", "[NaN]", "[1e999]", '[""]']  # fmt: skip


@mutation("jsonl", "json")
def an_odd_value(case: Case, rng: Rng) -> None:
    name = case.pick(rng, rows=rng.random() < 0.8)
    lines = _split(case, name)
    at = int(rng.integers(len(lines) - 1))
    try:
        row = json.loads(lines[at])
    except ValueError:
        return
    if not isinstance(row, dict):
        return
    key = str(rng.choice(list(row)))
    row[key] = "PLACE"
    value = _VALUES[int(rng.integers(len(_VALUES)))]
    lines[at] = json.dumps(row).replace('"PLACE"', value).encode()
    case.files[name] = b"\n".join(lines)
    case.has_line = True


@mutation("jsonl", "json")
def keys_have_other_names(case: Case, rng: Rng) -> None:
    names = {
        "labels": ["label", "tags", "Labels", "LABELS", "topics", "y"],
        "text": ["title", "Text", "query", "x"],
        "title": ["text", "Title"],
        "target_ind": ["labels", "target"],
        "target_rel": ["relevance"],
    }
    old = str(rng.choice([key for key in names if f'"{key}": ' in _all_text(case)]))
    new = str(rng.choice(names[old]))
    for name in _tables(case):
        case.files[name] = case.files[name].replace(f'"{old}": '.encode(), f'"{new}": '.encode())
    case.all_rows, case.more_labels = True, 0


def _all_text(case: Case) -> str:
    return "".join(case.files[name].decode("latin-1") for name in _tables(case))


@mutation("jsonl", "json")
def a_key_is_missing(case: Case, rng: Rng) -> None:
    name = case.pick(rng, rows=True)
    lines = _split(case, name)
    at = int(rng.choice(case.row_lines(name)))
    row: dict[str, Any] = json.loads(lines[at])
    del row[str(rng.choice(list(row)))]
    lines[at] = json.dumps(row).encode()
    case.files[name] = b"\n".join(lines)
    case.has_line = True


@mutation("jsonl", "json")
def one_array_or_many_lines(case: Case, rng: Rng) -> None:
    name = case.pick(rng, rows=True)
    rows = [json.loads(line) for line in case.files[name].splitlines()]
    if rng.random() < 0.5:
        written = json.dumps(rows, indent=int(rng.integers(3)) or None)
    else:
        written = "\n".join(json.dumps(row, indent=1) for row in rows)
    case.files[name] = written.encode() + b"\n"
    case.all_rows, case.more_labels = True, 0


@mutation("json")
def odd_relevance(case: Case, rng: Rng) -> bool | None:
    if b"target_rel" not in case.files.get(case.pick(rng, rows=True), b""):
        return False
    name = sorted(case.base.rows)[0][0]
    if name not in case.files:
        return False
    lines = _split(case, name)
    at = int(rng.choice(case.row_lines(name)))
    row = json.loads(lines[at])
    row["target_rel"] = "PLACE"
    values = ["1", "true", "null", '"1"', "[1]", "[1, 1, 1]", '["1"]', "[null]", "[true]", "[NaN]",
              "[0]", "[-1]", "{}", "[[1]]", "1.5", "[1e999, 1]"]  # fmt: skip
    lines[at] = json.dumps(row).replace('"PLACE"', str(rng.choice(values))).encode()
    case.files[name] = b"\n".join(lines)
    case.has_line = True
    return None


# Matrices and filter pairs of public layouts.


@mutation("json", "lines")
def an_odd_token(case: Case, rng: Rng) -> bool | None:
    names = [name for name in case.text_files() if name.endswith("_X_Y.txt")]
    if not names:
        return False
    name = str(rng.choice(names))
    lines = _split(case, name)
    odd = ["1:x", "1:", ":1", ":", "0_1:1", "1.5:1", "0.9", "-1:1", "+1:1", "1:nan", "1:inf", "1e0",
           "1:-1", "1:0", "9999:1", "9" * 31 + ":1", "1::1", "1:1:1", "\u0661:1", "1:1e999",
           "1:0x1", "1,2", "9" * 5000, "4294967296:1", "1:1_0"]  # fmt: skip
    at = int(rng.integers(1, len(lines) - 1))
    tokens = lines[at].split(b" ")
    tokens[int(rng.integers(len(tokens)))] = str(rng.choice(odd)).encode()
    lines[at] = b" ".join(tokens)
    case.files[name] = b"\n".join(lines)
    case.has_line = True
    return None


@mutation("json", "lines")
def an_odd_matrix_header(case: Case, rng: Rng) -> bool | None:
    names = [name for name in case.text_files() if name.endswith("_X_Y.txt")]
    if not names:
        return False
    name = str(rng.choice(names))
    _, *rest = _split(case, name)
    odd = ["", "1", "-1 5", "1e9 5", "99999999999999999999 5", "3 4 5", "a b", "5.0 5.0", "0 0",
           "²  5", "9999999 9999999", "1_0 5"]  # fmt: skip
    case.files[name] = b"\n".join([odd[int(rng.integers(len(odd)))].encode(), *rest])
    case.expect, case.has_line = REFUSED, True
    return None


@mutation("json", "lines")
def odd_filter_pairs(case: Case, rng: Rng) -> bool | None:
    names = [name for name in case.text_files() if name.startswith("filter")]
    if not names:
        return False
    name = str(rng.choice(names))
    lines = _split(case, name)
    odd = ["0", "0 1 2", "a b", "-1 0", "0 -1", "0 9999", "9999 0", "0.0 1.0", "0_1 1",
           "9" * 31 + " 1", "0,1", "0\t1", " 0 1 ", "+0 1", "nan nan", "0x1 1",
           "# 0 1", "1e0 0"]  # fmt: skip
    lines.insert(int(rng.integers(len(lines))), str(rng.choice(odd)).encode())
    case.files[name] = b"\n".join(lines)
    case.has_line = True
    return None


@mutation("json", "lines")
def an_odd_npz(case: Case, rng: Rng) -> bool | None:
    names = [name for name in case.files if name.endswith(".npz")]
    if not names or not isinstance(case.files[names[0]], bytes):
        return False
    name = str(rng.choice(names))
    arrays = dict(np.load(io.BytesIO(case.files[name])))
    how = str(rng.choice(sorted(_NPZ)))
    changed = _NPZ[how](arrays)
    if isinstance(changed, bytes):
        case.files[name] = changed
    else:
        out = io.BytesIO()
        np.savez_compressed(out, **changed)
        case.files[name] = out.getvalue()
    case.names[-1] += f" ({how})"
    case.expect = ACCEPTED if how == "other numbers" else EITHER if how in _SOUND else REFUSED
    return None


def _npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def _many(arrays: dict) -> dict:
    count = 1_000_000
    indptr = np.full_like(arrays["indptr"], count)
    indptr[0] = 0
    ones = np.ones(count, np.int8)
    return {**arrays, "data": ones, "indices": np.zeros(count, np.int32), "indptr": indptr}


def _first(name: str, value: Any) -> Callable[[dict], dict]:
    def change(arrays: dict) -> dict:
        array = arrays[name].copy()
        array[-1] = value
        return {**arrays, name: array}

    return change


_NPZ: dict[str, Callable[[dict], dict | bytes]] = {
    "an npy": lambda arrays: _npy(arrays["data"]),
    "a pickled npy": lambda arrays: _npy(np.array([{}, None], object)),
    "shape of NaN": lambda arrays: {**arrays, "shape": np.array([np.nan, np.nan])},
    "shape of one": lambda arrays: {**arrays, "shape": np.array([3])},
    "negative shape": lambda arrays: {**arrays, "shape": -arrays["shape"]},
    "shape is large": lambda arrays: {**arrays, "shape": np.array([2**40, 2**40])},
    "data of text": lambda arrays: {**arrays, "data": arrays["data"].astype(str)},
    "data of objects": lambda arrays: {**arrays, "data": arrays["data"].astype(object)},
    "data of complex numbers": lambda arrays: {**arrays, "data": arrays["data"] + 1j},
    "data of NaN": lambda arrays: {**arrays, "data": arrays["data"] * np.nan},
    "ids of floats": lambda arrays: {**arrays, "indices": arrays["indices"] + 0.9},
    "ids are large": _first("indices", 9999),
    "ids are negative": _first("indices", -1),
    "indptr falls": lambda arrays: {**arrays, "indptr": arrays["indptr"][::-1].copy()},
    "indptr is long": _first("indptr", 2**30),
    "indptr is short": lambda arrays: {**arrays, "indptr": arrays["indptr"][:-1]},
    "data are short": lambda arrays: {**arrays, "data": arrays["data"][:-1]},
    "unknown format": lambda arrays: {**arrays, "format": np.array(b"xyz")},
    "format of a number": lambda arrays: {**arrays, "format": np.array(7)},
    "other names": lambda arrays: {f"x{name}": array for name, array in arrays.items()},
    "no arrays": lambda arrays: {},
    "more entries than cells": _many,
    "another format": lambda arrays: _other(arrays, "coo"),
    "yet another format": lambda arrays: _other(arrays, "csc"),
    "a diagonal format": lambda arrays: _other(arrays, "dia"),
    "other numbers": lambda arrays: {**arrays, "data": arrays["data"].astype(np.int8)},
    "cut short": lambda arrays: _zipped(arrays)[:-40],
    "a changed byte": lambda arrays: _changed(_zipped(arrays)),
}
_SOUND = ("other numbers", "another format", "yet another format", "a diagonal format")


def _zipped(arrays: dict) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def _changed(content: bytes) -> bytes:
    at = content.index(b"NUMPY") + 160
    return content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :]


def _other(arrays: dict, form: str) -> bytes:
    from scipy import sparse

    parts = tuple(arrays[name] for name in ("data", "indices", "indptr"))
    out = io.BytesIO()
    sparse.save_npz(out, sparse.csr_matrix(parts, shape=arrays["shape"]).asformat(form))
    return out.getvalue()


def make_case(base: Base, rng: Rng) -> Case:
    """One mutation of a base, or two; what two must give is only that what is untouched stays."""
    case = Case(base, dict(base.files))
    of_any = [name for name, (kinds, _) in MUTATIONS.items() if not kinds]
    of_kind = [name for name, (kinds, _) in MUTATIONS.items() if base.kind in kinds]
    how_many = 1 if rng.random() < 0.8 else 2
    while len(case.names) < how_many and case.text_files():
        name = str(rng.choice(_SECOND if case.names else of_kind if rng.random() < 0.6 else of_any))
        case.names.append(name)
        before = dict(case.files)
        if MUTATIONS[name][1](case, rng) is False:
            case.names.pop()
        elif case.files == before:
            case = Case(base, dict(base.files))
    if len(case.names) == 2:
        case.expect, case.all_rows, case.has_line, case.mentions = EITHER, False, False, ""
        case.more_labels, case.loose = 500, True
    return case


_SECOND = ("flip_a_bit", "a_strange_byte", "cut_short", "nothing_in_it", "no_regular_file",
           "a_piece_is_lost", "a_line_is_gone", "a_blank_line", "other_line_ends")  # fmt: skip
