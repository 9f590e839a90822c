"""Readers for the public layouts: JSON Lines, and one text a line beside a label matrix."""

from __future__ import annotations

import array
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xmc_jax.data.dataset import Dataset, Split, make_dataset
from xmc_jax.data.readers import label_files
from xmc_jax.data.readers.decoding import Decoder, with_decoder
from xmc_jax.data.readers.label_files import RawLabels
from xmc_jax.data.readers.layouts import JSON, Layout
from xmc_jax.data.readers.raw_files import BadRows, listed, problem
from xmc_jax.data.readers.reading import AS_FOUND, Reading
from xmc_jax.data.texts import LineTexts, LineWriter

RECIPES = ("title", "title+content")


@dataclasses.dataclass
class TextPlace:
    """Where a reader puts texts, and how it reads them.

    Attributes:
      folder: texts become files there; None = memory.
      reading: of people's own files; of all other layouts, their encoding.
    """

    folder: Path | None = None
    reading: Reading = AS_FOUND

    def writer(self, role: str) -> LineWriter:
        """Returns the writer for "train", "test" or "labels"."""
        return LineWriter(None if self.folder is None else self.folder / f"{role}.txt")


def read_public(layout: Layout, recipe: str, place: TextPlace) -> Dataset:
    """Reads layouts JSON and LINES.

    Raises:
      DataError: whatever is wrong, with file and line.
    """
    read = _read_json_split if layout.kind == JSON else _read_lines_split
    train_texts, train_raw, notes = read(layout, "train", recipe, place)
    test_texts, test_raw, test_notes = read(layout, "test", recipe, place)
    notes += test_notes
    label_texts = _read_label_texts(layout, recipe, place, train_raw.num_labels, notes)
    splits = []
    for role, texts, raw in (("train", train_texts, train_raw), ("test", test_texts, test_raw)):
        if len(texts) == 0:
            raise problem(layout.files[role], None, "no rows", "at least one", "Is it the file?")
        matrix, more = label_files.build_matrix(raw, len(label_texts))
        notes += more
        pairs, more = label_files.read_filter_pairs(
            layout.files.get(f"{role}_filter"), len(texts), len(label_texts)
        )
        notes += more
        splits.append(Split(texts, matrix, pairs))
    return make_dataset(layout.name, splits[0], splits[1], label_texts, notes)


def json_rows(decoder: Decoder, bad: BadRows | None = None) -> Iterator[tuple[int, Any]]:
    """Yields (line number, object) of a JSON Lines file; blank lines may stand at its end only.

    Lines that are not JSON go to ``bad``, if it is given.
    """
    blank, path = None, decoder.path
    for number, text in enumerate(decoder.lines(), 1):
        if not text.strip():
            blank = blank or number
            continue
        if blank is not None:
            raise problem(path, blank, "a blank line", "one JSON object a line", "Remove it.")
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
            wrong = problem(
                path,
                number,
                f"{text[:60]!r} ({error})",
                "one JSON object a line",
                "The file may be cut short, or be one JSON array: write one object a line.",
            )
            if bad is None:
                raise wrong from error
            bad.add(wrong)
            continue
        yield number, row


def _make_text(row: object, recipe: str, path: Path, number: int) -> str:
    if not isinstance(row, dict) or "title" not in row:
        shown = f"fields {', '.join(row)}" if isinstance(row, dict) else repr(row)[:60]
        raise problem(path, number, shown, "an object with a 'title'", "Correct the line.")
    parts = [row["title"], row.get("content")] if recipe == "title+content" else [row["title"]]
    parts = ["" if part is None else part for part in parts]
    for name, part in zip(("title", "content"), parts):
        if not isinstance(part, str):
            raise problem(path, number, f"{name} {part!r:.60}", "a string", "Correct the line.")
    return " ".join(parts).strip()


def _read_json_texts(
    rows: Iterable[tuple[int, object]], path: Path, recipe: str, writer: LineWriter
) -> list[int]:
    """Writes the texts of a file without labels; returns the lines of empty ones."""
    empty = []
    for number, row in rows:
        text = _make_text(row, recipe, path, number)
        writer.append(text)
        if not text:
            empty.append(number)
    return empty


def _read_json_split(
    layout: Layout, role: str, recipe: str, place: TextPlace
) -> tuple[LineTexts, RawLabels, list[str]]:
    path, matrix_path = layout.files[role], layout.files.get(f"{role}_labels")
    _, first = next(json_rows(Decoder(path, place.reading.encoding)), (0, {}))
    if isinstance(first, dict) and "target_ind" not in first and matrix_path is not None:
        return _read_beside_matrix(path, matrix_path, role, recipe, place)

    def read(decoder: Decoder) -> tuple[LineTexts, RawLabels, list[int]]:
        ids, indptr, empty = array.array("i"), array.array("q", [0]), []
        dropped = weighted = 0
        with place.writer(role) as writer:
            for number, row in json_rows(decoder):
                text = _make_text(row, recipe, path, number)
                writer.append(text)
                if not text:
                    empty.append(number)
                odd = _extend(ids, row, path, number)
                dropped, weighted = dropped + odd[0], weighted + odd[1]
                indptr.append(len(ids))
            indices = np.frombuffer(ids, np.int32) if ids else np.zeros(0, np.int32)
            raw = RawLabels(
                path, indices, np.array(indptr), None, lambda row: row + 1, dropped, weighted
            )
            return writer.close(), raw, empty

    (texts, raw, empty), notes = with_decoder(path, read, place.reading)
    return texts, raw, notes + _empty_note(path, empty)


