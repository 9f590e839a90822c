"""Rows of people's own files: JSON Lines, TSV and CSV with a text and its labels."""

from __future__ import annotations

import array
import csv
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xmc_jax.data.readers import own_columns
from xmc_jax.data.readers.decoding import Decoder, with_decoder
from xmc_jax.data.readers.own_cells import Label, splitter, tidy, unquoted
from xmc_jax.data.readers.own_columns import Columns
from xmc_jax.data.readers.raw_files import BadRows, listed, problem
from xmc_jax.data.readers.raw_readers import TextPlace, json_rows
from xmc_jax.data.readers.reading import Reading
from xmc_jax.data.texts import LineTexts, clean, is_blank

_CSV_FIELD_CHARACTERS = 1 << 24
Row = tuple[int, str, Sequence[Label]]  # its line, its text, its labels
Keys = tuple[str | None, str | None]  # of an object: of its text, of its labels
Fields = Iterator[tuple[int, list[str]]]  # of a table: the line that a row ends on, its cells


@dataclasses.dataclass
class OwnRows:
    """The rows of one file.

    Attributes:
      path: the file.
      texts: ``n`` texts.
      names: the different labels of the file as written: all int (ids) or all str.
      typed: whether the file tells numbers from strings (JSON does, TSV and CSV do not).
      codes: int32 ``[nnz]`` places in ``names``.
      indptr: int64 ``[n + 1]``.
      lines: int64 ``[n]``, the line each row ends on.
      first_lines: the line each name is first seen on.
      columns: names of the columns, or keys of the first object; empty where there are none.
      notes: what was met.
    """

    path: Path
    texts: LineTexts
    names: list[Label]
    typed: bool
    codes: np.ndarray
    indptr: np.ndarray
    lines: np.ndarray
    first_lines: np.ndarray
    columns: list[str]
    notes: list[str]


