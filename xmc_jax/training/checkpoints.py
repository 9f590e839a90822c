"""Checkpoints of a work directory: written whole or not at all, checked before they are read.

checkpoints/<step>/model/       parameters, model state and tables (what evaluation needs)
checkpoints/<step>/optimizer/   Optax state, moments of the tables, step
checkpoints/<step>/checkpoint.json   {"step", "epoch", "held_out", "format",
                                      "files": {name: [size, crc32]}}

Checkpoints without a format are of before tables had names and model state a place of its own;
those of format 2 and before have sizes alone. Sizes are compared wherever a checkpoint is counted,
checksums of what is read where it is read.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

from xmc_jax import files
from xmc_jax.contracts import Table, TrainState, Weights

MANIFEST = "checkpoint.json"
FORMAT = 3


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or of another model."""


class DamagedError(CheckpointError):
    """A checkpoint is missing or damaged."""


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
        manifest = files.read_record(target / MANIFEST)
        files.write_record(target / MANIFEST, {**manifest, **info})
        return target
    try:
        with files.replacing_folder(target) as temporary:
            for name, tree in _parts(state).items():
                _write(temporary / name, tree)
            written = files.checksums(temporary)
            manifest = {**info, "step": step, "format": FORMAT, "files": written}
            files.write_record(temporary / MANIFEST, manifest)
    except Exception as error:
        _clear(target.with_name(f"{target.name}.tmp"))
        good = last_sound(workdir)
        last = "There is none before it"
        if good is not None:
            last = f"Earlier checkpoints are untouched, the last good one is {good}"
        reason, advice = _reason(error)
        raise OSError(
            f"{target}: the checkpoint of step {step} could not be written ({reason}). {last}. "
            f"{advice}, then run the same command again."
        ) from error
    return target


def _clear(folder: Path) -> None:
    """Remove a folder that threads of a failed save may still write to, for a moment."""
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


def _reason(error: Exception) -> tuple[str, str]:
    """Why a file could not be written, and what to do."""
    code = error.errno if isinstance(error, OSError) else None
    of_tensorstore = re.search(r"os_error_code='(\d+)'", str(error))
    if code is None and of_tensorstore:
        code = int(of_tensorstore[1])
    if code is None:
        return _first_line(error), "Mend that"
    return os.strerror(code), files.remedy(OSError(code, ""))


def steps(workdir: Path) -> list[int]:
    """Steps of the finished checkpoints, ascending; damaged ones included."""
    folder = workdir / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


def last_sound(workdir: Path) -> Path | None:
    """Folder of the newest checkpoint that is whole."""
    folders = (workdir / "checkpoints" / str(step) for step in reversed(steps(workdir)))
    return next((folder for folder in folders if _damage(folder) is None), None)


def info(workdir: Path, step: int) -> dict[str, Any]:
    """What was saved beside the checkpoint of a step; ``{}`` if that cannot be read."""
    try:
        return files.read_record(workdir / "checkpoints" / str(step) / MANIFEST)
    except (OSError, ValueError):
        return {}


def best_step(workdir: Path) -> int | None:
    """The checkpoint with the best held-out score whose files have the sizes that were written.

    Of equal scores it is the last one; so it is where none was scored.
    """
    for step in _best_first(workdir):
        problem = _damage(_folder(workdir, step))
        if problem is None:
            return step
        logging.warning("%s is damaged (%s): left out.", _folder(workdir, step), problem)
    return None


def _best_first(workdir: Path) -> list[int]:
    """Steps of all checkpoints by held-out score, then step; the unreadable first, to be named."""

    def score(step: int) -> float:
        if not (kept := info(workdir, step)):
            return float("inf")
        value = kept.get("held_out")
        return value if isinstance(value, (int, float)) else float("-inf")

    return sorted(steps(workdir), key=lambda step: (score(step), step), reverse=True)


def _folder(workdir: Path, step: int) -> Path:
    return workdir / "checkpoints" / str(step)


def restore_latest(
    workdir: Path, like: TrainState, *, lacking: Callable[[int], str | None] = lambda step: None
) -> tuple[TrainState, dict[str, Any]] | None:
    """The newest checkpoint that is whole, or None where there is none.

    Newer ones are set aside under another name, so that training can write them again.

    Args:
      workdir: the run's work directory.
      like: a state (arrays or shapes) of the model that is to be restored.
      lacking: says of a step what else the run would need to go on from there, or None.

    Returns:
      The state and its info.

    Raises:
      CheckpointError: the checkpoint is of another model, or training can go on from none.
    """
    saved = steps(workdir)
    problems: dict[int, str] = {}
    for step in reversed(saved):
        folder = _folder(workdir, step)
        problem = _damage(folder, "")
        said = "is damaged"
        if problem is None and (problem := lacking(step)) is not None:
            said = "cannot be continued"
        if problem is None:
            try:
                state = _read_state(folder, like)
            except CheckpointError:
                raise
            except Exception as error:
                problem = _first_line(error)
            else:
                for other in problems:
                    files.set_aside(_folder(workdir, other), ".damaged")
                return state, info(workdir, step)
        logging.warning("%s %s (%s): falling back to the one before.", folder, said, problem)
        problems[step] = problem
    if saved:
        raise CheckpointError(
            f"{workdir / 'checkpoints'}: training can go on from none of the checkpoints {saved}"
            + "".join(f"\n  {step}: {problem}" for step, problem in problems.items())
            + "\nTo train from the beginning, remove that folder, or choose another --workdir."
        )
    return None


