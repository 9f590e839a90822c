"""The work directory of a run: its meta data, its log, and who may continue it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from absl import logging

from xmc_jax import files

FREQUENCY = "label_frequency.npz"  # of the original training labels
# What a run writes before it begins; meta.json, which comes last, has the checksums.
STARTED = ("features", "frozen", FREQUENCY, "labels", "tokenizer")
# A folder that holds one of these but no meta.json is not ours to use.
OURS = ("checkpoints", "metrics.jsonl", "refresh", "retrieval", "features.tmp", *STARTED)
LATER = OURS[:4]  # what no start that was killed can have left
UNFINISHED = ".unfinished"  # lies in a folder whose run has not begun yet: meta.json comes last
KINDS = {  # of the entries of meta.json that are read
    **dict.fromkeys(("config", "resolved", "encoder", "entry", "data", "files"), dict),
    **dict.fromkeys(("epochs", "num_labels", "format"), int),
}
NEEDED = ("resolved", "encoder", "entry", "data", "num_labels")  # to open what a run learned
PUT_BACK = "Put back a copy of the file, or choose another --workdir."
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy", "faiss-cpu")


class WorkdirError(ValueError):
    """A work directory cannot be used, or belongs to another configuration."""


def read_json(path: Path) -> Any:
    """Read JSON, with the file's name in the error.

    Raises:
      WorkdirError: no such file, or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise WorkdirError(
            f"{path} does not exist: {path.parent} is not a work directory of xmc_jax.train. "
            "Give the folder that training printed, with --workdir."
        ) from error
    except (ValueError, RecursionError) as error:
        raise WorkdirError(
            f"{path} is not JSON ({error}); the work directory is damaged. {PUT_BACK}"
        ) from error


def read_meta(folder: Path) -> dict[str, Any]:
    """``meta.json`` of a work directory; a warning says so where it was changed since.

    Raises:
      WorkdirError: no such file, or not one of a run.
    """
    path = folder / "meta.json"
    meta = read_json(path)
    check_entries(folder, meta, ("config", "epochs"))
    if meta.pop("crc32", None) not in (None, files.content_crc32(meta)):
        logging.warning("%s was changed since it was written, by hand or by damage", path)
    return meta


def check_entries(folder: Path, meta: Any, needed: Collection[str]) -> None:
    """Raise `WorkdirError` unless ``meta.json`` has these, and all that is read is of its kind."""
    entries = meta if isinstance(meta, dict) else {}
    for name, kind in KINDS.items():
        value = entries.get(name)
        if (name in needed or name in entries) and not isinstance(value, kind):
            raise WorkdirError(
                f"{folder / 'meta.json'}: {name} is {value!r:.80}, which no run wrote; the work "
                f"directory is damaged. {PUT_BACK}"
            )


def damage(folder: Path, meta: dict[str, Any], *names: str) -> str | None:
    """What is wrong with the files that a run wrote before it began, or None.

    Args:
      folder: the work directory.
      meta: its meta data; without checksums, as those of earlier versions, nothing is wrong.
      names: of the files and folders that are looked at; none = all.
    """
    record = {
        name: entry
        for name, entry in meta.get("files", {}).items()
        if not names or name.split("/")[0] in names
    }
    problem = files.damage(folder, record)
    return None if problem is None else str(folder / problem)


def set_aside_damaged(folder: Path, meta: dict[str, Any]) -> None:
    """Rename what is damaged, so that it is made again."""
    for name in STARTED:
        problem = damage(folder, meta, name)
        if problem is not None:
            logging.warning("%s; it is made again", problem)
            if (folder / name).exists():
                files.set_aside(folder / name, ".damaged")


def versions() -> dict[str, str]:
    """Versions of what a result depends on, and the commit where there is one."""
    packages = {"python": platform.python_version(), "xmc_jax": metadata.version("xmc_jax")}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return packages
    if result.returncode == 0:
        packages["commit"] = result.stdout.strip()
    return packages


@contextlib.contextmanager
def held(workdir: Path) -> Iterator[None]:
    """Make the folder and keep other processes from training in it; a kill lets go of it.

    Raises:
      WorkdirError: it cannot be made, or another process trains there.
    """
    with files.removing_new_parents(workdir):
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            folder = os.open(workdir, os.O_RDONLY)
        except OSError as error:
            raise _unwritable(workdir, error) from error
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise WorkdirError(
                    f"{workdir}: another process is training there. Wait for its end, or choose "
                    "another --workdir."
                ) from error
            except OSError:  # a file system without locks
                logging.warning("%s cannot be locked: start no second run there", workdir)
            yield
        finally:
            os.close(folder)