class Source:
    """One file, row by row.

    Attributes:
      decoder: of its lines.
      reading: flags.
      bad: rows that are wrong.
      columns: names of its columns, or keys of its first object, once they were met.
    """

    def __init__(self, decoder: Decoder, reading: Reading, bad: BadRows) -> None:
        """Nothing is read yet."""
        self.decoder, self.reading, self.bad = decoder, reading, bad
        self.path = decoder.path
        self.columns: list[str] = []

    @property
    def kind(self) -> str:
        """Its ending: tsv, csv, jsonl, json."""
        return kind_of(self.path)

    def rows(self) -> Iterator[Row]:
        """Its rows."""
        if self.kind not in ("tsv", "csv"):
            yield from self._objects()
            return
        split, find = splitter(self.reading), self._find_columns
        for line, fields, columns in self.table(find):
            assert columns.labels is not None
            yield line, fields[columns.text], split(fields[columns.labels])

    def _find_columns(self, line: int, fields: list[str]) -> Columns:
        if self.reading.version == 1:
            return _old_columns(fields)
        return own_columns.find_columns(self.path, line, fields, self.reading)

    def table(
        self, find: Callable[[int, list[str]], Columns]
    ) -> Iterator[tuple[int, list[str], Columns]]:
        """Rows of a table as wide as its first one; blank ones are skipped, and names."""
        columns = None
        for line, fields in self._fields():
            if not any(field.strip() for field in fields):
                continue
            if columns is None:
                columns = find(line, fields)
                if columns.header:
                    self.columns = [field.strip() for field in fields]
                    continue
            if len(fields) != columns.width:
                shown, advice = f"{len(fields)} columns", own_columns.ADVICE
                self.bad.add(problem(self.path, line, shown, f"{columns.width}", advice))
                continue
            yield line, fields, columns

    def _fields(self) -> Fields:
        return self._csv_fields() if self.kind == "csv" else self._tsv_fields()

    def _tsv_fields(self) -> Fields:
        as_it_is = self.reading.version == 1
        for line, text in enumerate(self.decoder.lines(), 1):
            fields = text.split("\t")
            if '"' in text and not as_it_is:
                fields = [unquoted(field.strip()) for field in fields]
            yield line, fields

    def _csv_fields(self) -> Fields:
        lines = (line + "\n" for line in self.decoder.lines())
        first = next(lines, "")
        new = self.reading.version > 1
        bare = re.sub('"[^"]*"', "", first)
        # Spreadsheets of half of Europe write semicolons.
        others = [mark for mark in "\t;" if mark in bare and "," not in bare] if new else []
        reader = csv.reader(
            itertools.chain([first], lines) if first else lines,
            delimiter=others[0] if others else ",",
            skipinitialspace=new,
            strict=True,
        )
        limit = csv.field_size_limit(_CSV_FIELD_CHARACTERS)  # the default refuses long documents
        try:
            for fields in reader:
                yield reader.line_num, fields
        except csv.Error as error:
            raise problem(
                self.path,
                reader.line_num,
                f"a row that is not CSV ({error})",
                "text,label|label; a text with a comma or a quote in double quotes",
                "Correct the quotes.",
            ) from error
        finally:
            csv.field_size_limit(limit)

    def _objects(self) -> Iterator[Row]:
        split = splitter(self.reading)
        label_key = None
        for line, row, keys in self.objects(self._find_keys):
            text = row[keys[0]]
            if keys[1] is None:
                yield line, text, []
                continue
            if keys[1] != label_key:
                if label_key is not None:
                    expected = f"labels under {label_key!r}, as in the rows before"
                    advice = f"Rename it, or say --label_column={label_key}."
                    self.bad.add(problem(self.path, line, f"key {keys[1]!r}", expected, advice))
                    continue
                label_key = keys[1]
            labels = self._labels(row[label_key], split)
            if labels is None:
                expected = "a list of ids or of label texts"
                advice = "Ids are line numbers of labels.txt, from 0."
                shown = f"{label_key} {row[label_key]!r}"[:60]
                self.bad.add(problem(self.path, line, shown, expected, advice))
                continue
            yield line, text, labels

    def _labels(self, value: Any, split: Callable[[str], list[str]]) -> list[Label] | None:
        """Labels of an object; None = they are none."""
        if isinstance(value, str) and self.reading.version > 1:
            return [*split(value)]
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(label) in (str, int) for label in values):
            return None
        labels: list[Label] = []
        for label in values:
            if not isinstance(label, str):
                labels.append(label)
            elif not self.reading.separator:
                labels += tidy([label])
            else:
                labels += split(label)
        return labels

    def _find_keys(self, line: int, keys: tuple[str, ...]) -> Keys:
        if self.reading.version > 1:
            return own_columns.find_keys(self.path, line, keys, self.reading)
        return "text" if "text" in keys else None, "labels" if "labels" in keys else None

    def objects(
        self, find: Callable[[int, tuple[str, ...]], Keys]
    ) -> Iterator[tuple[int, dict[str, Any], tuple[str, str | None]]]:
        """Objects of JSON Lines that have a text, with the keys of text and labels."""
        known: dict[tuple[str, ...], Keys] = {}
        for line, row in json_rows(self.decoder, self.bad):
            shown, expected = repr(row)[:60], "an object with a string 'text'"
            advice = 'Write {"text": "...", "labels": [...]} on each line.'
            if isinstance(row, dict):
                keys = tuple(row)
                self.columns = self.columns or list(keys)
                if keys not in known:
                    known[keys] = find(line, keys)
                text, labels = known[keys]
                if text is not None and isinstance(row[text], str):
                    yield line, row, (text, labels)
                    continue
                if text is None:
                    shown, expected = f"keys {', '.join(keys)[:200]}", "a text under a usual name"
                    if self.reading.text_column:
                        expected = f"{self.reading.text_column!r} among them"
                    advice = (
                        "Say which holds the text, --text_column=KEY, and where labels are read "
                        "--label_column=KEY."
                    )
                    if len(known) == 1:  # no row has a known key so far
                        raise problem(self.path, line, shown, expected, advice)
            self.bad.add(problem(self.path, line, shown, expected, advice))


