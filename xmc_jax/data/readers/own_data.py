"""People's own data as a data set: label texts or ids, with or without label file and test rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from xmc_jax.data import splits
from xmc_jax.data.dataset import Dataset, Split, make_dataset
from xmc_jax.data.readers import label_files, own_checks, own_labels
from xmc_jax.data.readers.decoding import Decoder, with_decoder
from xmc_jax.data.readers.label_files import RawLabels
from xmc_jax.data.readers.layouts import Layout
from xmc_jax.data.readers.own_labels import are_ids
from xmc_jax.data.readers.own_rows import OwnRows, read_rows
from xmc_jax.data.readers.raw_files import problem
from xmc_jax.data.readers.raw_readers import TextPlace, json_rows, read_line_file
from xmc_jax.data.readers.reading import Reading
from xmc_jax.data.texts import LineTexts

_ID_LIST = re.compile(r"[\[({]?\s*\d+(\s*[\s,;]\s*\d+)*\s*[\])}]?", re.ASCII)
TEST_SHARE = 0.2
SPLIT_SEED = 0
_ID_ADVICE = (
    "Ids are line numbers, from 0, of a file labels.txt beside it with one label text a line; "
    "or write the label texts themselves."
)


def read_own(layout: Layout, place: TextPlace, *, share_of: str = "rows") -> Dataset:
    """Reads train (and test and labels where given); without test rows, 20 % are split off.

    Labels are ids (line numbers of the label file, from 0) or label texts; without a label file
    texts are numbered in the order in which they are met. In TSV and CSV, where all is text, labels
    are ids if all of them are digits and not all of them stand in the label file.

    Args:
      layout: the files.
      place: where texts go.
      share_of: what 20 % is a share of (`splits.hold_out`).

    Raises:
      DataError: whatever is wrong, with file and line.
    """
    roles: list[str] = [role for role in ("train", "test") if role in layout.files]
    rows = {role: read_rows(layout.files[role], role, place) for role in roles}
    if place.reading.version > 1:
        rows = _checked(layout, rows, place)
    notes = [note for role in roles for note in rows[role].notes]
    label_texts, ids = _number_labels(layout, rows, place, notes)
    by_role = {}
    for role in roles:
        by_role[role] = _make_split(layout, role, rows[role], ids[role], len(label_texts), notes)
    if "test" not in by_role:
        before = by_role["train"].labels.nnz
        by_role["train"], by_role["test"] = splits.hold_out(
            *(by_role["train"], label_texts),
            share=TEST_SHARE,
            max_rows=len(by_role["train"]),
            seed=SPLIT_SEED,
            share_of=share_of,
            notes=notes,
        )
        removed = before - by_role["train"].labels.nnz - by_role["test"].labels.nnz
        notes.append(
            f"{layout.files['train'].name}: no test file; {len(by_role['test'])} rows split off as "
            f"test (seed {SPLIT_SEED}; rows of equal text stay together), {removed} reverse pairs "
            "removed from training"
        )
    return make_dataset(layout.name, by_role["train"], by_role["test"], label_texts, notes)


def _checked(layout: Layout, rows: dict[str, OwnRows], place: TextPlace) -> dict[str, OwnRows]:
    """The rows, once their columns and cells look right; those of one text merged (long form)."""
    for file in rows.values():
        own_checks.check_columns(file, place.reading)
    if not rows["train"].names:
        raise _no_labels(rows["train"])
    if own_checks.holds_several(rows.values()):
        return rows
    if "labels" not in layout.files:  # else a label that is none of its texts is looked into
        own_checks.check_separator([*rows.values()], place.reading)
    return {
        role: file if f"{role}_filter" in layout.files else own_checks.merge_texts(file)
        for role, file in rows.items()
    }


def _number_labels(
    layout: Layout, rows: dict[str, OwnRows], place: TextPlace, notes: list[str]
) -> tuple[Sequence[str], dict[str, np.ndarray]]:
    """Returns the label texts, and for each file the id of each of its label names."""
    label_path, merged = layout.files.get("labels"), place.reading.merge_labels
    key = own_checks.fold if merged else str.strip
    if label_path is not None:
        texts, codes = _read_labels(label_path, place, notes)
        by_id = None
        if place.reading.version > 1:
            texts, by_id = own_labels.understand(
                texts, codes, label_path, rows.values(), place, notes, key
            )
        notes += own_checks.twins_note(label_path.name, texts, merged=merged)
        known: dict[str, int] = {}
        first = np.array([known.setdefault(key(text), i) for i, text in enumerate(texts)])
        if len(known) < len(texts) and not merged:
            repeated = len(texts) - len(known)
            notes.append(f"{label_path.name}: {repeated} label texts stand there more than once")
        numbers = {
            role: _look_up(file, known, label_path, key, place.reading, len(texts))
            if by_id is None
            else _look_up(file, by_id, label_path, str, place.reading)
            for role, file in rows.items()
        }
        if merged:  # ids too; those out of range are reported later
            numbers = {
                role: np.where((ids >= 0) & (ids < len(first)), first[ids % len(first)], ids)
                for role, ids in numbers.items()
            }
        return texts, numbers
    vocabulary: dict[str, tuple[int, str]] = {}  # by key: its id, and how it is written
    ids = {}
    for role, file in rows.items():
        _check_separators(file)
        if are_ids(file):
            only_ids = f"labels that are ids ({file.names[0]}), and no label file"
            line = int(file.first_lines[0])
            raise problem(file.path, line, only_ids, "label texts, or a label file", _ID_ADVICE)
        names = [str(name) for name in file.names]
        places = [vocabulary.setdefault(key(name), (len(vocabulary), name))[0] for name in names]
        ids[role] = np.array(places, dtype=np.int32)
    if not vocabulary:
        raise _no_labels(rows["train"])
    labels = [name for rows_ in rows.values() for name in map(str, rows_.names)]
    notes += own_checks.twins_note("labels", labels, merged=merged)
    with place.writer("labels") as writer:
        for _, name in vocabulary.values():
            writer.append(name)
        return writer.close(), ids


def _no_labels(rows: OwnRows) -> Exception:
    columns = ", ".join(rows.columns)[:200]
    return problem(
        rows.path,
        None,
        f"no row with labels{f', but {columns}' if columns else ''}",
        "labels",
        "Put labels behind the texts, or say where they are, as in --label_column=NAME.",
    )


def _check_separators(rows: OwnRows) -> None:
    """Refuses ids with something else than a bar between them, which would be one label each."""
    if rows.typed or are_ids(rows) or not all(_ID_LIST.fullmatch(str(name)) for name in rows.names):
        return
    first = next((i for i, name in enumerate(rows.names) if not str(name).isdigit()), None)
    if first is None:  # no labels at all
        return
    raise problem(
        rows.path,
        int(rows.first_lines[first]),
        f"labels {rows.names[first]!r}",
        "ids with | between them, as in 12|45",
        "Write them so, or say what stands between them, as in --separator=','; ids are line "
        "numbers, from 0, of a file labels.txt.",
    )


def _look_up(
    rows: OwnRows,
    known: dict[str, int],
    label_path: Path,
    key: Callable[[str], str],
    reading: Reading,
    num_lines: int | None = None,
) -> np.ndarray:
    """Returns the number of each label name, as its key is known, or else (if given) by line."""
    numbers = [known.get(key(str(name)), -1) for name in rows.names]
    if num_lines is not None and are_ids(rows) and (rows.typed or -1 in numbers):
        return own_labels.line_numbers(rows, num_lines, label_path)
    if -1 in numbers:
        _check_separators(rows)
        if reading.version > 1 and not own_checks.holds_several([rows]):
            own_checks.check_separator([rows], reading)
        first = numbers.index(-1)
        raise problem(
            rows.path,
            int(rows.first_lines[first]),
            f"label {rows.names[first]!r:.60}",
            f"a label text{'' if num_lines else ' or id'} of {label_path.name}",
            "Add it there, correct it, or leave the label file out.",
        )
    return np.array(numbers, dtype=np.int32)


def _make_split(
    layout: Layout, role: str, rows: OwnRows, ids: np.ndarray, num_labels: int, notes: list[str]
) -> Split:
    raw = RawLabels(
        path=rows.path,
        indices=ids[rows.codes] if len(rows.codes) else np.zeros(0, np.int32),
        indptr=rows.indptr,
        num_labels=None,
        line_of=lambda row: int(rows.lines[row]),
        any_order=True,
    )
    matrix, more = label_files.build_matrix(raw, num_labels)
    path = layout.files.get(f"{role}_filter")
    pairs, filter_notes = label_files.read_filter_pairs(path, len(rows.texts), num_labels)
    notes += more + filter_notes
    return Split(rows.texts, matrix, pairs)


def _read_labels(
    path: Path, place: TextPlace, notes: list[str]
) -> tuple[LineTexts, list[str] | None]:
    """Returns the lines, or the texts and the ids that JSON Lines have."""
    ids: list[str] | None = None
    if path.name.removesuffix(".gz").endswith(".txt"):
        texts, more = read_line_file(path, "labels", place, None)
    else:
        (texts, ids), more = with_decoder(
            path, lambda decoder: _json_labels(decoder, place), place.reading
        )
    notes += more
    if len(texts) == 0:
        raise problem(path, None, "no labels", "one label text a line", "Fill the file.")
    return texts, ids


def _json_labels(decoder: Decoder, place: TextPlace) -> tuple[LineTexts, list[str] | None]:
    ids = []
    with place.writer("labels") as writer:
        for line, row in json_rows(decoder):
            text = row.get("text", row.get("title")) if isinstance(row, dict) else row
            if not isinstance(text, str):
                expected = 'a string or {"text": "..."}'
                raise problem(decoder.path, line, f"{row!r:.60}", expected, "Correct the line.")
            writer.append(text)
            key = own_labels.json_id(row)
            ids += [] if key is None else [key]
        texts = writer.close()
    return texts, ids if len(ids) == len(texts) else None
