"""The canonical form on disk: mapped texts and arrays, written once, loaded at once."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse import csr_matrix

from xmc_jax import files
from xmc_jax.data import texts as texts_lib
from xmc_jax.data.dataset import Dataset, Split, digest
from xmc_jax.data.readers.layouts import Layout
from xmc_jax.data.readers.raw_files import DataError, problem
from xmc_jax.data.readers.reading import AS_FOUND, Reading
from xmc_jax.data.texts import LineTexts

FORMAT_VERSION = 1
DESCRIPTION = "dataset.json"
_TEXT_FILES = {"train": "train.txt", "test": "test.txt", "labels": "labels.txt"}
_ARRAYS = (
    *(f"{role}_offsets.npy" for role in _TEXT_FILES),
    *(f"{role}_{name}" for role in ("train", "test") for name in ("labels.npz", "filter.npy")),
)
_KEYS = {"name": str, "digest": str, "notes": list, "files": dict}
ADVICE = (
    "Choose another folder; that of copies made by training is the environment variable XMC_CACHE."
)
AGAIN = "Delete the folder and write it again with python -m xmc_jax.prepare."


def save(
    dataset: Dataset,
    folder: str | os.PathLike[str],
    *,
    recipe: str | None = None,
    reading: Reading = AS_FOUND,
) -> None:
    """Writes the canonical form; a folder that already holds this very data set is left as it is.

    Everything is written beside the folder under a temporary name, then renamed.

    Args:
      dataset: what to write.
      folder: must not exist, or be empty, or hold the same data set.
      recipe: what the texts were made of ("title", ...), for the record.
      reading: how its files were read, which predictions go by.

    Raises:
      DataError: the folder holds something else.
    """
    folder = Path(folder)
    if _holds(folder, dataset):
        return
    check_free(folder)
    same = lambda folder: _holds(folder, dataset)
    with files.publishing_folder(folder, whole=same, advice=ADVICE) as temporary:
        write_into(dataset, temporary, recipe, reading)


def check_free(folder: Path) -> None:
    """Raises `DataError` unless the folder does not exist or is empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(
            f"{folder}: found something there already; expected a new or empty folder (or one that "
            "holds this very data set). Choose another place, or delete it."
        )


