"""The work directory of a run: its meta data, its log, and who may continue it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy", "faiss-cpu")


class WorkdirError(ValueError):
    """A work directory cannot be used, or belongs to another configuration."""


def write_json(path: Path, value: Any) -> None:
    """Write JSON under a temporary name, then rename."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1, sort_keys=True, default=_plain) + "\n")
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """Read JSON, with the file's name in the error.

    Raises:
      WorkdirError: no such file, or not JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
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


def open_run(workdir: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """Make the work directory, or check that it belongs to this configuration.

    Args:
      workdir: the folder.
      config: the configuration as given (before anything was derived from the data).

    Returns:
      The meta data of the run to be continued, or None where it is new.

    Raises:
      WorkdirError: not writable, or made by another configuration (the differences are listed).
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe = workdir / ".write"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise WorkdirError(
            f"{workdir} cannot be written to ({error.strerror}). Choose another --workdir."
        ) from error
    path = workdir / "meta.json"
    if not path.exists():
        return None
    meta = read_json(path)
    have, want = flatten(meta["config"]), flatten(json.loads(json.dumps(config, default=_plain)))
    different = [
        f"  {name}: there {have.get(name)!r}, now {want.get(name)!r}"
        for name in sorted(have.keys() | want.keys())
        if have.get(name) != want.get(name)
    ]
    if different:
        raise WorkdirError(
            f"{workdir} holds a run with another configuration:\n"
            + "\n".join(different)
            + "\nUse the same configuration to continue it, or another --workdir to start anew."
        )
    return meta


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
        """Append one line."""
        self._file.write(json.dumps({"step": step, **values}, default=_plain) + "\n")
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
