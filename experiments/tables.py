"""Runs the rows of a table, one at a time, each in a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags

from experiments import ledger

SEEDS = {"wordnet-mini": "0,1,2"}  # other data sets: one
MINUTES = {"wordnet-mini": 10.0}  # a limit, far above what a row should take
SHOWN = ("wordnet-mini", "wordnettitles")  # data sets that a table shows, run or not

_DATASET = flags.DEFINE_string("dataset", "wordnet-mini", "What follows configs/unidec.py: .")
_DATA = flags.DEFINE_string("data", "", "Folder of the data set, or a root that holds it.")
_SEEDS = flags.DEFINE_string("seeds", "", "Comma-separated; default 0,1,2 on wordnet-mini, else 0.")
_ONLY = flags.DEFINE_string("only", "", "Only rows whose name holds this.")
_LIST = flags.DEFINE_bool("list", False, "Say what would be run, and what is there already.")
_AGAIN = flags.DEFINE_bool("again", False, "Run rows that are there already once more.")
_MINUTES = flags.DEFINE_float("minutes", 0.0, "Limit of a run; default 10 on wordnet-mini, or 40.")
_LEDGER = flags.DEFINE_string("ledger", str(ledger.LEDGER), "JSON lines to read and to add to.")
_README = flags.DEFINE_string("readme", str(ledger.README), "Where the table is shown.")


def main(table: ledger.Table) -> Callable[[list[str]], None]:
    """The main function of a table's script."""

    def run(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {argv[1:]}; flags begin with --")
        path, failed = Path(_LEDGER.value), 0
        for row in table.rows:
            if _ONLY.value not in row.name:
                continue
            for seed in _seeds():
                failed += not _one(table, row, seed, path)
        if not _LIST.value:
            _show(table, path)
        sys.exit(failed > 0)

    return run


def _seeds() -> list[int]:
    return [int(s) for s in (_SEEDS.value or SEEDS.get(_DATASET.value, "0")).split(",")]


def _one(table: ledger.Table, row: ledger.Row, seed: int, path: Path) -> bool:
    """Runs a row unless it is there; whether all is well."""
    dataset = _DATASET.value
    there = ledger.find(ledger.read(path), dataset, ledger.configuration(dataset, row, seed))
    command = [
        *("python", "-m", "xmc_jax.train", f"--config=configs/unidec.py:{dataset}"),
        *ledger.flags({**row.overrides, "seed": seed}),
    ]
    state = "there already" if there and not _AGAIN.value else "to be run"
    print(f"{row.name}, seed {seed} ({state}): {shlex.join(command)}", flush=True)
    if _LIST.value or state == "there already":
        return True
    limit = 60 * (_MINUTES.value or MINUTES.get(dataset, 40.0))
    commit = ledger.commit()  # of now: the checkout may move on while the run lasts
    found = train(command[1:], data=_DATA.value, limit=limit)
    if found is None:
        return False
    config = ledger.compared(ledger.configuration(dataset, row, seed))
    made = {
        **{"kind": "train", "table": table.name, "name": row.name, "dataset": dataset},
        **{"seed": seed, "command": shlex.join(command), "overrides": dict(row.overrides)},
        **found,
        **{"commit": commit, "config": config},
    }
    ledger.append(made, path)
    _show(table, path)
    best = found["metrics"][table.heads[0]]
    values = "  ".join(f"{name} {best[name]:.2f}" for name in ledger.COLUMNS)
    print(f"  {values}  in {found['seconds']:.0f} s", flush=True)
    return True


def train(arguments: list[str], *, data: str, limit: float) -> dict[str, Any] | None:
    """Trains in a temporary work directory, which is deleted; what the ledger keeps of it.

    Args:
      arguments: of ``python``.
      data: ``--data``, if any.
      limit: seconds, after which the process is killed.

    Returns:
      ``metrics`` by head (test rows, filtered), ``seconds`` of the whole process,
      ``epoch_seconds`` of the training steps, ``in_batch_positives`` of the last epoch; None if
      the run failed, after its last lines were printed.
    """
    folder = Path(tempfile.mkdtemp(prefix="xmc_jax-"))
    command = [sys.executable, *arguments, f"--workdir={folder / 'run'}"]
    if data:
        command.append(f"--data={os.path.abspath(data)}")
    started = time.monotonic()
    try:
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=ledger.ROOT, stdout=log, stderr=log, start_new_session=True
            )
            try:
                status = process.wait(limit)
            except BaseException as error:  # Ctrl-C too: nothing is left running
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                status = f"killed after {limit:.0f} s"
        if status != 0:
            tail = (folder / "log").read_text()[-3000:]
            print(f"{tail}\nfailed ({status}): {shlex.join(command)}", flush=True)
            return None
        return {"seconds": round(time.monotonic() - started, 1), **_results(folder / "run")}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _results(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("eval-test-*.json")
    heads = json.loads(path.read_text())["heads"]
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in log if "epoch_steps" in line]
    return {
        "metrics": {head: values["filtered"] for head, values in heads.items()},
        "epoch_seconds": round(sum(line["seconds"] for line in epochs), 1),
        "in_batch_positives": round(epochs[-1]["pool"]["in_batch_positives"], 3),
    }


def _show(table: ledger.Table, path: Path) -> None:
    rows = ledger.read(path)
    run = [row["dataset"] for row in rows if row.get("kind") == "train"]
    shown = dict.fromkeys([*SHOWN, *run, _DATASET.value])
    names = [name for name in shown if name in SHOWN or _any(table, name, rows)]
    ledger.write_section(table.name, ledger.render(table, names, rows), Path(_README.value))


def _any(table: ledger.Table, dataset: str, rows: list[dict[str, Any]]) -> bool:
    """Whether any row of the table was run on this data set."""
    seeds = {row["seed"] for row in rows if row.get("kind") == "train"}
    return any(
        ledger.find(rows, dataset, ledger.configuration(dataset, row, seed))
        for row in table.rows
        for seed in seeds
    )
