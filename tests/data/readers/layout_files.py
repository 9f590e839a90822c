"""One small data set written in every layout, for the reader tests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
from scipy import sparse

TRAIN = [("red apple", [0, 2]), ("green pear", [1]), ("nothing", []), ("ümlaut 第三", [0, 1, 2])]
TEST = [("old apple", [2]), ("blue plum", [0, 1])]
LABELS = ["apple", "pear", "fruit", "never used"]
TRAIN_FILTER, TEST_FILTER = [(0, 1), (3, 3)], [(1, 3)]


def matrix(rows) -> np.ndarray:
    """The dense labels of some rows."""
    dense = np.zeros((len(rows), len(LABELS)), np.float32)
    for row, (_, labels) in enumerate(rows):
        dense[row, labels] = 1
    return dense


def write(path: Path, content: str | bytes) -> None:
    """Writes a text or bytes, gzipped where the name says so."""
    content = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_filters(folder: Path, train="filter_labels_train.txt", test="filter_labels_test.txt"):
    """Writes both filter files."""
    for name, pairs in ((train, TRAIN_FILTER), (test, TEST_FILTER)):
        write(folder / name, "".join(f"{row} {label}\n" for row, label in pairs))


def json_lines(rows) -> str:
    """Rows of any objects as JSON Lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_json(folder: Path, suffix=".json.gz") -> Path:
    """Layout of the public raw archives."""
    for name, rows in (("trn", TRAIN), ("tst", TEST)):
        objects = [
            {
                "uid": str(i),
                "title": text,
                "content": f"about {text}",
                "target_ind": labels,
                "target_rel": [1.0] * len(labels),
            }
            for i, (text, labels) in enumerate(rows)
        ]
        write(folder / f"{name}{suffix}", json_lines(objects))
    labels = [{"uid": str(i), "title": text} for i, text in enumerate(LABELS)]
    write(folder / f"lbl{suffix}", json_lines(labels))
    write_filters(folder)
    return folder


def write_text_matrix(path: Path, rows) -> None:
    """Header, then ``id:1.00000`` tokens."""
    lines = [" ".join(f"{label}:1.00000" for label in labels) for _, labels in rows]
    write(path, f"{len(rows)} {len(LABELS)}\n" + "".join(line + "\n" for line in lines))


def write_lines_layout(folder: Path, names=("trn_X.txt", "tst_X.txt", "Y.txt"), npz=False) -> Path:
    """One text a line beside label matrices, as text or as SciPy files."""
    texts = [[text for text, _ in TRAIN], [text for text, _ in TEST], LABELS]
    for name, lines in zip(names, texts):
        write(folder / name, "".join(line + "\n" for line in lines))
    for short, rows in (("trn", TRAIN), ("tst", TEST)):
        if npz:
            sparse.save_npz(folder / f"Y.{short}.npz", sparse.csr_matrix(matrix(rows)))
        else:
            write_text_matrix(folder / f"{short}_X_Y.txt", rows)
    write_filters(folder, "trn_filter_labels.txt", "tst_filter_labels.txt")
    return folder
