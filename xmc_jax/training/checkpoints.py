"""Checkpoints of a work directory: written whole or not at all, checked before they are read.

checkpoints/<step>/model/       parameters and classifier table (what evaluation needs)
checkpoints/<step>/optimizer/   Optax state, moments of the table, step
checkpoints/<step>/checkpoint.json   {"step", "epoch", "held_out", "files": {name: size}}
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

from xmc_jax.training.state import TrainState
from xmc_jax.training.workdir import write_json

MANIFEST = "checkpoint.json"


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or of another model."""


def save(workdir: Path, state: TrainState, info: dict[str, Any]) -> Path:
    """Write a checkpoint under a temporary name, then rename it.

    Args:
      workdir: the run's work directory.
      state: the train state; its step names the folder.
      info: JSON-able facts kept beside it.

    Returns:
      The checkpoint's folder.

    Raises:
      OSError: the disk is full or read-only; nothing half-written is left.
    """
    step = int(state.step)
    target = workdir / "checkpoints" / str(step)
    if target.exists() and _damage(target) is None:
        manifest = json.loads((target / MANIFEST).read_text())
        write_json(target / MANIFEST, {**manifest, **info})
        return target
    temporary = target.with_name(f"{step}.tmp")
    _remove(temporary)
    try:
        _write(temporary / "model", {"params": state.params, "table": state.table})
        _write(
            temporary / "optimizer",
            {"opt_state": state.opt_state, "table_state": state.table_state, "step": state.step},
        )
        manifest = {**info, "step": step, "files": _file_sizes(temporary)}
        (temporary / MANIFEST).write_text(json.dumps(manifest))
        _remove(target)
        os.rename(temporary, target)
    except Exception as error:
        _remove(temporary)
        raise OSError(
            f"{target}: the checkpoint of step {step} could not be written ({_first_line(error)}). "
            "Earlier checkpoints are untouched. Free some space, then run the same command again."
        ) from error
    return target


def steps(workdir: Path) -> list[int]:
    """Steps of the finished checkpoints, ascending; damaged ones included."""
    folder = workdir / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


def info(workdir: Path, step: int) -> dict[str, Any]:
    """What was saved beside the checkpoint of a step; ``{}`` if that cannot be read."""
    try:
        return json.loads((workdir / "checkpoints" / str(step) / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}


def best_step(workdir: Path) -> int | None:
    """The sound checkpoint with the best held-out score; the last one where none was scored."""
    best, best_score = None, float("-inf")
    for step in steps(workdir):
        folder = workdir / "checkpoints" / str(step)
        problem = _damage(folder)
        if problem is not None:
            logging.warning("%s is damaged (%s): left out.", folder, problem)
            continue
        score = info(workdir, step).get("held_out")
        if score is None:
            score = float("-inf")
        if best is None or score >= best_score:
            best, best_score = step, max(score, best_score)
    return best


def restore_latest(workdir: Path, like: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
    """The newest checkpoint that is whole, or None where there is none.

    Damaged newer ones are set aside under another name, so that training can write them again.

    Args:
      workdir: the run's work directory.
      like: a state (arrays or shapes) of the model that is to be restored.

    Returns:
      The state and its info.

    Raises:
      CheckpointError: the checkpoint is of another model, or all are damaged.
    """
    found, damaged = steps(workdir), []
    for step in reversed(found):
        folder = workdir / "checkpoints" / str(step)
        problem = _damage(folder)
        if problem is None:
            optimizer = {
                "opt_state": like.opt_state,
                "table_state": like.table_state,
                "step": like.step,
            }
            try:
                model = _read(folder / "model", {"params": like.params, "table": like.table})
                rest = _read(folder / "optimizer", optimizer)
            except CheckpointError:
                raise
            except Exception as error:
                problem = _first_line(error)
            else:
                for path in damaged:
                    aside = path.with_name(f"{path.name}.damaged")
                    _remove(aside)
                    os.rename(path, aside)
                return TrainState(**model, **rest), info(workdir, step)
        logging.warning("%s is damaged (%s): falling back to the one before.", folder, problem)
        damaged.append(folder)
    if found:
        raise CheckpointError(
            f"{workdir / 'checkpoints'}: none of the checkpoints {found} can be read. Remove the "
            "work directory, or choose another with --workdir, to start anew."
        )
    return None


def restore_model(workdir: Path, step: int, like: Any) -> Any:
    """Parameters and table ``{"params", "table"}`` of one checkpoint.

    Args:
      workdir: the run's work directory.
      step: which checkpoint.
      like: ``{"params", "table"}`` of arrays or shapes.

    Raises:
      CheckpointError: missing, damaged, or of another model.
    """
    folder = workdir / "checkpoints" / str(step)
    problem = _damage(folder)
    if problem is not None:
        raise CheckpointError(
            f"{folder}: {problem}. Sound checkpoints here: "
            f"{[s for s in steps(workdir) if _damage(folder.with_name(str(s))) is None]}."
        )
    try:
        return _read(folder / "model", like)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{folder / 'model'} cannot be read ({_first_line(error)}). Take another of the "
            f"checkpoints {steps(workdir)}, or run training on it again."
        ) from error


def prune(workdir: Path, *, keep_last: int = 2) -> None:
    """Remove all but the best checkpoint, the last ``keep_last``, and what a kill left behind."""
    keep = {best_step(workdir), *steps(workdir)[-keep_last:]}
    for step in steps(workdir):
        if step not in keep:
            _remove(workdir / "checkpoints" / str(step))
    for path in (workdir / "checkpoints").iterdir():
        if path.suffix in (".tmp", ".damaged"):
            _remove(path)


def _write(folder: Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), tree)
        checkpointer.wait_until_finished()


def _read(folder: Path, like: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        _check_same_model(folder, checkpointer.metadata(folder.absolute()).item_metadata.tree, like)
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
            ),
            like,
        )
        return checkpointer.restore(folder.absolute(), abstract)


def _check_same_model(folder: Path, stored: Any, like: Any) -> None:
    """Compare names, shapes and types before anything is read: the error names arrays."""

    def shapes(tree: Any) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(
            tree, is_leaf=lambda x: hasattr(x, "shape") and hasattr(x, "dtype")
        )
        clean = lambda path: "/".join(
            str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path
        )
        return {
            clean(path): f"{tuple(x.shape)} {x.dtype}" for path, x in leaves if hasattr(x, "shape")
        }

    have, want = shapes(stored), shapes(like)
    different = sorted(
        f"{name}: checkpoint {have.get(name, 'lacks it')}, this model {want.get(name, 'lacks it')}"
        for name in have.keys() | want.keys()
        if have.get(name) != want.get(name)
    )
    if different:
        raise CheckpointError(
            f"{folder} is a checkpoint of another model:\n  "
            + "\n  ".join(different[:10])
            + (f"\n  ... and {len(different) - 10} more" if len(different) > 10 else "")
            + "\nUse the configuration that wrote it, or another --workdir."
        )


def _damage(folder: Path) -> str | None:
    """Why a checkpoint must not be read, or None."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"].items()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read: {_first_line(error)}"
    for name, size in files:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, {size} were written"
    return None


def _file_sizes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