def _unwritable(workdir: Path, error: OSError) -> WorkdirError:
    return WorkdirError(
        f"{workdir} cannot be written to ({error.strerror}). Choose another --workdir."
    )


def claim(
    workdir: Path,
    config: dict[str, Any],
    overrides: Collection[str] | None = None,
    *,
    upgrade: Callable[[dict[str, Any]], dict[str, Any]] = lambda meta: meta,
) -> dict[str, Any] | None:
    """Make the work directory, or check that it belongs to this configuration.

    Args:
      workdir: the folder.
      config: the configuration as given (before anything was derived from the data). Where the data
        lie (``data``) may change: their digest is checked instead.
      overrides: dotted names of the fields that were set on the command line. A field that the old
        run's configuration lacks, for it came with a later version, is compared only if it is one
        of them; None = compare all fields.
      upgrade: makes of an earlier version's meta data this version's.

    Returns:
      The meta data of the run to be continued, or None where it is new. Its ``resolved`` is
      completed with the fields that it lacks.

    Raises:
      WorkdirError: not writable, not a work directory, or made by another configuration (the
        differences are listed).
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        new = not (workdir / "meta.json").exists()
        killed = (workdir / UNFINISHED).exists()
        foreign = [name for name in (LATER if killed else OURS) if (workdir / name).exists()]
        if new and foreign:
            raise WorkdirError(
                f"{workdir} is not a work directory: it has no meta.json, but holds "
                f"{', '.join(foreign)}. Put meta.json back if it was lost, or choose another "
                "--workdir."
            )
        probe = workdir / UNFINISHED
        probe.write_text("")
        if new:
            _remove_started(workdir)  # of a start that was killed
            return None
        probe.unlink()
    except OSError as error:
        raise _unwritable(workdir, error) from error
    meta = upgrade(read_meta(workdir))
    _check_same(workdir, meta["config"], config, overrides)
    return {**meta, "resolved": _completed(meta.get("resolved", {}), config)}


def begin(workdir: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Write ``meta.json``: from now on the run can be continued. Returns it as it is read back.

    It has the checksums of all that was written before.
    """
    written = files.checksums(workdir, *STARTED)
    files.write_record(workdir / "meta.json", {**meta, "files": written})
    files.unlink(workdir / UNFINISHED)
    return read_meta(workdir)


def discard(workdir: Path) -> None:
    """Remove what a run left that never began; nothing where it has begun."""
    if (workdir / "meta.json").exists() or not (workdir / UNFINISHED).exists():
        return
    _remove_started(workdir)
    files.unlink(workdir / UNFINISHED)
    try:
        workdir.rmdir()
    except OSError:  # it holds something else
        return


def _remove_started(workdir: Path) -> None:
    for name in (*STARTED, "features.tmp"):
        path = workdir / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            files.unlink(path)


def _completed(kept: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """``kept`` with the fields of ``now`` that it lacks."""
    complete = {**now, **kept}
    for name, value in now.items():
        if isinstance(value, dict) and isinstance(complete[name], dict):
            complete[name] = _completed(complete[name], value)
    return complete


def _check_same(
    workdir: Path,
    kept: dict[str, Any],
    now: dict[str, Any],
    overrides: Collection[str] | None,
) -> None:
    """Compare configurations field by field."""
    have, want = flatten(kept), flatten(json.loads(json.dumps(now, default=files.plain)))
    later = set()
    if overrides is not None:  # new fields, and those left open, for which the run has its value
        open_now = {name for name, value in want.items() if value is None}
        later = (want.keys() - have.keys() | open_now) - set(overrides)
    different = [
        f"  {name}: there {have.get(name)!r}, now {want.get(name)!r}"
        for name in sorted((have.keys() | want.keys()) - {"data"} - later)
        if have.get(name) != want.get(name)
    ]
    if different:
        raise WorkdirError(
            f"{workdir} holds a run with another configuration:\n"
            + "\n".join(different)
            + "\nUse the same configuration to continue it, or another --workdir to start anew."
        )


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
