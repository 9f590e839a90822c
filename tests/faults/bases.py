"""Sound data sets in every accepted layout, with what a reader must find in them."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
from collections.abc import Callable

import numpy as np
from scipy import sparse

FOLDER, FIFO, DANGLING = "folder", "fifo", "dangling"  # instead of a file's content
Content = bytes | str
WORDS = {
    "latin": ("apple river engine violin planet garden castle copper", "red old small loud cold"),
    "umlauts": ("Äpfel Flüße Größe Öl Übung straße café naïve", "grün schön früh süß alt"),
    "chinese": ("苹果 河流 引擎 小提琴 行星 花园 城堡 铜", "红 老 小 响 冷"),
    "hindi": ("सेब नदी इंजन वायलिन ग्रह बगीचा किला तांबा", "लाल पुराना छोटा ऊँचा ठंडा"),
    "symbols": ("c++ c# .net 🍎🍏 at&t r/w node.js x-ray", "e-mail 🚀go q&a a.b #1"),
}


@dataclasses.dataclass
class Base:
    """A data set on disk, and what stands in it.

    Attributes:
      layout: its name in `LAYOUTS`.
      files: content by path; of ``.gz`` files before they are compressed.
      given: the path that is given to the reader; "" = the folder.
      rows: text and labels of each row, by the file and the line (from 0) it stands on.
      label_lines: for layouts that give labels by number: their file, and the line of each.
      fixed: rows belong to lines of other files, so that their number counts.
      kind: how rows are written: "tsv", "csv", "jsonl", "json", "lines".
    """

    layout: str
    files: dict[str, Content]
    given: str
    rows: dict[tuple[str, int], tuple[str, frozenset[str]]]
    label_lines: dict[str, tuple[str, int]] = dataclasses.field(default_factory=dict)
    fixed: bool = False
    kind: str = "tsv"

    @property
    def labels(self) -> set[str]:
        """All label texts."""
        return set(self.label_lines) or set().union(*(labels for _, labels in self.rows.values()))


@dataclasses.dataclass
class Points:
    """Rows of a data set before they are written."""

    train: list[tuple[str, list[str]]]
    test: list[tuple[str, list[str]]]
    labels: list[str]


def points(rng: np.random.Generator) -> Points:
    """Some rows of unique texts; labels are two words of their text, so most recur."""
    topics, kinds = (words.split() for words in WORDS[str(rng.choice(list(WORDS)))])
    made, topics, kinds = [], topics[:2], kinds[:4]  # so that labels recur
    for row in range(int(rng.integers(24, 48))):
        topic, (first, second) = rng.choice(topics), rng.choice(kinds, 2, replace=False)
        labels = [f"{first} {topic}", f"{second} {topic}"][: int(rng.integers(1, 3))]
        made.append((f"{first} {topic} {second} n{row}x", labels))
    labels = sorted({label for _, labels in made for label in labels})
    cut = len(made) * 3 // 4
    return Points(made[:cut], made[cut:], labels)


def lines(rows: list[str]) -> bytes:
    """Rows as a utf-8 file."""
    return "".join(f"{row}\n" for row in rows).encode()


def csv_line(*fields: str) -> str:
    """One row of CSV without its end."""
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(fields)
    return out.getvalue()


def places(rows: list[tuple[str, list[str]]], file: str, first: int = 0) -> dict:
    """`Base.rows` of rows that stand one a line."""
    return {(file, first + i): (text, frozenset(labels)) for i, (text, labels) in enumerate(rows)}


def _own(ending: str, row: Callable[[str, list[str]], str], header: str = "", *, split=False):
    def make(data: Points) -> Base:
        write = lambda rows: lines([header] * bool(header) + [row(*r) for r in rows])
        kind, first = ending.removesuffix(".gz"), int(bool(header))
        if not split:
            name, rows = f"points.{ending}", data.train + data.test
            return Base("", {name: write(rows)}, name, places(rows, name, first), kind=kind)
        names = f"train.{ending}", f"test.{ending}"
        files = {name: write(rows) for name, rows in zip(names, (data.train, data.test))}
        rows = places(data.train, names[0], first) | places(data.test, names[1], first)
        return Base("", files, "", rows, kind=kind)

    return make


def _ids(ending: str, row: Callable[[str, list[int]], str], *, json_labels: bool = False):
    def make(data: Points) -> Base:
        number = {label: i for i, label in enumerate(data.labels)}
        write = lambda text, labels: row(text, [number[label] for label in labels])
        base = _own(ending, write, split=True)(data)
        name = "labels.jsonl" if json_labels else "labels.txt"
        shown = [json.dumps({"text": x}) for x in data.labels] if json_labels else data.labels
        base.files[name] = lines(shown)
        base.label_lines = {label: (name, i) for i, label in enumerate(data.labels)}
        return base

    return make


def _json(ending: str, matrix: str = ""):
    def make(data: Points) -> Base:
        number = {label: i for i, label in enumerate(data.labels)}
        names = f"trn.{ending}", f"tst.{ending}", f"lbl.{ending}"
        base = Base("", {}, "", {}, kind="json", fixed=bool(matrix))
        for name, rows in zip(names, (data.train, data.test)):
            objects = []
            for i, (text, labels) in enumerate(rows):
                ids = [number[label] for label in labels]
                objects.append({"uid": str(i), "title": text, "content": f"about {text}"})
                if not matrix:
                    objects[-1] |= {"target_ind": ids, "target_rel": [1.0] * len(ids)}
            base.files[name] = lines([json.dumps(row) for row in objects])
            base.rows |= places(rows, name)
        objects = [{"uid": str(i), "title": label} for i, label in enumerate(data.labels)]
        base.files[names[2]] = lines([json.dumps(row) for row in objects])
        base.label_lines = {label: (names[2], i) for i, label in enumerate(data.labels)}
        _matrices(base, data, matrix)
        return base

    return make


def _lines(matrix: str):
    def make(data: Points) -> Base:
        base = Base("", {}, "", {}, kind="lines", fixed=True)
        for name, rows in (("trn_X.txt", data.train), ("tst_X.txt", data.test)):
            base.files[name] = lines([text for text, _ in rows])
            base.rows |= places(rows, name)
        base.files["Y.txt"] = lines(data.labels)
        base.label_lines = {label: ("Y.txt", i) for i, label in enumerate(data.labels)}
        _matrices(base, data, matrix)
        return base

    return make


def _matrices(base: Base, data: Points, matrix: str) -> None:
    number = {label: i for i, label in enumerate(data.labels)}
    for short, long, rows in (("trn", "train", data.train), ("tst", "test", data.test)):
        ids = [[number[label] for label in labels] for _, labels in rows]
        if matrix == "text":
            shown = [" ".join(f"{label}:1.00000" for label in labels) for labels in ids]
            base.files[f"{short}_X_Y.txt"] = lines([f"{len(rows)} {len(number)}", *shown])
        elif matrix == "npz":
            base.files[f"Y.{short}.npz"] = npz(ids, len(number))
        pairs = [f"{row} {labels[0] - 1}" for row, labels in enumerate(ids[:3]) if labels[0]]
        base.files[f"filter_labels_{long}.txt"] = lines(pairs)


def npz(ids: list[list[int]], num_labels: int) -> bytes:
    """Rows of ids as `scipy.sparse.save_npz` writes them."""
    indptr = np.cumsum([0, *map(len, ids)])
    matrix = (np.ones(indptr[-1], np.float32), np.concatenate(ids), indptr)
    out = io.BytesIO()
    sparse.save_npz(out, sparse.csr_matrix(matrix, shape=(len(ids), num_labels)))
    return out.getvalue()


_bars = lambda text, labels: f"{text}\t{'|'.join(map(str, labels))}"
_csv = lambda text, labels: csv_line(text, "|".join(map(str, labels)))
_object = lambda text, labels: json.dumps({"text": text, "labels": labels}, ensure_ascii=False)
LAYOUTS: dict[str, Callable[[Points], Base]] = {
    "tsv": _own("tsv", _bars),
    "tsv.gz": _own("tsv.gz", _bars),
    "tsv, header": _own("tsv", _bars, "text\tlabels"),
    "csv": _own("csv", _csv),
    "csv, header": _own("csv", _csv, "text,labels"),
    "jsonl": _own("jsonl", _object),
    "folder of tsv": _own("tsv", _bars, split=True),
    "folder of jsonl": _own("jsonl", _object, split=True),
    "tsv, ids": _ids("tsv", _bars),
    "csv, ids": _ids("csv", _csv),
    "jsonl, ids": _ids("jsonl", _object, json_labels=True),
    "json": _json("json"),
    "json.gz": _json("json.gz"),
    "json, matrix": _json("json", "text"),
    "json, npz": _json("json.gz", "npz"),
    "lines": _lines("text"),
    "lines, npz": _lines("npz"),
}


def make(layout: str, rng: np.random.Generator) -> Base:
    """A data set of a layout."""
    base = LAYOUTS[layout](points(rng))
    return dataclasses.replace(base, layout=layout)


def on_disk(name: str, content: bytes) -> bytes:
    """Bytes of a file of that name."""
    return gzip.compress(content, 1, mtime=0) if name.endswith(".gz") else content
