"""The label file of people's own data: line n is label n, or each line has an id and a label."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
from absl import logging

from xmc_jax.data.readers.own_columns import LABEL_NAMES
from xmc_jax.data.readers.own_rows import OwnRows
from xmc_jax.data.readers.raw_files import problem
from xmc_jax.data.readers.raw_readers import TextPlace
from xmc_jax.data.texts import LineTexts

# Without blanks and underscores.
_ID_NAMES = frozenset(
    "# id ids idx index nr no number key code codes uid labelid labelids labelcode labelindex "
    "classid categoryid tagid topicid 编号 序号".split()
)
_TEXT_NAMES = frozenset(
    [
        *(name.replace("_", "") for name in LABEL_NAMES),
        *"labelnames labeltext labeltexts name names text texts title titles".split(),
    ]
)
_SEPARATORS = (r"\t", ",", ";", r"\|")
_NUMBER, _TEXT = r'"?(?P<id>\d+)"?', r"(?P<text>.+)"
_PATTERNS = (
    *(rf"{_NUMBER}\s*{mark}\s*{_TEXT}" for mark in _SEPARATORS),
    *(rf"{_TEXT}\s*{mark}\s*{_NUMBER}" for mark in _SEPARATORS),
    rf"(?P<id>\S+)\s*\t\s*{_TEXT}",
    *(rf"(?P<id>[^\s{mark}]*\d[^\s{mark}]*)\s*{mark}\s*{_TEXT}" for mark in _SEPARATORS[1:]),
)
_LIST = (
    rf"(?P<id>\d+)(?:\s*->\s*|[:.)]?\s+){_TEXT}"  # "0 git", "1. git": only if nothing is left out
)
_MOST_BROKEN_SHARE = 0.1
_LONG = 19  # digits of a number that no 64 bits hold
_Known = Callable[[Collection[str], Collection[str]], bool]  # whether rows name ids or texts
_ADVICE = "Write each label as ID<TAB>TEXT, or texts alone: then ids are line numbers from 0."


def understand(
    texts: LineTexts,
    ids: list[str] | None,
    path: Path,
    rows: Collection[OwnRows],
    place: TextPlace,
    notes: list[str],
    key: Callable[[str], str] = str.strip,
) -> tuple[LineTexts, dict[str, int] | None]:
    """Tells a column of ids, and a header, from label texts; what the rows name decides.

    Args:
      texts: lines of the label file.
      ids: of all of them, where JSON Lines have them.
      path: the file.
      rows: of all files.
      place: where the texts go without ids and header.
      notes: gets what was understood.
      key: what label texts are compared by.

    Returns:
      The label texts, and for each label that the rows name by an id of the file, or beside one,
      its number; None where ids are line numbers.

    Raises:
      DataError: an id twice, a line without one, a label that is neither an id nor a text.
    """
    lines = [text.strip() for text in texts]
    names = {str(name) for file in rows for name in file.names}
    in_rows = {key(name) for name in names}
    by_text = not any(file.typed and are_ids(file) for file in rows)
    by_text = by_text and in_rows <= {key(line) for line in lines}
    known = lambda keys, labels: (
        not (names.isdisjoint(keys) and in_rows.isdisjoint(map(key, labels)))
    )
    columns = None
    if ids is not None and not by_text:
        columns = _checked(path, lines, list(enumerate(ids, 1)), lines, known)
    elif not by_text:
        columns = _id_column(path, lines, known)
    if columns is None:
        if _is_header(path, lines, names, by_text):
            notes.append(f"{path.name}: line 1 ({lines[0]}) is taken for a header")
            texts = _written(place, lines[1:])
        if not by_text and min((int(name) for name in names if _is_short(name)), default=0) == 1:
            notes.append(
                f"{path.name}: no row has id 0 ({texts[0]!r:.60}), so it is a label without rows, "
                "or the ids count from 1 and every label is wrong. They were read as counting from "
                f"0: id 1 is line 2 ({texts[1]!r:.60}). If that is wrong: {_ADVICE}"
            )
            logging.warning("%s", notes[-1])
        return texts, None
    keys, labels, header = columns
    notes.append(
        f"{path.name}: each line has an id and a label"
        + (f"; line 1 ({' '.join(lines[0].split())}) is taken for a header" if header else "")
    )
    of_text: dict[str, int] = {}
    for number, label in enumerate(labels):
        of_text.setdefault(key(label), number)
    of_id = {code: number for number, code in enumerate(keys)}
    if all(_key(name) in of_id for name in names):
        return _written(place, labels), {name: of_id[_key(name)] for name in names}
    return _written(place, labels), {
        name: of_text[key(name)] for name in names if key(name) in of_text
    }


def are_ids(rows: OwnRows) -> bool:
    """Whether the labels of a file are numbers: in TSV and CSV, all of digits."""
    if rows.typed:
        return any(isinstance(name, int) for name in rows.names)
    return bool(rows.names) and all(_is_number(str(name)) for name in rows.names)


def line_numbers(rows: OwnRows, num_labels: int, label_path: Path) -> np.ndarray:
    """Returns the labels of a file, which are line numbers from 0.

    Raises:
      DataError: they count from 1, or one has more digits than any number of lines.
    """
    longest = max(range(len(rows.names)), key=lambda i: len(str(rows.names[i])))
    name, line = str(rows.names[longest]), int(rows.first_lines[longest])
    expected = f"ids from 0 to {num_labels - 1} (there are {num_labels} texts, counted from 0)"
    if len(name) >= _LONG:
        raise problem(rows.path, line, f"label id {name:.60}", expected, _ADVICE)
    numbers = np.array([int(name) for name in rows.names], np.int64)
    if numbers.min() == 1 and numbers.max() == num_labels:
        line = int(rows.first_lines[numbers.argmax()])
        shown = f"label id {num_labels}, and no id 0: these ids count from 1"
        advice = f"Write {label_path.name} with the ids, as 1<TAB>TEXT."
        raise problem(rows.path, line, shown, expected, advice)
    return numbers  # others that are out of range are found with their row


def json_id(row: object) -> str | None:
    """The id of a label in JSON Lines, if it has one."""
    if not isinstance(row, dict):
        return None
    key = next((row[name] for name in ("id", "label_id", "code", "uid") if name in row), None)
    return str(key) if isinstance(key, int | str) else None


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _is_short(name: str) -> bool:
    """Whether it is a number that may be one of a line."""
    return _is_number(name) and len(name) < _LONG


def _key(name: str) -> str:
    """An id as it is compared: 007 is 7."""
    return name.lstrip("0") or "0" if _is_number(name) else name


def _id_column(
    path: Path, lines: Sequence[str], known: _Known
) -> tuple[list[str], Sequence[str], bool] | None:
    """Returns ids, labels, and whether line 1 is a header; None where there are no ids."""
    cells = [_plain(cell) for cell in re.split("[\t,;|]", lines[0])]
    is_named = len(cells) > 1 and bool(_ID_NAMES & set(cells))
    if is_named and len(cells) > 2:
        shown = f"columns named {', '.join(cells)}"
        raise problem(path, 1, shown, "two columns, an id and a label", _ADVICE)
    pattern = _named_pattern(cells, lines[0]) if is_named else _pattern(lines)
    if pattern is None:
        return None
    matches = [re.fullmatch(pattern, line, re.ASCII) for line in lines]
    header = is_named or (len(lines) > 2 and matches[0] is None and len(cells) == 2)
    rows = [
        (number, match)
        for number, (line, match) in enumerate(zip(lines, matches), 1)
        if line and not (header and number == 1)
    ]
    ids = [(number, _key(match["id"].strip()) if match else None) for number, match in rows]
    labels = [_bare(match["text"]) if match else "" for _, match in rows]
    if pattern == _LIST and not _is_list([key for _, key in ids], labels):
        return None
    return _checked(path, lines, ids, labels, known, header=header)


def _checked(
    path: Path,
    lines: Sequence[str],
    ids: Sequence[tuple[int, str | None]],
    labels: Sequence[str],
    known: _Known,
    *,
    header: bool = False,
) -> tuple[list[str], Sequence[str], bool] | None:
    """The same, of (line, id) pairs; None where the rows don't know these ids."""
    keys = [_key(key) for _, key in ids if key is not None]
    if not header and not all(map(_is_number, keys)) and not known(keys, labels):
        return None
    seen: set[str] = set()
    for number, key in ids:
        if key is None or _key(key) in seen:
            shown = repr(lines[number - 1][:60]) if key is None else f"id {key} a second time"
            raise problem(path, number, shown, "an id and a label, each id once", _ADVICE)
        seen.add(_key(key))
    return keys, labels, header