def is_canonical(folder: Path) -> bool:
    """Whether a folder holds a canonical form."""
    return (folder / DESCRIPTION).is_file()


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a canonical form, as it was written."""
    try:
        check(folder)
    except DataError:
        return False
    return True


def _holds(folder: Path, dataset: Dataset) -> bool:
    return is_canonical(folder) and check(folder)["digest"] == dataset.digest


def write_into(
    dataset: Dataset, folder: Path, recipe: str | None = None, reading: Reading = AS_FOUND
) -> None:
    """Writes the files of the canonical form into an existing folder; the description last."""
    sources = {
        "train": dataset.train.texts,
        "test": dataset.test.texts,
        "labels": dataset.label_texts,
    }
    for role, name in _TEXT_FILES.items():
        texts = sources[role]
        if not (isinstance(texts, LineTexts) and texts.is_whole(folder / name)):
            texts = texts_lib.write_lines(folder / name, texts)
        np.save(folder / f"{role}_offsets.npy", texts.offsets())
    for role, split in (("train", dataset.train), ("test", dataset.test)):
        labels = split.labels
        # Bytes on disk: every value is 1, and reading 4 bytes each would double the time.
        values = np.ones(labels.nnz, dtype=np.uint8)
        matrix = csr_matrix((values, labels.indices, labels.indptr), shape=labels.shape)
        sparse.save_npz(folder / f"{role}_labels.npz", matrix, compressed=False)
        np.save(folder / f"{role}_filter.npy", np.asarray(split.filter_pairs, dtype=np.int64))
    description = {
        "format_version": FORMAT_VERSION,
        "name": dataset.name,
        "num_train": len(dataset.train),
        "num_test": len(dataset.test),
        "num_labels": len(dataset.label_texts),
        "digest": dataset.digest,
        "text": recipe,
        "reading": dataclasses.asdict(reading),
        "notes": list(dataset.notes),
        "files": files.checksums(folder),
    }
    files.write_record(folder / DESCRIPTION, description)


def read_description(folder: Path) -> dict:
    """Returns ``dataset.json``.

    Raises:
      DataError: not such a file, or one of another format version.
    """
    path = folder / DESCRIPTION
    try:
        description = files.read_record(path)
        version = description["format_version"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        unread = f"a description that cannot be read ({error!r:.200})"
        raise problem(path, None, unread, "one written by this package", AGAIN) from error
    if version != FORMAT_VERSION:
        expected = f"version {FORMAT_VERSION}"
        raise problem(path, None, f"format version {version!r:.60}", expected, AGAIN)
    for key, kind in _KEYS.items():
        if not isinstance(description.get(key), kind):
            shown = f"{key} = {description.get(key)!r:.60}"
            raise problem(path, None, shown, f"a {kind.__name__}", AGAIN)
    lacking = {*_TEXT_FILES.values(), *_ARRAYS} - description["files"].keys()
    if lacking:
        shown = f"files without {', '.join(sorted(lacking))}"
        raise problem(path, None, shown, "all files of a data set", AGAIN)
    return description


def check(folder: Path) -> dict:
    """Verifies the checksums of all files; returns the description.

    Raises:
      DataError: a file is missing or is not as it was written.
    """
    description = read_description(folder)
    wrong = files.damage(folder, description["files"])
    if wrong is not None:
        raise DataError(f"{folder / wrong} (it was changed). {AGAIN}")
    return description


def load_canonical(layout: Layout) -> Dataset:
    """Maps a canonical folder; each file is read once, to verify its checksum.

    Raises:
      DataError: a file is missing or is not as it was written.
    """
    folder = layout.root
    description = check(folder)
    checked = all(isinstance(entry, list) for entry in description["files"].values())
    texts = {}
    for role, name in _TEXT_FILES.items():
        offsets = _read(folder / f"{role}_offsets.npy", lambda path: np.load(path, "r"))
        texts[role] = LineTexts(folder / name, offsets=offsets if checked else None)
    splits = {}
    for role in ("train", "test"):
        matrix = _read(folder / f"{role}_labels.npz", lambda path: sparse.load_npz(path).tocsr())
        matrix.data = np.ones(matrix.nnz, dtype=np.float32)
        matrix.has_canonical_format = True
        pairs = _read(folder / f"{role}_filter.npy", np.load)
        splits[role] = Split(texts[role], csr_matrix(matrix), pairs)
        if len(texts[role]) != matrix.shape[0] or len(texts["labels"]) != matrix.shape[1]:
            expected = f"a matrix for {len(texts[role])} texts, {len(texts['labels'])} labels"
            path = folder / f"{role}_labels.npz"
            raise problem(path, None, f"shape {matrix.shape}", expected, AGAIN)
    kept = description["digest"]
    if not checked:  # of an earlier version: the digest, which takes longer, is of all content
        now = digest(splits["train"], splits["test"], texts["labels"])
        if now != kept:
            raise problem(folder, None, f"content of digest {now}", f"{kept}, as written", AGAIN)
    return Dataset(
        name=description["name"],
        train=splits["train"],
        test=splits["test"],
        label_texts=texts["labels"],
        digest=kept,
        notes=tuple(description["notes"]),
    )


def _read(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except Exception as error:  # NumPy, SciPy and zipfile have many
        shown = f"an array that cannot be read ({error})"
        raise problem(path, None, shown, "one as it was written", AGAIN) from error


def copy_folder(
    layout: Layout, recipe: str, cache_root: str | os.PathLike[str] | None, reading: Reading
) -> Path:
    """Returns where the canonical form of a raw data set is kept: changes when its files do."""
    root = cache_root or files.cache_folder()
    state = hashlib.blake2b(digest_size=8)
    state.update(f"{FORMAT_VERSION} {recipe} {layout.kind} {reading}\n".encode())
    for role, path in sorted(layout.files.items()):
        status = path.stat()
        state.update(f"{role} {path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return Path(os.path.expanduser(root)) / f"{layout.name}-{state.hexdigest()}"
