"""The work directory of a run: its meta data, its log, and who may continue it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Collection, Iterator
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import numpy as np
from absl import logging

# What training writes; a folder that holds one of these but no meta.json is not ours to use.
OURS = (
    "checkpoints",
    "features",
    "features.tmp",
    "frozen",
    "label_frequency.npz",
    "labels",
    "metrics.jsonl",
    "refresh",
    "tokenizer",
)
UNFINISHED = ".unfinished"  # lies in a folder whose run has not begun yet: meta.json comes last
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy", "faiss-cpu")


class WorkdirError(ValueError):
    """A work directory cannot be used, or belongs to another configuration."""


def write_json(path: Path, value: Any) -> None:
    """Write JSON under a temporary name, then rename.

    Raises:
      OSError: the disk is full or read-only; nothing half-written is left.
    """
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1, sort_keys=True, default=_plain) + "\n")


@contextlib.contextmanager
def replacing(path: str | Path, *, binary: bool = False) -> Iterator[IO[Any]]:
    """Open a file under a temporary name; it takes the path's place if all goes well.

    Raises:
      OSError: it cannot be written; nothing half-written is left.
    """
    temporary = Path(f"{path}.tmp")
    try:
        file = temporary.open("wb") if binary else temporary.open("w", encoding="utf-8")
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}.") from error
    try:
        with file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        _unlink(temporary)
        raise


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
    except ValueError as error:
        raise WorkdirError(
            f"{path} is not JSON ({error}); the work directory is damaged."
        ) from error


def versions() -> dict[str, str]:
    """Versions of what a result depends on, and the commit where there is one."""
    found = {"python": platform.python_version(), "xmc_jax": metadata.version("xmc_jax")}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return found
    if result.returncode == 0:
        found["commit"] = result.stdout.strip()
    return found


@contextlib.contextmanager
def held(workdir: Path) -> Iterator[None]:
    """Make the folder and keep other processes from training in it; a kill lets go of it.

    Raises:
      WorkdirError: it cannot be made, or another process trains there.
    """
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


def open_run(
    workdir: Path, config: dict[str, Any], overrides: Collection[str] | None = None
) -> dict[str, Any] | None:
    """Make the work directory, or check that it belongs to this configuration.

    Args:
      workdir: the folder.
      config: the configuration as given (before anything was derived from the data). Where the data
        lie (``data``) may change: their digest is checked instead.
      overrides: dotted names of the fields that were set on the command line. A field that the old
        run's configuration lacks, for it came with a later version, is compared only if it is one
        of them; None = compare all fields.

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
        foreign = [name for name in OURS if (workdir / name).exists()]
        if new and foreign and not (workdir / UNFINISHED).exists():
            raise WorkdirError(
                f"{workdir} is not a work directory: it has no meta.json, but holds "
                f"{', '.join(foreign)}. Choose another --workdir."
            )
        probe = workdir / (UNFINISHED if new else ".write")
        probe.write_text("")
        if new:
            _remove_ours(workdir)  # of a start that was killed
            return None
        probe.unlink()
    except OSError as error:
        raise _unwritable(workdir, error) from error
    meta = read_json(workdir / "meta.json")
    _check_same(workdir, meta["config"], config, overrides)
    return {**meta, "resolved": _completed(meta.get("resolved", {}), config)}


def begin(workdir: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Write ``meta.json``: from now on the run can be continued. Returns it as it is read back."""
    write_json(workdir / "meta.json", meta)
    _unlink(workdir / UNFINISHED)
    return read_json(workdir / "meta.json")


def discard(workdir: Path) -> None:
    """Remove what a run left that never began; nothing where it has begun."""
    if (workdir / "meta.json").exists() or not (workdir / UNFINISHED).exists():
        return
    _remove_ours(workdir)
    _unlink(workdir / UNFINISHED)
    try:
        workdir.rmdir()
    except OSError:  # it holds something else
        return


def _remove_ours(workdir: Path) -> None:
    for name in OURS:
        path = workdir / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            _unlink(path)


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a disk that has become read-only
        return


def _completed(there: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """``there`` with the fields of ``now`` that it lacks."""
    made = {**now, **there}
    for name, value in now.items():
        if isinstance(value, dict) and isinstance(made[name], dict):
            made[name] = _completed(made[name], value)
    return made


def _check_same(
    workdir: Path,
    there: dict[str, Any],
    now: dict[str, Any],
    overrides: Collection[str] | None,
) -> None:
    """Compare configurations field by field."""
    have, want = flatten(there), flatten(json.loads(json.dumps(now, default=_plain)))
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


class MetricsLog:
    """``metrics.jsonl``, one object a line, each with a step; TensorBoard scalars if installed."""

    def __init__(self, workdir: Path, first_step: int) -> None:
        """Open the log, dropping what a killed run wrote past the checkpoint it resumes from."""
        self._path = workdir / "metrics.jsonl"
        if self._path.exists():
            kept = [
                line
                for line in self._path.read_text().splitlines()
                if _step_of(line) is not None and _step_of(line) <= first_step
            ]
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text("".join(line + "\n" for line in kept))
            os.replace(temporary, self._path)
        self._file = self._path.open("a", buffering=1)
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            self._board = None
        else:
            self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=first_step + 1)

    def write(self, step: int, **values: Any) -> None:
        """Append one line.

        Raises:
          OSError: the disk is full.
        """
        try:
            self._file.write(json.dumps({"step": step, **values}, default=_plain) + "\n")
        except OSError as error:
            raise OSError(
                f"{self._path}: step {step} could not be logged ({error.strerror}). Free some "
                "space, then run the same command again to continue from the last checkpoint."
            ) from error
        if self._board is not None:
            for name, value in flatten(values).items():
                if isinstance(value, (int, float, np.floating, np.integer)):
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _plain(value: Any) -> Any:
    """What ``json`` does not know: arrays, NumPy scalars, paths."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
