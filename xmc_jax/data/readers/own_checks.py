"""What looks wrong in a file of rows as a whole: one cell one label, columns, long form, twins."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
import shlex
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np

from xmc_jax.data import splits
from xmc_jax.data.readers.own_columns import LABEL_NAMES, TEXT_NAMES, normal
from xmc_jax.data.readers.own_rows import OwnRows
from xmc_jax.data.readers.raw_files import problem
from xmc_jax.data.readers.reading import Reading
from xmc_jax.data.texts import INVISIBLE

# A blank is none: most labels of several words hold one.
_SEPARATORS = (
    *",;/>:+~^#*$\\\t、»→•·・\uff0c\uff1b\uff5c\u203a",
    *(" - ", " \u2013 ", " \u2014 "),
)
_CELLS_SHARE, _PARTS_SHARE = 0.2, 0.8
_SAMPLE_ROWS, _FEWER_ROWS = 10_000, 1_000
_LONG_FORM = 50  # rows of a text, at most
_LONGER = 1.5  # texts than labels, on average, where columns look swapped
_NAME = re.compile(r"[^\W\d_]\w*([ _-]\w+){0,2}")
_AS_IT_IS = "if the labels are right as they are, --separator='|'"


def holds_several(files: Iterable[OwnRows]) -> bool:
    """Whether some row has two labels: then their separator was found."""
    return any(np.diff(rows.indptr).max(initial=0) > 1 for rows in files)


def check_columns(rows: OwnRows, reading: Reading) -> None:
    """Refuses a first row of names that are not known, and columns that look swapped.

    Raises:
      DataError: with the switch.
    """
    if rows.typed or rows.columns or _settled(reading):
        return
    if _begins_with_names(rows):
        name = rows.names[rows.codes[0]]
        raise problem(
            rows.path,
            int(rows.lines[0]),
            f"a first row that reads like names ({rows.texts[0]}, {name}): its label is no other "
            "row's",
            "the names in use, such as text and labels, or no names",
            f"If they are names, say --text_column={shlex.quote(rows.texts[0])} "
            f"--label_column={shlex.quote(str(name))}; if it is data, --text_column=1 "
            "--label_column=2.",
        )
    if not (reading.text_column or reading.label_column) and _look_swapped(rows):
        raise problem(
            rows.path,
            int(rows.lines[0]),
            f"columns that look swapped: {rows.texts[0][:60]!r}, which recurs, and then "
            f"{str(rows.names[rows.codes[0]])[:60]!r}",
            "the text first, then its labels",
            "Say --text_column=2 --label_column=1; if they are right as they are, "
            "--text_column=1 --label_column=2.",
        )


def _settled(reading: Reading) -> bool:
    """Whether flags say what is taken for granted where they say nothing."""
    return (reading.text_column, reading.label_column) == ("1", "2")


def _begins_with_names(rows: OwnRows) -> bool:
    """Whether the first row has one label, which no other row has though most labels recur."""
    first = rows.codes[: rows.indptr[1]]
    if len(first) != 1 or len(rows.texts) < 3:
        return False
    text, label = rows.texts[0], str(rows.names[first[0]])
    counts = np.bincount(rows.codes)
    if counts[first[0]] > 1 or not (_NAME.fullmatch(text) and _NAME.fullmatch(label)):
        return False
    recurring = (counts[rows.codes[1:]] > 1).mean() if len(rows.codes) > 1 else 0
    known = TEXT_NAMES | LABEL_NAMES
    if normal(text) in known or normal(label) in known:
        return bool(recurring >= 0.5)
    lengths = rows.texts.byte_lengths()[1:]
    return bool(recurring >= 0.8 and len(text.encode()) < np.quantile(lengths, 0.01))


def _look_swapped(rows: OwnRows) -> bool:
    """Whether nearly every label is another one and long, while what stands for texts recurs.

    Cells for texts are cut as those for labels would be: by what separates them, if anything does.
    Rows of one text in a sequence are the long form: a query, then one of its many labels.
    """
    if len(rows.codes) < 10 or len(rows.names) < 0.9 * len(rows.codes):
        return False
    texts = rows.texts[:_SAMPLE_ROWS]
    runs = 1 + sum(one != other for one, other in itertools.pairwise(texts))
    if runs < 0.7 * len(texts) and len(texts) <= _LONG_FORM * runs:
        return False
    cells = collections.Counter(texts[:_FEWER_ROWS])
    names, counts = list(cells), np.array(list(cells.values()))
    marks = ["|", *(mark for mark in _SEPARATORS if _separates(mark, names, counts))]
    between = re.compile("|".join(map(re.escape, marks)))
    parts = [part.strip() for text in texts for part in between.split(text) if part.strip()]
    labels = [str(name) for name in rows.names[:_SAMPLE_ROWS]]
    recur = len(set(parts)) <= 0.5 * len(parts)
    return bool(parts and recur and _mean_length(labels) >= _LONGER * _mean_length(parts))


def _mean_length(texts: Sequence[str]) -> float:
    return sum(map(len, texts)) / len(texts)


def check_separator(files: Sequence[OwnRows], reading: Reading) -> None:
    """Refuses cells that hold several labels each, as one label; for files where none has two.

    Raises:
      DataError: with the separators it could be, and the switch.
    """
    if reading.separator:
        return
    cells: collections.Counter[str] = collections.Counter()
    for rows in files:  # of all, so that what a few rows have in common is seen
        counts = np.bincount(rows.codes, minlength=len(rows.names))
        for name, count in zip(rows.names, counts.tolist()):
            cells[str(name)] += count
    names, counts = list(cells), np.array(list(cells.values()))
    possible = [mark for mark in _SEPARATORS if _separates(mark, names, counts)]
    if not possible:
        return
    path, line, name = next(
        (rows.path, int(line), str(name))
        for rows in files
        for name, line in zip(rows.names, rows.first_lines)
        if possible[0] in str(name)
    )
    flags = " or ".join(f"--separator={_as_flag(mark, names)}" for mark in possible)
    raise problem(
        path,
        line,
        f"label {name[:80]!r}, whose parts recur in other labels, and no row with two",
        "| between labels",
        f"Say what stands between them: {flags}; {_AS_IT_IS}.",
    )


def _as_flag(mark: str, names: Sequence[str]) -> str:
    """A separator as it is typed, with the blanks that always stand around it."""
    spaced = all(f" {mark} " in name for name in names if mark in name)
    return shlex.quote(f" {mark} " if spaced else mark.replace("\t", "\\t"))


def _separates(mark: str, names: Sequence[str], counts: np.ndarray) -> bool:
    """Whether a fifth of the cells hold it, and nearly all parts recur, alone or in other cells."""
    holding = {}
    for i, name in enumerate(names):
        if mark in name:
            parts = [fold(part) for part in name.split(mark) if part.strip()]
            if len(parts) > 1:
                holding[i] = parts
    if sum(int(counts[i]) for i in holding) < _CELLS_SHARE * counts.sum():
        return False
    cells = collections.Counter(part for parts in holding.values() for part in set(parts))
    cells.update(fold(name) for i, name in enumerate(names) if i not in holding)
    recurs = [cells[part] > 1 for parts in holding.values() for part in parts]
    return sum(recurs) >= _PARTS_SHARE * len(recurs)


def merge_texts(rows: OwnRows) -> OwnRows:
    """Rows of one text as one row with all their labels: the long form, one label a row."""
    (codes,) = splits.text_codes(rows.texts)
    blank = np.flatnonzero(rows.texts.byte_lengths() == 0)
    codes[blank] = codes.max(initial=0) + 1 + np.arange(len(blank))  # they are no text in common
    _, first, group = np.unique(codes, return_index=True, return_inverse=True)
    if len(first) == len(codes):
        return rows
    order = np.argsort(first)  # groups by the row they begin with
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    of_entry = np.repeat(place[group], np.diff(rows.indptr))
    counts = np.bincount(of_entry, minlength=len(first))
    kept = first[order]
    note = (
        f"{rows.path.name}: no row has two labels, so rows of one text were merged: "
        f"{len(codes):,} rows, {len(kept):,} texts"
    )
    return dataclasses.replace(
        rows,
        texts=rows.texts.take(kept),
        codes=rows.codes[np.argsort(of_entry, kind="stable")],
        indptr=np.concatenate([[0], np.cumsum(counts)]),
        lines=rows.lines[kept],
        notes=[*rows.notes, note],
    )


def fold(label: str) -> str:
    """What twins share: blanks, invisible characters, composition and case do not count."""
    text = INVISIBLE.sub("", unicodedata.normalize("NFC", label))
    return " ".join(text.split()).casefold()


def twins(labels: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of labels that `fold` makes one, each with the first of its kind."""
    first: dict[str, str] = {}
    pairs = ((first.setdefault(fold(label), label), label) for label in labels)
    return [(one, other) for one, other in pairs if one != other]


def twins_note(where: str, labels: Sequence[str], *, merged: bool) -> list[str]:
    """The note on twins: how many, the first three, and the flag."""
    pairs = twins(labels)
    if not pairs:
        return []
    shown = ", ".join(_visible(one, other) for one, other in pairs[:3])
    what = "were merged with it" if merged else "stay apart; --merge_labels joins them"
    return [
        f"{where}: {len(pairs):,} labels differ from another one by blanks, invisible characters, "
        f"composition or case alone and {what} ({shown}{', ...' if len(pairs) > 3 else ''})"
    ]


def _visible(one: str, other: str) -> str:
    """Both, so that their difference is seen."""
    same = unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", other)
    return " and ".join(map(ascii if same else repr, (one, other)))
