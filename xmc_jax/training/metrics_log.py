"""What a run logs: ``metrics.jsonl``, and TensorBoard's files where that is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from xmc_jax import files
from xmc_jax.training.workdir import flatten


class MetricsLog:
    """``metrics.jsonl``, one object a line, each with a step; TensorBoard scalars if installed."""

    def __init__(self, workdir: Path, first_step: int) -> None:
        """Open the log, dropping what a killed run wrote past the checkpoint it resumes from.

        Raises:
          OSError: the disk is full or read-only.
        """
        self._path = workdir / "metrics.jsonl"
        try:
            if self._path.exists():
                text = self._path.read_text(encoding="utf-8", errors="replace")
                kept = [
                    line
                    for line in text.split("\n")
                    if (step := _step_of(line)) is not None and step <= first_step
                ]
                with files.replacing(self._path) as file:
                    file.write("".join(line + "\n" for line in kept))
            self._file = self._path.open("a", buffering=1)
        except OSError as error:
            raise self._unwritten(first_step, error) from error
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
            self._file.write(json.dumps({"step": step, **values}, default=files.plain) + "\n")
        except OSError as error:
            raise self._unwritten(step, error) from error
        if self._board is not None:
            for name, value in flatten(values).items():
                if isinstance(value, (int, float, np.floating, np.integer)):
                    self._board.add_scalar(name, value, step)

    def _unwritten(self, step: int, error: OSError) -> OSError:
        return OSError(
            f"{self._path}: step {step} could not be logged ({error.strerror or error}). "
            f"{files.remedy(error)}, then run the same command again to continue from the last "
            "checkpoint."
        )

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