def _extend(ids: array.array, row: dict, path: Path, number: int) -> tuple[int, int]:
    """Adds a row's label ids; returns how many had a relevance of 0 or less, or another than 1."""
    labels, relevance = row.get("target_ind"), row.get("target_rel")
    dropped = weighted = 0
    advice = "Correct the line, or put trn_X_Y.txt and tst_X_Y.txt beside the files."
    if relevance is not None and relevance != []:
        is_list = isinstance(relevance, list) and set(map(type, relevance)) <= {int, float}
        if not is_list or any(value != value for value in relevance):  # NaN is no number
            shown, expected = (
                f"target_rel {relevance!r:.60}",
                "a list of numbers, one for each label",
            )
            raise problem(path, number, shown, expected, advice)
        if isinstance(labels, list) and len(relevance) != len(labels):
            shown = f"{len(labels)} target_ind and {len(relevance)} target_rel"
            expected = "a relevance for each label, or none"
            raise problem(path, number, shown, expected, advice)
    try:
        if not isinstance(labels, list) or not set(map(type, labels)) <= {int}:
            raise TypeError  # True is 1 to an array
        if relevance and not min(relevance) == max(relevance) == 1:
            weighted = sum(value > 0 and value != 1 for value in relevance)
            kept = [label for label, value in zip(labels, relevance) if value > 0]
            labels, dropped = kept, len(labels) - len(kept)
        ids.extend(labels)
    except (TypeError, OverflowError) as error:
        shown, expected = f"target_ind {labels!r:.60}", "a list of label ids (whole numbers from 0)"
        raise problem(path, number, shown, expected, advice) from error
    return dropped, weighted


def _read_beside_matrix(
    path: Path, matrix_path: Path, role: str, recipe: str, place: TextPlace
) -> tuple[LineTexts, RawLabels, list[str]]:
    raw = label_files.read_label_matrix(matrix_path)

    def read(decoder: Decoder) -> tuple[LineTexts, list[int]]:
        with place.writer(role) as writer:
            empty = _read_json_texts(json_rows(decoder), path, recipe, writer)
            return writer.close(), empty

    (texts, empty), notes = with_decoder(path, read, place.reading)
    _check_rows(path, len(texts), raw)
    return texts, raw, notes + _empty_note(path, empty)


def _read_lines_split(
    layout: Layout, role: str, recipe: str, place: TextPlace
) -> tuple[LineTexts, RawLabels, list[str]]:
    raw = label_files.read_label_matrix(layout.files[f"{role}_labels"])
    path = layout.files[role]
    texts, notes = read_line_file(path, role, place, len(raw.indptr) - 1)
    _check_rows(path, len(texts), raw)
    return texts, raw, notes


def read_line_file(
    path: Path, role: str, place: TextPlace, num_rows: int | None
) -> tuple[LineTexts, list[str]]:
    """Reads one text a line; blank lines past row ``num_rows`` (None: any) at the end are left out.

    A ``Yf.txt`` of ``id->text`` lines gives what stands behind the last arrow.
    """

    def read(decoder: Decoder) -> tuple[LineTexts, list[int]]:
        empty, waiting = [], 0
        with place.writer(role) as writer:
            for number, text in enumerate(decoder.lines(), 1):
                if path.name.removesuffix(".gz") == "Yf.txt" and text.strip():
                    text = _after_arrow(text, path, number)
                if not text.strip():
                    empty.append(number)
                    if num_rows is None or number > num_rows:
                        waiting += 1  # an empty row only if another text follows
                        continue
                for _ in range(waiting):
                    writer.append("")
                waiting = 0
                writer.append(text)
            return writer.close(), empty[: len(empty) - waiting]

    (texts, empty), notes = with_decoder(path, read, place.reading)
    return texts, notes + _empty_note(path, empty)


def _after_arrow(text: str, path: Path, number: int) -> str:
    if "->" not in text:
        raise problem(
            path,
            number,
            repr(text[:60]),
            "'id->label text'",
            "This is the bag-of-words file of that name; label texts are in lbl.json.gz.",
        )
    return text.rpartition("->")[2]


def _read_label_texts(
    layout: Layout, recipe: str, place: TextPlace, num_labels: int | None, notes: list[str]
) -> Sequence[str]:
    path = layout.files["labels"]
    if path.name.removesuffix(".gz").endswith(".txt"):
        texts, more = read_line_file(path, "labels", place, num_labels)
    else:

        def read(decoder: Decoder) -> tuple[LineTexts, list[int]]:
            with place.writer("labels") as writer:
                empty = _read_json_texts(json_rows(decoder), path, recipe, writer)
                return writer.close(), empty

        (texts, empty), more = with_decoder(path, read, place.reading)
        more += _empty_note(path, empty)
    notes += more
    if len(texts) == 0:
        raise problem(path, None, "no labels", "one label text a line", "Is it the right file?")
    return texts


def _check_rows(path: Path, num_texts: int, raw: RawLabels) -> None:
    num_rows = len(raw.indptr) - 1
    if num_texts != num_rows:
        raise problem(
            path,
            min(num_texts, num_rows) + 1,
            f"{num_texts} texts",
            f"{num_rows}, the rows of {raw.path.name}",
            "A line break inside a text shifts every later row: write one text a line again.",
        )


def _empty_note(path: Path, empty: list[int]) -> list[str]:
    if not empty:
        return []
    return [f"{path.name}: {len(empty)} empty texts (lines {listed(empty)})"]
