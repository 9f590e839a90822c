"""Runs the rows of a table, one at a time, each in a process of its own."""

from __future__ import annotations

import argparse
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

from experiments import ledger

SEEDS = {"wordnet-mini": "0,1,2"}  # other data sets: one
MINUTES = {"wordnet-mini": 10.0}  # a limit, far above what a row should take
BUDGET = {"wordnet-mini": 3.0}  # minutes of a row on an idle machine; other data sets: 10


def main(
    table: ledger.Table,
    description: str | None,
    finish: Callable[[argparse.Namespace], None] | None = None,
) -> None:
    """Runs a table's script: its flags, then its rows.

    Args:
      table: what to run.
      description: the script's docstring.
      finish: called with the flags after the rows, if all are there.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # as Ctrl-C
    parser = ledger.arguments(description)
    add = parser.add_argument
    add("--dataset", default=table.datasets[0], help="name of the data set, and options after it")
    add("--data", default="", help="folder of the data set, or a root that holds it")
    add("--seeds", help="comma-separated; default 0,1,2 on wordnet-mini, else 0")
    add("--only", default="", help="only rows whose name holds this")
    add("--again", action="store_true", help="run rows that are there already once more")
    add("--minutes", type=float, help="limit of a run; default 10 on wordnet-mini, else 40")
    options = parser.parse_args()
    seeds = [int(s) for s in (options.seeds or SEEDS.get(options.dataset, "0")).split(",")]
    rows = [r for r in table.rows if options.only in r.name and r.fits(options.dataset)]
    done = [_one(table, row, seed, options) for row in rows for seed in seeds]
    if not options.list:
        print("README.md is made anew by python -m experiments.readme")
        if finish and all(done):
            finish(options)
    sys.exit(not all(done))


def _one(table: ledger.Table, row: ledger.Row, seed: int, options: argparse.Namespace) -> bool:
    """Runs a row unless it is there; whether all is well."""
    dataset = options.dataset
    config = ledger.configuration(dataset, row, seed)
    there = ledger.measured(ledger.read(options.ledger), dataset, row, seed) and not options.again
    command = [
        *("python", "-m", "xmc_jax.train", f"--config={row.config}:{row.prefix}{dataset}"),
        *ledger.flags({**row.on(dataset), "seed": seed}),
    ]
    state = "there already" if there else "to be run"
    print(f"{row.name}, seed {seed} ({state}): {shlex.join(command)}", flush=True)
    if options.list or there:
        return True
    limit = 60 * (options.minutes or MINUTES.get(dataset, 40.0))
    commit = ledger.commit()  # of now: the checkout may move on while the run lasts
    found = train(command[1:], data=options.data, limit=limit)
    if found is None:
        return False
    made = {
        **{"kind": "train", "table": table.name, "name": row.name, "dataset": dataset},
        **{"seed": seed, "command": shlex.join(command), "overrides": row.on(dataset)},
        **found,
        **{"commit": commit, "config": ledger.compared(config)},
    }
    ledger.append(made, options.ledger)
    best = found["metrics"][(row.heads or table.heads)[0]]
    values = "  ".join(f"{name} {best[name]:.2f}" for name in table.columns)
    budget = 60 * BUDGET.get(dataset.split(",")[0], 10.0)
    over = f" (budget: {budget:.0f} s)" if found["seconds"] > budget else ""
    print(f"  {values}  in {found['seconds']:.0f} s{over}", flush=True)
    return True


def train(arguments: list[str], *, data: str, limit: float) -> dict[str, Any] | None:
    """Trains in a temporary work directory, which is deleted; what the ledger keeps of it.

    Args:
      arguments: of ``python``.
      data: ``--data``, if any.
      limit: seconds, after which the process is killed.

    Returns:
      ``metrics`` by head (test rows, filtered), ``bins`` by head (what labels of each frequency
      add to P@5), ``held_out`` (metrics after so many ``steps`` in all), ``steps``, ``seconds`` of
      the whole process, ``epoch_seconds`` of the training steps, ``in_batch_positives`` of the last
      epoch; None if the run failed, after its last lines were printed.
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
            except BaseException as error:  # Ctrl-C, SIGTERM too: nothing is left
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
    result = json.loads(path.read_text())
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in log if "epoch_steps" in line]
    return {
        "metrics": {head: values["filtered"] for head, values in result["heads"].items()},
        "bins": result["bins"],
        "held_out": [{"steps": x["step"], **x["held_out"]} for x in log if "held_out" in x],
        "steps": sum(line["epoch_steps"] for line in epochs),
        "epoch_seconds": round(sum(line["seconds"] for line in epochs), 1),
        "in_batch_positives": round(epochs[-1]["pool"]["in_batch_positives"], 3),
    }