def restore_best(workdir: Path, like: Weights) -> tuple[int, Weights]:
    """The weights with the best held-out score that are whole, and their step.

    Raises:
      CheckpointError: of another model, or all are damaged.
    """
    for step in _best_first(workdir):
        try:
            return step, _whole_weights(_folder(workdir, step), like)
        except DamagedError as error:
            logging.warning("%s: the next best one is taken.", error)
    raise CheckpointError(
        f"{workdir / 'checkpoints'}: no sound checkpoint. Run training on it again."
    )


def restore_weights(workdir: Path, step: int, like: Weights) -> Weights:
    """Parameters, model state and tables of one checkpoint.

    Args:
      workdir: the run's work directory.
      step: which checkpoint.
      like: arrays or shapes.

    Raises:
      CheckpointError: missing, damaged, or of another model.
    """
    try:
        return _whole_weights(_folder(workdir, step), like)
    except DamagedError as error:
        others = [other for other in steps(workdir) if other != step]
        sound = [s for s in others if _damage(_folder(workdir, s), "model/") is None]
        raise DamagedError(f"{error}. Sound checkpoints here: {sound} (--step).") from error


def _whole_weights(folder: Path, like: Weights) -> Weights:
    problem = _damage(folder, "model/")
    if problem is None:
        try:
            return _read_weights(folder, like)
        except CheckpointError:
            raise
        except Exception as error:
            problem = f"{folder / 'model'}: {_first_line(error)}"
    raise DamagedError(f"{folder} cannot be read ({problem})")


def prune(workdir: Path, *, keep_last: int = 2) -> None:
    """Remove all but the best checkpoint, the last ``keep_last``, and what a kill left behind."""
    keep = {best_step(workdir), *steps(workdir)[-keep_last:]}
    for step in steps(workdir):
        if step not in keep:
            _remove(workdir / "checkpoints" / str(step))
    for path in (workdir / "checkpoints").iterdir():
        if path.suffix in (".tmp", ".damaged"):
            _remove(path)


def _parts(state: TrainState) -> dict[str, Any]:
    """The trees that are written, by folder."""
    states = {name: table.state for name, table in state.tables.items()}
    optimizer = {"opt_state": state.opt_state, "tables": states, "step": state.step}
    return {"model": state.weights._asdict(), "optimizer": optimizer}


def _read_state(folder: Path, like: TrainState) -> TrainState:
    weights = _read_weights(folder, like.weights)
    wanted = _parts(like)["optimizer"]
    if _is_from_before(folder):
        names = list(wanted.pop("tables"))
        wanted["table_state"] = like.tables[names[0]].state if names else None
        rest = _read(folder / "optimizer", wanted)
        rest["tables"] = {name: rest["table_state"] for name in names}
    else:
        rest = _read(folder / "optimizer", wanted)
    tables = {name: Table(weights.tables[name], state) for name, state in rest["tables"].items()}
    return TrainState(rest["step"], weights.params, weights.model_state, rest["opt_state"], tables)


def _read_weights(folder: Path, like: Weights) -> Weights:
    if not _is_from_before(folder):
        return Weights(**_read(folder / "model", like._asdict()))
    tree = _read(folder / "model", _weights_before(like))
    params, table = tree["params"], tree["table"]
    state = {name: params.pop(name) for name in like.model_state}
    return Weights(params, state, dict.fromkeys(like.tables, table))


def _is_from_before(folder: Path) -> bool:
    """Whether a checkpoint was written when there was one table and no model state."""
    return "format" not in files.read_record(folder / MANIFEST)


def _weights_before(like: Weights) -> dict[str, Any]:
    """The tree in which such a checkpoint holds the weights: model state among the parameters."""
    if len(like.tables) > 1:
        raise ValueError(f"tables {', '.join(like.tables)}: there was but one when it was written")
    (table,) = like.tables.values() or (None,)
    return {"params": {**like.params, **like.model_state}, "table": table}


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


def _damage(folder: Path, read: str | None = None) -> str | None:
    """Why a checkpoint must not be read, or None.

    Args:
      folder: the checkpoint's.
      read: also verify the checksums of the files whose names begin so.
    """
    if not folder.is_dir():
        return "there is no such checkpoint"
    try:
        record = dict(files.read_record(folder / MANIFEST)["files"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"its {MANIFEST} cannot be read: {_first_line(error)}"
    problem = files.damage(folder, record, contents=False)
    if problem is None and read is not None:
        some = {name: entry for name, entry in record.items() if name.startswith(read)}
        problem = files.damage(folder, some)
    return problem


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
