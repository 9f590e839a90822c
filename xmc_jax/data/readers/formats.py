"""Data sets from disk: finds them, reads every layout, keeps a canonical copy of raw ones.

Example::

  folder = find_folder("wordnet-mini")
  dataset = load(ensure_canonical(folder, text="title"))
  dataset.train.texts[0], dataset.train.labels[0].indices
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from absl import logging

from xmc_jax import catalog, files
from xmc_jax.data.dataset import Dataset, Split, digest, filter_matrix, make_dataset
from xmc_jax.data.readers import canonical, layouts, own_data, raw_readers
from xmc_jax.data.readers.canonical import save
from xmc_jax.data.readers.layouts import Layout, find_folder
from xmc_jax.data.readers.raw_files import DataError
from xmc_jax.data.readers.reading import AS_FOUND, Reading

_SMALL_BYTES = 4 << 20

__all__ = [
    "DataError",
    "Dataset",
    "Reading",
    "Split",
    "check_sizes",
    "digest",
    "ensure_canonical",
    "filter_matrix",
    "find_folder",
    "load",
    "make_dataset",
    "reading_for",
    "save",
]


def load(
    folder: str | os.PathLike[str],
    *,
    text: str = "title",
    text_folder: Path | None = None,
    share_of: str = "rows",
    reading: Reading = AS_FOUND,
) -> Dataset:
    """Reads a folder (or one file of people's own data) of any layout.

    Args:
      folder: what `find_folder` or `ensure_canonical` returned.
      text: "title" or "title+content"; layouts that hold one text a row, and the canonical form,
        give the texts they have.
      text_folder: where the texts of a raw layout go as files; None = memory.
      share_of: of own data without test rows: what the test rows are a share of
        (`xmc_jax.data.splits.hold_out`).
      reading: what flags say of people's own files; of other raw layouts, their encoding.

    Raises:
      DataError: whatever is wrong with the files, with file, line, and what to do.
    """
    if text not in raw_readers.RECIPES:
        raise ValueError(f"text: found {text!r}; expected one of {raw_readers.RECIPES}.")
    layout = _layout(folder, reading)
    if layout.kind == layouts.CANONICAL:
        return canonical.load_canonical(layout)
    place = raw_readers.TextPlace(text_folder, reading)
    if layout.kind == layouts.OWN:
        return own_data.read_own(layout, place, share_of=share_of)
    return raw_readers.read_public(layout, text, place)


def _layout(folder: str | os.PathLike[str], reading: Reading) -> Layout:
    layout = layouts.detect(folder)
    if reading.version > 1:
        layouts.check_only(layout)
    return layout


def ensure_canonical(
    folder_or_file: str | os.PathLike[str],
    *,
    text: str,
    cache_root: str | os.PathLike[str] | None = None,
    share_of: str = "rows",
    reading: Reading = AS_FOUND,
) -> Path:
    """Returns a path that `load` reads fast: the canonical form of a raw data set, written once.

    It is kept below ``cache_root``, else ``$XMC_CACHE``, else ``~/.cache/xmc_jax``, under a key of
    the source files' names, sizes and times, the text recipe and the flags; a damaged one is
    written again. Canonical folders, and raw ones of a few megabytes, are returned as they are.

    Raises:
      DataError: as `load`; nothing half-written is left behind.
    """
    layout = _layout(folder_or_file, reading)
    size = sum(path.stat().st_size for path in layout.files.values())
    if layout.kind == layouts.CANONICAL or size < _SMALL_BYTES:
        return Path(folder_or_file)
    # Texts were all there was when this was no choice.
    recipe = text if "test" in layout.files or share_of == "texts" else f"{text} {share_of}"
    folder = canonical.copy_folder(layout, recipe, cache_root, reading)
    if folder.exists():
        try:
            canonical.check(folder)
            return folder
        except DataError as error:
            reason = str(error).removesuffix(canonical.AGAIN)
            logging.warning("%sIt is written again from %s.", reason, folder_or_file)
            shutil.rmtree(folder, ignore_errors=True)
    logging.info("first use of %s: writing its canonical form to %s", folder_or_file, folder)
    write_canonical(folder_or_file, folder, text=text, share_of=share_of, reading=reading)
    return folder


def write_canonical(
    folder_or_file: str | os.PathLike[str],
    folder: Path,
    *,
    text: str,
    share_of: str = "rows",
    reading: Reading = AS_FOUND,
) -> Dataset:
    """Reads a raw data set and writes its canonical form to ``folder``, texts without a detour."""
    with files.publishing_folder(
        folder, whole=canonical.is_whole, advice=canonical.ADVICE
    ) as temporary:
        dataset = load(
            folder_or_file, text=text, text_folder=temporary, share_of=share_of, reading=reading
        )
        canonical.write_into(dataset, temporary, text, reading)
    return load(folder)


def reading_for(folder: str | os.PathLike[str], reading: Reading) -> Reading:
    """Returns how the files of a data set are read, or were when it was prepared.

    Raises:
      DataError: flags that have nothing to say in this layout.
    """
    layout = layouts.detect(folder)
    if layout.kind == layouts.OWN:
        return reading
    without = reading if layout.kind == layouts.CANONICAL else replace(reading, encoding="")
    if without.given:
        raise DataError(
            f"{layout.root}: found layout {layout.kind!r}; expected your own rows (TSV, CSV, JSON "
            f"Lines) for {' '.join(without.given)}. Leave the flag out, or give it where the rows "
            "are prepared."
        )
    if layout.kind == layouts.CANONICAL:
        return Reading.of(canonical.read_description(layout.root).get("reading", {}))
    return reading


def check_sizes(dataset: Dataset) -> list[str]:
    """Returns one line for each size that differs from what the catalog says about this name."""
    entry = catalog.find(dataset.name)
    if entry is None:
        return []
    sizes = (
        ("training rows", len(dataset.train), entry.num_train),
        ("test rows", len(dataset.test), entry.num_test),
        ("labels", len(dataset.label_texts), entry.num_labels),
    )
    return [
        f"{size:,} {what}, but the catalog says {known:,} for {entry.name}"
        for what, size, known in sizes
        if known is not None and size != known
    ]
