"""Where data is and in which layout: file names of every layout, detection, search by name."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from pathlib import Path

from xmc_jax import catalog
from xmc_jax.data.readers.raw_files import DataError, problem

CANONICAL, JSON, LINES, OWN = "canonical", "json", "lines", "own"
_OWN_SUFFIXES = (".jsonl", ".json", ".tsv", ".csv")
_TEXT_ENDINGS = ("txt", "tsv", "csv", "json", "jsonl")
_DATA_ENDINGS = (*_TEXT_ENDINGS, "parquet", "xlsx")
_SUBFOLDERS = ("", "raw", "raw_text")

_FILTERS: dict[str, tuple[str, ...]] = {
    "train_filter": ("filter_labels_train.txt", "trn_filter_labels.txt"),
    "test_filter": ("filter_labels_test.txt", "tst_filter_labels.txt"),
}
_MATRICES = {
    "train_labels": ("trn_X_Y.txt", "Y.trn.npz"),
    "test_labels": ("tst_X_Y.txt", "Y.tst.npz"),
}
# Per layout and role the names in use, the first is the one that messages give. "?" = optional.
_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    CANONICAL: {
        "description": ("dataset.json",),
        "train": ("train.txt",),
        "test": ("test.txt",),
        "labels": ("labels.txt",),
        "train_labels": ("train_labels.npz",),
        "test_labels": ("test_labels.npz",),
        "train_filter": ("train_filter.npy",),
        "test_filter": ("test_filter.npy",),
    },
    JSON: {
        "train": ("trn.json", "trn.raw.json"),
        "test": ("tst.json", "tst.raw.json"),
        "labels": ("lbl.json", "lbl.raw.json", "Yf.txt"),
        "train_labels?": _MATRICES["train_labels"],
        "test_labels?": _MATRICES["test_labels"],
    },
    LINES: {
        "train": ("trn_X.txt", "trn.raw.txt", "X.trn.txt"),
        "test": ("tst_X.txt", "tst.raw.txt", "X.tst.txt"),
        "labels": ("Y.txt", "lbl.raw.txt", "output-items.txt"),
        **_MATRICES,
    },
    OWN: {
        "train": tuple(f"train{suffix}" for suffix in _OWN_SUFFIXES),
        "test?": tuple(f"test{suffix}" for suffix in _OWN_SUFFIXES),
        "labels?": ("labels.txt", "labels.jsonl", "labels.json"),
    },
}
EXPECTED = (
    "one of these layouts: "
    "(1) trn.json.gz, tst.json.gz, lbl.json.gz; "
    "(2) trn_X.txt, tst_X.txt, Y.txt with trn_X_Y.txt, tst_X_Y.txt or Y.trn.npz, Y.tst.npz; "
    "(both: filter_labels_train.txt and filter_labels_test.txt where the data set has them); "
    "(3) your own data: train.jsonl, train.tsv or train.csv, and if you have them test.* and "
    "labels.txt, or one such file"
)
_ROLES = {"train": "training rows", "test": "test rows", "labels": "labels"}
BUNDLED = {"LF-WordNetTitles-Mini": Path(__file__).parents[1] / "wordnet_mini"}


@dataclasses.dataclass(frozen=True)
class Layout:
    """The files of a data set by role ("train", "test", "labels", "train_labels", ...).

    Attributes:
      kind: CANONICAL, JSON, LINES or OWN.
      root: the folder, or the one file.
      files: path of each role that is there.
    """

    kind: str
    root: Path
    files: dict[str, Path]

    @property
    def name(self) -> str:
        """Catalog name where the folder's name is known there, else the folder's or file's name."""
        own_name = self.root.name
        if self.root.is_file():
            own_name = own_name.removesuffix(".gz").rpartition(".")[0]
        entry = catalog.find(own_name)
        return own_name if entry is None else entry.name