def _named_pattern(cells: Sequence[str], header: str) -> str:
    """Where a header says which column is the id."""
    mark = re.escape(re.findall("[\t,;|]", header)[0])
    code = rf'"?(?P<id>[^{mark}]+?)"?'
    is_first = cells[0] in _ID_NAMES
    return rf"{code}\s*{mark}\s*{_TEXT}" if is_first else rf"{_TEXT}\s*{mark}\s*{code}"


def _pattern(lines: Sequence[str]) -> str | None:
    """The first pattern that nearly all lines have, the first of which may be a header."""
    body = [line for line in lines[len(lines) > 1 :] if line]
    for pattern in (*_PATTERNS, _LIST):
        fits = re.compile(pattern, re.ASCII).fullmatch
        broken, most = 0, _MOST_BROKEN_SHARE * len(body)
        for line in body:
            broken += fits(line) is None
            if broken > most:
                break
        else:
            return pattern if body else None
    return None


def _is_list(ids: Sequence[str | None], labels: Sequence[str]) -> bool:
    """Whether numbers with a blank behind are those of a list, not "1 star", "2 stars"."""
    numbers = sorted(int(key) for key in ids if key is not None and len(key) < _LONG)
    if len(set(labels)) < len(labels):
        return False
    return numbers in (list(range(len(ids))), list(range(1, len(ids) + 1)))


def _is_header(path: Path, lines: Sequence[str], names: set[str], by_text: bool) -> bool:
    """Whether line 1 names what stands below, and is no label; ids must not become others by it."""
    if _plain(lines[0]) not in _TEXT_NAMES or lines[0] in names or len(lines) < 2:
        return False
    if by_text or not all(map(_is_number, names)):
        return True
    numbers = [int(name) for name in names if len(name) < _LONG]
    is_label = max(numbers, default=0) >= len(lines) - 1  # the ids need every line
    if is_label and min(numbers) > 0:
        shown = f"{lines[0]!r}, a label or a header: the data have ids from 1 to {max(numbers)}"
        raise problem(path, 1, shown, "a label with id 0", _ADVICE)
    return not is_label


def _bare(cell: str) -> str:
    """A cell without its quotes."""
    cell = cell.strip()
    if len(cell) > 1 and cell[0] == cell[-1] == '"':
        cell = cell[1:-1].replace('""', '"').strip()
    return cell


def _plain(name: str) -> str:
    """A column's name as it is compared."""
    return re.sub(r"[\s_-]", "", _bare(name)).casefold()


def _written(place: TextPlace, labels: Sequence[str]) -> LineTexts:
    with place.writer("labels") as writer:
        for label in labels:
            writer.append(label)
        return writer.close()
