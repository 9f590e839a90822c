"""Start from another run's encoder and heads: ``config.init_from``."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax

from xmc_jax import files
from xmc_jax.contracts import Built, Weights
from xmc_jax.runs import open_runs
from xmc_jax.training import workdir


def take_tokenizer(source: Path, folder: Path) -> None:
    """Copy another run's tokenizer, whose ids its encoder's vectors belong to.

    Raises:
      WorkdirError: the source is not a work directory, or its tokenizer is damaged.
    """
    if problem := workdir.damage(source, workdir.read_meta(source), "tokenizer"):
        raise workdir.WorkdirError(f"config.init_from={source}: {problem}")
    target = folder / "tokenizer"
    with files.naming(target), files.replacing_folder(target) as temporary:
        shutil.copytree(source / "tokenizer", temporary, dirs_exist_ok=True)


def take_weights(source: Path, names: Collection[str], built: Built) -> Weights:
    """First weights with those of another run's chosen checkpoint, where they have these names.

    Args:
      source: its work directory.
      names: of parameters, and of what belongs to them in the model state.
      built: what the new run begins with.

    Raises:
      WorkdirError, CheckpointError: not a work directory, no sound checkpoint.
      ValueError: a part has other shapes there.
    """
    theirs = open_runs.open_run(source).weights
    ours = built.weights
    params, taken = dict(ours.params), []
    for name in names:
        if name in params and name in theirs.params:
            _check_shapes(source, name, params[name], theirs.params[name])
            params[name] = theirs.params[name]
            taken.append(name)
    if not taken:
        raise ValueError(
            f"config.init_from={source}: that run has none of {', '.join(params)}; it holds "
            f"{', '.join(theirs.params)}. Start from a run of the same family."
        )
    return ours._replace(
        params=params, model_state=_joined(ours.model_state, theirs.model_state, taken)
    )


def _joined(ours: Any, theirs: Any, names: Collection[str]) -> Any:
    """Our model state with their values below these names, wherever the trees have them."""
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return ours
    return {
        name: theirs[name]
        if name in names and name in theirs
        else _joined(value, theirs.get(name), names)
        for name, value in ours.items()
    }


def _check_shapes(source: Path, name: str, ours: Any, theirs: Any) -> None:
    shapes = lambda tree: {
        jax.tree_util.keystr(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    have, want = shapes(theirs), shapes(ours)
    different = [key for key in sorted(have.keys() | want.keys()) if have.get(key) != want.get(key)]
    if different:
        key = different[0]
        raise ValueError(
            f"config.init_from={source}: {name}{key} has shape {have.get(key)} there, "
            f"{want.get(key)} here. Take the same encoder and sizes as that run."
        )