def detect(path: str | os.PathLike[str]) -> Layout:
    """Returns the layout of a folder or of one file of people's own data.

    Raises:
      DataError: nothing there that is known, or some of a layout's files are missing, or people's
        own data has a file of labels or test rows that is not read.
    """
    path = Path(os.path.abspath(os.path.expanduser(path)))  # not resolve(): a link's name counts
    if path.is_file():
        return _one_file(path)
    if not path.is_dir():
        shown = _kind_of(path) if os.path.lexists(path) else "no such file or folder"
        raise DataError(f"{path}: found {shown}; expected {EXPECTED}.")
    missing, odd_names = [], []
    for kind, names in _NAMES.items():
        files, lacking, odd = _match(path, names)
        odd_names += odd
        if odd and _is_begun(kind, files):
            raise _odd(odd[0])
        if files and not (lacking or odd):
            if kind == OWN:
                _require_read(path, {"test", "labels"} - files.keys())
            return Layout(kind, path, files)
        if _is_begun(kind, files):
            missing.append(
                f"{', '.join(file.name for file in files.values())}; but "
                f"no {' and no '.join(lacking)}"
            )
    if odd_names and not missing:
        raise _odd(odd_names[0])
    raise DataError(f"{path}: found {_describe(path, missing)}; expected {EXPECTED}.{_page(path)}")


def check_only(layout: Layout) -> None:
    """Refuses a second file for what is read from one, such as train.csv beside train.tsv.

    Of the public layouts downloads have several, of the same content; the best name is read.

    Raises:
      DataError: people's own data has two such files; both are named.
    """
    if layout.kind != OWN:
        return
    for role, path in layout.files.items():
        if role not in _ROLES or (role == "train" and path == layout.root):
            continue
        name = re.compile(rf"{role}\.({'|'.join(_TEXT_ENDINGS)})(\.gz)?")
        for other in sorted(path.parent.iterdir()):
            if name.fullmatch(other.name.lower()) and other not in (path, layout.root):
                raise problem(
                    path,
                    None,
                    f"{other.name} beside it",
                    f"one file of {_ROLES[role]}",
                    "Move away or rename the one that is not to be read.",
                )


def holds_data(path: Path) -> bool:
    """Returns whether a folder holds a data set, complete or not (then `detect` says so)."""
    return path.is_dir() and any(
        _is_begun(kind, _match(path, names)[0]) for kind, names in _NAMES.items()
    )


def _odd(path: Path) -> DataError:
    advice = "Put the file there, or remove what is in its place."
    return problem(path, None, _kind_of(path), "a file", advice)


def _kind_of(path: Path) -> str:
    """What lies under a name that should be a file."""
    if path.is_symlink() and not path.exists():
        return f"a link to {os.readlink(path)}, which is not there"
    if path.is_dir():
        return "a folder"
    return "a pipe" if path.is_fifo() else "a device or socket"


def _is_begun(kind: str, files: dict[str, Path]) -> bool:
    return ("description" if kind == CANONICAL else "train") in files


def find_folder(name_or_folder: str | os.PathLike[str], data_dir: str | None = None) -> Path:
    """Returns the folder (or one file) of a data set, by path or by catalog name or alias.

    With ``data_dir``: that folder itself, or the one below it that is called so. Without: the path
    as given, then ``$XMC_DATA`` or ``./data``, then what ships with the package.

    Raises:
      DataError: not found; lists where it was looked for, the files, and the page that offers them.
    """
    name = os.fspath(name_or_folder)
    entry = catalog.find(name)
    wanted = {Path(name).name, *((entry.name, *entry.aliases) if entry else ())}
    given = Path(os.path.expanduser(name))
    looked: list[Path] = []
    if data_dir:
        root = Path(os.path.expanduser(data_dir))
        looked.append(root)
        if root.is_file():
            return root
        if holds_data(root):
            return root
    else:
        if given.is_file() or holds_data(given):
            return given
        root = Path(os.path.expanduser(os.environ.get("XMC_DATA") or "data"))
        looked += [given, root]
    folder = _below(root, wanted)
    if folder is not None:
        return folder
    called_so = root if data_dir else given
    if called_so.name in wanted and os.path.lexists(called_so):
        detect(called_so)  # raises, naming what is there
    if entry is not None and entry.name in BUNDLED:
        return BUNDLED[entry.name]
    raise DataError(_not_found(name, entry, looked))