def holds_rows(path: Path) -> bool:
    """Whether a file is a table or JSON Lines, by its ending; else it has one text a line."""
    return kind_of(path) in ("tsv", "csv", "jsonl", "json")


def kind_of(path: Path) -> str:
    """The ending of a file, that of compression left out."""
    return path.name.removesuffix(".gz").rpartition(".")[2].lower()


def read_rows(path: Path, role: str, place: TextPlace) -> OwnRows:
    """Reads a file by its ending.

    Raises:
      DataError: broken rows, ids mixed with texts, no rows; with file and line.
    """
    rows, notes = with_decoder(
        path,
        lambda decoder: _collect(Source(decoder, place.reading, BadRows()), role, place),
        place.reading,
    )
    rows.notes = notes + rows.notes
    if len(rows.texts) == 0:
        raise problem(path, None, "no rows", "one text with its labels a line", "Fill the file.")
    return rows


def _collect(source: Source, role: str, place: TextPlace) -> OwnRows:
    numbers: dict[Label, int] = {}  # of this file alone: a second encoding starts afresh
    codes, indptr = array.array("i"), array.array("q", [0])
    at, first_lines, empty = array.array("q"), array.array("q"), []
    path = source.path
    with place.writer(role) as writer:
        for line, text, labels in source.rows():
            text = clean(text).strip()
            if source.reading.version > 1 and is_blank(text):
                text = ""
            writer.append(text)
            if not text:
                empty.append(line)
            for label in labels:
                code = numbers.setdefault(label, len(numbers))
                if code == len(first_lines):
                    first_lines.append(line)
                    _check_kind(path, line, label, numbers)
                codes.append(code)
            indptr.append(len(codes))
            at.append(line)
        source.bad.check()
        texts = writer.close()
    notes = [f"{path.name}: {len(empty)} empty texts (lines {listed(empty)})"] if empty else []
    return OwnRows(
        path,
        texts,
        names=list(numbers),
        typed=source.kind not in ("tsv", "csv"),
        codes=np.array(codes),
        indptr=np.array(indptr),
        lines=np.array(at),
        first_lines=np.array(first_lines),
        columns=source.columns,
        notes=notes,
    )


def _check_kind(path: Path, line: int, label: Label, numbers: dict[Label, int]) -> None:
    first = next(iter(numbers))
    if type(label) is not type(first):
        raise problem(
            path,
            line,
            f"label {label!r} after {first!r}",
            "all labels to be ids (numbers) or all to be texts (strings)",
            "Write them one way.",
        )


def _old_columns(fields: Sequence[str]) -> Columns:
    """Columns by version 1: names are text and labels (or label), or there are none."""
    names = [field.strip().casefold() for field in fields]
    if "text" in names and ("labels" in names or "label" in names):
        labels = names.index("labels" if "labels" in names else "label")
        return Columns(names.index("text"), labels, len(names), header=True)
    return Columns(0, 1, 2, header=False)


def row_texts(decoder: Decoder, text_column: str, *, kept: bool) -> Iterator[str]:
    """Yields the texts of a file of rows, whose labels are left out if it has any.

    Args:
      decoder: of the file.
      text_column: its name or number; "" = looked for.
      kept: the column is that of training; the file may have others.

    Raises:
      DataError: as `read_rows`.
    """
    source = Source(decoder, Reading(), BadRows())
    path = source.path
    if source.kind in ("tsv", "csv"):
        find = lambda line, fields: own_columns.find_text_column(
            path, line, fields, text_column, kept=kept
        )
        texts = (fields[columns.text] for _, fields, columns in source.table(find))
    else:
        find_key = lambda line, keys: (
            own_columns.find_text_key(path, line, keys, text_column, kept=kept),
            None,
        )
        texts = (row[keys[0]] for _, row, keys in source.objects(find_key))
    for text in texts:
        source.bad.check()
        text = clean(text).strip()
        yield "" if is_blank(text) else text
    source.bad.check()
