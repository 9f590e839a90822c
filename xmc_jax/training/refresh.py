"""A refresh: what a system finds anew every few epochs, such as clusters and hard negatives.

    refresh/<epoch>/order.npy, offsets.npy      clustered order of the training rows
    refresh/<epoch>/hard_negatives.npy          [N, eta * refresh_epochs] int32, -1 = none
    refresh/<epoch>/NAME.npy                    what else a system writes
    refresh/<epoch>/info.json                   index, times, checksums of the arrays

It is written whole before it is used, so that a resumed run reads the same.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from xmc_jax import files
from xmc_jax.contracts import Stage
from xmc_jax.host import allocator
from xmc_jax.training import stages as stage_list
from xmc_jax.training.options import TrainingOptions

FOLDER = "refresh"


class Refresh:
    """What a refresh left: memory-mapped arrays, by name."""

    def __init__(self, folder: Path) -> None:
        """Open a finished refresh."""
        self.folder = folder

    def get(self, name: str) -> np.ndarray | None:
        """``NAME.npy``, or None where this refresh has no such file.

        Raises:
          ValueError: it cannot be read.
        """
        path = self.folder / f"{name}.npy"
        if not path.exists():
            return None
        try:
            return np.asarray(np.load(path, mmap_mode="r"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}). Remove {self.folder}, then run the same command "
                "again."
            ) from error

    def __getitem__(self, name: str) -> np.ndarray:
        """The array.

        Raises:
          KeyError: there is none of this name.
        """
        array = self.get(name)
        if array is None:
            raise KeyError(f"{self.folder / name}.npy does not exist")
        return array


def due(options: TrainingOptions, stages: Sequence[Stage], epoch: int) -> int | None:
    """The epoch whose refresh serves ``epoch``; None before the first one."""
    if options.batching == "random" and not options.hard_negatives:
        return None
    if epoch < options.warmup_epochs:
        return None
    first = max(options.warmup_epochs, stage_list.at(stages, epoch).first)
    return first + (epoch - first) // options.refresh_epochs * options.refresh_epochs


def damage(workdir: Path, epoch: int) -> str | None:
    """Why the refresh of an epoch must not be read, or None.

    Those of earlier versions have no checksums: they are taken as they are.
    """
    folder = workdir / FOLDER / str(epoch)
    if not folder.exists():
        return f"{folder} is missing"
    try:
        record = _read_checksums(folder)
    except (OSError, ValueError) as error:
        return f"{folder / 'info.json'} cannot be read: {error}"
    problem = files.damage(folder, record)
    return None if problem is None else str(folder / problem)


def checksums(workdir: Path, epoch: int) -> dict[str, Any]:
    """Those of the arrays of a refresh as they were written; ``{}`` if they cannot be read."""
    try:
        return _read_checksums(workdir / FOLDER / str(epoch))
    except (OSError, ValueError):
        return {}


def _read_checksums(folder: Path) -> dict[str, Any]:
    return files.read_record(folder / "info.json").get("files", {})


def load(workdir: Path, epoch: int) -> Refresh | None:
    """The refresh of an epoch if it is whole."""
    folder = workdir / FOLDER / str(epoch)
    return Refresh(folder) if damage(workdir, epoch) is None else None


def write(workdir: Path, epoch: int, make: Callable[[Path], dict[str, Any]]) -> Refresh:
    """Have a refresh made in a temporary folder, then renamed; return what was written.

    Args:
      workdir: the run's work directory.
      epoch: names the refresh.
      make: writes the arrays into a folder and returns what took how long.
    """
    allocator.give_back()  # the temporary memory of a step
    target = workdir / FOLDER / str(epoch)
    try:
        with files.replacing_folder(target) as temporary:
            facts = make(temporary)
            written = {"epoch": epoch, **facts, "files": files.checksums(temporary)}
            files.write_record(temporary / "info.json", written)
    except OSError as error:
        raise OSError(
            f"{target}: the refresh before epoch {epoch} could not be written "
            f"({error.strerror or error}). {files.remedy(error)}, then run the same command again "
            "to continue."
        ) from error
    logging.info("refresh before epoch %d: %s", epoch, facts)
    return Refresh(target)


def write_blocks(
    path: Path, blocks: Iterable[np.ndarray], shape: tuple[int, ...], dtype: str = "<i4"
) -> None:
    """Write blocks of rows as one ``.npy`` file of that shape."""
    # Written as a stream: in a memory map a full disk would be a SIGBUS, not an error.
    with open(path, "wb") as file:
        header = {"descr": dtype, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).data)


def prune(workdir: Path, keep: Collection[int | None]) -> None:
    """Remove what a kill left, and all refreshes but those of the epochs ``keep``."""
    folder = workdir / FOLDER
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if not path.name.isdigit() or int(path.name) not in keep:
            shutil.rmtree(path)


def lap(started: float) -> float:
    """Seconds since ``started`` (`time.perf_counter`), for a refresh's facts."""
    return round(time.perf_counter() - started, 2)
