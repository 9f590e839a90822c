"""Labelled points that a run was told of after training, in ``remembered/`` of its folder.

A file a call, ``000001.json`` and so on: ``{"texts": [...], "labels": [[...], ...]}``. It is there
whole or not at all, and one that is removed is forgotten. Vectors are not kept: points are embedded
by whatever checkpoint is opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from xmc_jax import files
from xmc_jax.data.texts import is_blank

FOLDER = "remembered"


class RememberedError(ValueError):
    """Something cannot be remembered, or what was remembered cannot be read."""


class Points(NamedTuple):
    """Labelled points.

    Attributes:
      texts: ``n`` texts.
      labels: the label texts of each.
    """

    texts: list[str]
    labels: list[list[str]]


def add(workdir: Path, points: Points) -> int:
    """Remember points; returns the number by which they can be forgotten.

    Raises:
      RememberedError: another number of labels than of texts, a blank text, a text without labels.
      OSError: the disk is full or read-only; nothing half-written is left.
    """
    _check(points)
    folder = workdir / FOLDER
    folder.mkdir(exist_ok=True)
    written = folder / f"new-{os.getpid()}.json"
    try:
        files.write_record(written, {"texts": points.texts, "labels": points.labels})
        number = max(numbers(workdir), default=0) + 1
        while True:  # another process may add at the same time
            try:
                os.link(written, _path(workdir, number))
                return number
            except FileExistsError:
                number += 1
    finally:
        files.unlink(written)


def forget(workdir: Path, number: int) -> None:
    """Forget what one call remembered.

    Raises:
      RememberedError: there is none of this number.
    """
    try:
        _path(workdir, number).unlink()
    except FileNotFoundError as error:
        known = ", ".join(map(str, numbers(workdir))) or "none"
        raise RememberedError(
            f"nothing is remembered by number {number}; known: {known}."
        ) from error


def numbers(workdir: Path) -> list[int]:
    """What is remembered, ascending."""
    paths = (workdir / FOLDER).glob("[0-9]*.json")
    return sorted(int(path.stem) for path in paths if path.stem.isdigit())


def read(workdir: Path, number: int) -> Points:
    """What one call remembered.

    Raises:
      RememberedError: the file is damaged.
    """
    path = _path(workdir, number)
    try:
        kept = files.read_record(path)
        points = Points(kept["texts"], kept["labels"])
        _check(points)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RememberedError(
            f"{path} is damaged ({error}). Put back a copy, or remove it: its points are forgotten "
            "then."
        ) from error
    return points


def read_all(workdir: Path) -> Points:
    """All that is remembered, in order."""
    parts = [read(workdir, number) for number in numbers(workdir)]
    return Points(
        [text for part in parts for text in part.texts],
        [labels for part in parts for labels in part.labels],
    )


def number_labels(
    points: Points, known: Iterable[str], num_known: int
) -> tuple[csr_matrix, list[str]]:
    """Labels as a matrix, and the texts of those that are new, numbered from L.

    Args:
      points: what is remembered.
      known: texts of the run's labels, by id.
      num_known: L.
    """
    names = {name.strip() for labels in points.labels for name in labels}
    ids: dict[str, int] = {}
    for number, text in enumerate(known):
        if (name := text.strip()) in names:
            ids.setdefault(name, number)
    new = [
        name
        for name in dict.fromkeys(name.strip() for labels in points.labels for name in labels)
        if name not in ids
    ]
    ids.update({name: num_known + place for place, name in enumerate(new)})
    rows = [sorted({ids[name.strip()] for name in labels}) for labels in points.labels]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    columns = np.array([label for row in rows for label in row], np.int32)
    shape = len(rows), num_known + len(new)
    return csr_matrix((np.ones(len(columns), np.float32), columns, indptr), shape), new


def _path(workdir: Path, number: int) -> Path:
    return workdir / FOLDER / f"{number:06}.json"


def _check(points: Points) -> None:
    texts, labels = points
    if len(texts) != len(labels):
        raise RememberedError(
            f"{len(texts)} texts, {len(labels)} lists of labels: expected as many."
        )
    if not texts:
        raise RememberedError("no points: expected at least one text with its labels.")
    for row, (text, names) in enumerate(zip(texts, labels)):
        if not isinstance(text, str) or is_blank(text):
            raise RememberedError(f"text {row} (counted from 0) is {text!r:.80}: expected a text.")
        if isinstance(names, str) or not isinstance(names, Sequence) or not names:
            raise RememberedError(
                f"the labels of text {row} (counted from 0) are {names!r:.80}: expected a list of "
                "label texts."
            )
        for name in names:
            if not isinstance(name, str) or is_blank(name):
                raise RememberedError(
                    f"a label of text {row} (counted from 0) is {name!r:.80}: expected its text."
                )
