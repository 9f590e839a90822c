"""From a cell of a table to its labels: separators, lists, tags, quotes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence

from xmc_jax.data.readers.reading import Reading
from xmc_jax.data.texts import clean

Label = str | int
_TAGS = re.compile(r"\s*(<[^<>]+>\s*,?\s*)+")
_ITEM = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|-?\d+(?=[\s,\])}])"""
_LIST = re.compile(rf"\s*[\[({{]\s*(?:(?:{_ITEM})[\s,]*)*[\])}}]\s*", re.DOTALL)
_LINE_BREAKS = re.compile("[|\r\n]")


def splitter(reading: Reading) -> Callable[[str], list[str]]:
    """Returns what cuts a cell into its labels.

    ``["a", "b"]``, ``['a', 'b']`` and ``<a><b>`` are lists. All else is cut at the separator, which
    is | or a line break where none was given; one that was given also cuts ``{a,b}``. A given |
    says that nothing else separates: then no cell is taken for a list.
    """
    separator = reading.between_labels
    if reading.version == 1:
        return lambda cell: tidy(cell.split("|"))
    if separator == "|":
        return lambda cell: [unquoted(label) for label in tidy(cell.split("|"))]
    return lambda cell: _split(cell, separator)


def _split(cell: str, separator: str) -> list[str]:
    first = cell.lstrip()[:1]
    if first == "<" and _TAGS.fullmatch(cell):
        return tidy(re.findall("<([^<>]+)>", cell))
    if first in ("[", "(", "{") and _LIST.fullmatch(cell):
        return tidy(_listed(cell))
    if separator:
        if cell.strip()[:1] + cell.strip()[-1:] in ("[]", "{}"):
            cell = cell.strip()[1:-1]
        parts = tidy(cell.split(separator))
    else:
        parts = tidy(_LINE_BREAKS.split(cell) if "\n" in cell else cell.split("|"))
    return [unquoted(label) for label in parts] if '"' in cell else parts


def _listed(cell: str) -> list[str]:
    """Items of a list as JSON, Python, NumPy (no commas) or a database writes it."""
    try:
        return [str(item) for item in json.loads(cell)]
    except ValueError:
        return [_item(item) for item in re.findall(_ITEM, cell, re.DOTALL)]


def _item(item: str) -> str:
    try:
        return str(ast.literal_eval(item))
    except (ValueError, SyntaxError):  # a line break or half an escape within the quotes
        return item[1:-1]


def unquoted(cell: str) -> str:
    """A cell without the quotes that a spreadsheet puts around it; inner ones are doubled there."""
    if len(cell) > 1 and cell[0] == cell[-1] == '"':
        inside = cell[1:-1].replace('""', "")
        if '"' not in inside:
            return cell[1:-1].replace('""', '"')
    return cell


def tidy(labels: Sequence[str]) -> list[str]:
    """Labels as one line each, without blanks around them; blank ones are left out."""
    stripped = (clean(label).strip() for label in labels)
    return [label for label in stripped if label]
