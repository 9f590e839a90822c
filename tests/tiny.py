"""Runs that train in a second or two: own data of some hundred points, and small settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from configs import frugal, unidec
from xmc_jax.runs import settings
from xmc_jax.training.options import TrainingOptions

ROOT = Path(__file__).parent.parent
TOPICS = ("apple", "river", "engine", "violin", "planet", "garden", "castle", "copper")
KINDS = ("red", "old", "small", "loud", "cold", "round", "wild", "plain")
SMALL = {
    "encoder.name": "bag",
    "encoder.dim": 16,
    "encoder.vocab_size": 400,
    "head_dim": 16,
    "max_length": 16,
    "row_length": 32,
    "batch_size": 16,
    "pool_size": 48,
    "epochs": 2,
    "eval_epochs": 1,
    "refresh_epochs": 1,
    "hard_negatives": True,
    "batching": "clusters",
    "max_minutes": 0.0,
    "held_out_share": 0.05,
    "lr.encoder": 5e-3,
    "lr.heads": 5e-3,
    "lr.table": 1e-2,
    "log_steps": 1,
    "retrieval.enabled": False,  # `tests/runs/test_retrieval.py` has it
}


def write_tsv(path: Path, rows: int = 300, seed: int = 0) -> Path:
    """Own data: ``text<TAB>label|label``; a label is two of the words of its texts."""
    rng = np.random.default_rng(seed)
    lines = []
    for row in range(rows):
        topic, kind, other = rng.integers(0, 8, 3)
        labels = {f"{KINDS[kind]} {TOPICS[topic]}", f"{KINDS[other]} {TOPICS[topic]}"}
        text = f"{KINDS[kind]} {TOPICS[topic]} or {KINDS[other]} number {row % 50}"
        lines.append(f"{text}\t{'|'.join(sorted(labels))}\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def config(source: Path | str, **changes: object) -> ConfigDict:
    """The small configuration of a data set; ``changes`` use ``__`` for dots."""
    made = unidec.get_config(str(source))
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    with made.unlocked():
        made.update_from_flattened_dict({**SMALL, **dotted})
    return made


def frugal_config(system: str, source: Path | str, **changes: object) -> ConfigDict:
    """A small configuration of a frugal system; ``changes`` use ``__`` for dots."""
    made = frugal.get_config(f"{system},{source}")
    small = {name: value for name, value in SMALL.items() if not name.startswith("head")}
    small = {**small, "encoder.name": made.encoder.name, "batching": "random"}
    small["encoder.dim"] = 64 if made.encoder.name == "inception" else 16
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    with made.unlocked():
        made.update_from_flattened_dict({**small, "clusters.size": 4, "clusters.top": 4, **dotted})
    return made


def options(config: ConfigDict, **changes: object) -> TrainingOptions:
    """The options of a complete configuration; ``changes`` use ``__`` for dots."""
    made = config.copy_and_resolve_references()
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    with made.unlocked():
        made.update_from_flattened_dict(dotted)
    return settings.options_of(made)


def flags(**changes: object) -> list[str]:
    """The small settings as flags of ``xmc_jax.train``."""
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    return [f"--config.{name}={value}" for name, value in {**SMALL, **dotted}.items()]


def start(module: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    """Starts a binary as a user would."""
    environment = {**os.environ, **options.pop("environment", {})}
    return subprocess.Popen(
        [sys.executable, "-m", f"xmc_jax.{module}", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
        **options,
    )


def run(
    module: str, *arguments: object, stdin: str | None = None, **options: object
) -> subprocess.CompletedProcess[str]:
    """Runs a binary to its end."""
    process = start(module, *arguments, stdin=subprocess.PIPE, **options)
    out, err = process.communicate(stdin, timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