def _below(root: Path, names: set[str]) -> Path | None:
    if not root.is_dir():
        return None
    wanted = {name.casefold() for name in names}
    for folder in sorted(root.iterdir()):
        is_link = folder.is_symlink() and not folder.exists()
        if folder.name.casefold() in wanted and (folder.is_dir() or is_link or _is_own(folder)):
            return folder
    return None


def _not_found(name: str, entry: catalog.Entry | None, looked: list[Path]) -> str:
    places = ", ".join(str(place.absolute()) for place in looked)
    message = f"no data for {name!r}: looked in {places}; expected "
    if entry is None:
        known = ", ".join(known.name for known in catalog.ENTRIES)
        return message + f"{EXPECTED}. Or give one of these names: {known}.{_nearest(name)}"
    return message + (
        f"a folder {entry.name} there with {EXPECTED}. The files are offered by: {entry.source}. "
        "Say where they are with --data=DIR or the environment variable XMC_DATA."
    )


def _nearest(name: str) -> str:
    names = [known for entry in catalog.ENTRIES for known in (entry.name, *entry.aliases)]
    near = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _page(path: Path) -> str:
    entry = catalog.find(path.name)
    return "" if entry is None else f" The files are offered by: {entry.source}."


def _match(
    root: Path, names: dict[str, tuple[str, ...]]
) -> tuple[dict[str, Path], list[str], list[Path]]:
    """Returns the files by role, names that are missing, and what is there but is no file."""
    files, lacking, odd = {}, [], []
    for role, candidates in {**names, **_optional(_FILTERS)}.items():
        path = _first(root, candidates)
        if path is not None and path.is_file():
            files[role.removesuffix("?")] = path
        elif path is not None:
            odd.append(path)
        elif not role.endswith("?"):
            lacking.append(" or ".join(candidates))
    return files, lacking, odd


def _optional(names: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {f"{role}?": candidates for role, candidates in names.items()}


def _first(root: Path, names: tuple[str, ...]) -> Path | None:
    """Returns the file of the best name, else what has one of the names and is no file."""
    odd = None
    for name in names:  # a better name in a folder below comes first
        for folder in _SUBFOLDERS:
            for suffix in ("", ".gz"):
                path = root / folder / (name + suffix)
                if path.is_file():
                    return path
                if odd is None and os.path.lexists(path):
                    odd = path
    return odd


def _is_own(path: Path) -> bool:
    return path.is_file() and path.name.removesuffix(".gz").endswith(_OWN_SUFFIXES)


def _one_file(path: Path) -> Layout:
    if not _is_own(path):
        raise DataError(
            f"{path}: found a file that ends in {path.suffix or 'nothing'!r}; expected "
            f"{', '.join(_OWN_SUFFIXES)} (or such a file with .gz). Rename or convert it."
        )
    files = {"train": path}
    labels = _first(path.parent, _NAMES[OWN]["labels?"])
    if labels is None:
        _require_read(path.parent, {"labels"}, but=path)
    elif not labels.is_file():
        raise _odd(labels)
    elif labels != path:
        files["labels"] = labels
    return Layout(OWN, path, files)


def _require_read(folder: Path, roles: set[str], but: Path | None = None) -> None:
    """Refuses a file such as labels.csv, which would be left out without a word."""
    for path in sorted(folder.iterdir()):
        role, _, ending = path.name.lower().partition(".")
        role = "labels" if role == "label" else role
        is_data = ending.partition(".")[0] in _DATA_ENDINGS  # also labels.txt.zip, not test.py
        if role in roles and is_data and path != but:
            names = ", ".join(_NAMES[OWN][f"{role}?"])
            raise DataError(
                f"{path}: found a file of {_ROLES[role]} whose "
                f"name is not read; expected {names} (or such a file with .gz). Write it so (one "
                "label text a line, or as the training file), or give it another name."
            )


def _describe(path: Path, missing: list[str]) -> str:
    if missing:
        return missing[0]
    names = sorted(entry.name for entry in path.iterdir())
    if {"train.txt", "train_offsets.npy"} <= set(names):
        return "a prepared data set without dataset.json (prepare it again)"
    if {"train.txt", "Yf.txt"} <= set(names):
        return "a bag-of-words download, which has no texts (take the raw text one)"
    if not names:
        return "an empty folder"
    return f"only {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
