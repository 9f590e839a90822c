"""Rows of people's own files: JSON Lines, TSV and CSV with a text and its labels."""

from __future__ import annotations

import array
import csv
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from xmc_jax.data.readers.raw_files import BadRows, lines, listed, problem, with_encodings
from xmc_jax.data.readers.raw_readers import TextPlace, json_rows
from xmc_jax.data.texts import LineTexts, clean

_CSV_FIELD_CHARACTERS = 1 << 24
_ADVICE = "Write one text and its labels a line: text<TAB>label|label; in CSV text,label|label."
# Names that people give their columns; in a first row that is not "text" and "labels" they would
# be taken for a text and its label.
_TEXT_NAMES = frozenset(
    "text texts title titles query queries question sentence document description content name "
    "product keyword keywords".split()
)
_LABEL_NAMES = frozenset(
    "label labels label_id label_ids labelid labelids category categories category_id class "
    "classes tag tags target targets".split()
)
Label = str | int
Row = tuple[int, str, Sequence[Label]]  # its line, its text, its labels
Parse = Callable[[Path, str, BadRows], Iterator[Row]]


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
    notes: list[str]


def read_rows(path: Path, role: str, place: TextPlace) -> OwnRows:
    """Reads a file by its ending.

    Raises:
      DataError: broken rows (the first 20), ids mixed with texts, no rows; with file and line.
    """
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    parse = {"tsv": _tsv_rows, "csv": _csv_rows}.get(kind, _json_lines_rows)
    rows, notes = with_encodings(
        path, lambda encoding: _collect(path, role, place, parse, encoding)
    )
    rows.notes = notes + rows.notes
    if len(rows.texts) == 0:
        raise problem(path, None, "no rows", "one text with its labels a line", "Fill the file.")
    return rows


def _collect(path: Path, role: str, place: TextPlace, parse: Parse, encoding: str) -> OwnRows:
    numbers: dict[Label, int] = {}  # of this file alone: a second encoding starts afresh
    codes, indptr = array.array("i"), array.array("q", [0])
    at, first_lines, empty = array.array("q"), array.array("q"), []
    bad = BadRows()
    with place.writer(role) as writer:
        for line, text, labels in parse(path, encoding, bad):
            text = clean(text).strip()
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
        bad.check()
        texts = writer.close()
    notes = [f"{path.name}: {len(empty)} empty texts (lines {listed(empty)})"] if empty else []
    return OwnRows(
        path,
        texts,
        names=list(numbers),
        typed=parse is _json_lines_rows,
        codes=np.array(codes),
        indptr=np.array(indptr),
        lines=np.array(at),
        first_lines=np.array(first_lines),
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


def _json_lines_rows(path: Path, encoding: str, bad: BadRows) -> Iterator[Row]:
    for line, row in json_rows(path, encoding, bad):
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            expected = "an object with a string 'text'"
            advice = 'Write {"text": "...", "labels": [...]} on each line.'
            bad.add(problem(path, line, repr(row)[:60], expected, advice))
            continue
        labels = row.get("labels")
        labels = [] if labels is None else labels if isinstance(labels, list) else [labels]
        if not all(type(label) in (str, int) for label in labels):
            expected = "a list of ids or of label texts"
            advice = "Ids are line numbers of labels.txt, from 0."
            bad.add(problem(path, line, f"labels {labels!r}"[:60], expected, advice))
            continue
        yield line, row["text"], _tidy(labels)


def _tidy(labels: Sequence[Label]) -> list[Label]:
    tidy = (clean(label).strip() if isinstance(label, str) else label for label in labels)
    return [label for label in tidy if label != ""]


def _tsv_rows(path: Path, encoding: str, bad: BadRows) -> Iterator[Row]:
    numbered = enumerate(lines(path), 1)
    decoded = ((number, line.decode(encoding)) for number, line in numbered)
    return _table_rows(path, ((number, line.split("\t")) for number, line in decoded), bad)


def _csv_rows(path: Path, encoding: str, bad: BadRows) -> Iterator[Row]:
    limit = csv.field_size_limit(_CSV_FIELD_CHARACTERS)  # the default refuses long documents
    try:
        yield from _table_rows(path, _csv_fields(path, encoding), bad)
    finally:
        csv.field_size_limit(limit)


def _csv_fields(path: Path, encoding: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader((line.decode(encoding) + "\n" for line in lines(path)), strict=True)
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise problem(
                path,
                reader.line_num,
                f"a row that is not CSV ({error})",
                "text,label|label; a text with a comma or a quote in double quotes",
                "Correct the quotes.",
            ) from error
        yield reader.line_num, fields


def _table_rows(path: Path, rows: Iterator[tuple[int, list[str]]], bad: BadRows) -> Iterator[Row]:
    """Turns fields into texts and labels; blank lines are skipped, a header names the columns."""
    text_column, label_column, width, begun = 0, 1, 2, False
    for line, fields in rows:
        if not any(field.strip() for field in fields):
            continue
        if not begun:
            begun = True
            names = [field.strip().casefold() for field in fields]
            if "text" in names and ("labels" in names or "label" in names):
                text_column, width = names.index("text"), len(names)
                label_column = names.index("labels" if "labels" in names else "label")
                continue
            if _TEXT_NAMES & set(names) and _LABEL_NAMES & set(names):
                raise problem(
                    path,
                    line,
                    f"columns named {', '.join(names)}",
                    "the names text and labels, or no names",
                    "Rename the columns; a row that is data and not names can stand further down.",
                )
        if len(fields) != width:
            bad.add(problem(path, line, f"{len(fields)} columns", f"{width}", _ADVICE))
            continue
        yield line, fields[text_column], _tidy(fields[label_column].split("|"))
