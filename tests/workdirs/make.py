"""Makes the work directories beside this file, and what is expected of them; see README.md.

PYTHONPATH=CHECKOUT:CHECKOUT/tests python tests/workdirs/make.py CHECKOUT

CHECKOUT is one of commit 6654296: what later code writes would prove nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tiny

from xmc_jax import checkpoints, open_runs, predictor, workdir

COMMIT, DATA, ROWS = "6654296", "points.tsv", 160
TEXTS = ["red apple or old number 7", "a castle", "wild violin or plain planet"]
SHARED = (
    "batch_size=16 pool_size=48 row_length=32 refresh_epochs=1 eval_epochs=1 max_minutes=0.0 "
    "held_out_share=0.05 log_steps=1 encoder.vocab_size=300"
)
RUNS = {  # configuration, its fields, step of the signal, checkpoints that are kept
    "unidec": (
        f"configs/unidec.py:{DATA}",
        f"{SHARED} max_length=16 epochs=3 encoder.name=bag encoder.dim=16 head_dim=16 "
        "hard_negatives=True batching=clusters lr.encoder=0.005 lr.heads=0.005 lr.table=0.01",
        12,
        2,
    ),
    "inceptionxml-lf": (
        f"configs/frugal.py:inceptionxml-lf,{DATA}",
        f"{SHARED} max_length=8 epochs=4 encoder.dim=64 encoder.vocabulary=words clusters.size=4 "
        "clusters.top=4 graph.neighbours=4 graph.tokens=8",
        20,
        1,
    ),
}
# Training that sends itself a signal after a step. Numbers of eight bits of mantissa, in the same
# arrays, need half the room.
STOPPED = """
import runpy, signal, sys
import jax
from xmc_jax import train_loop
last, usual = int(sys.argv.pop(1)), train_loop._Loop._stop_or_save
short = lambda x: x.astype("bfloat16").astype(x.dtype) if x.dtype == "float32" else x
def stop(self, state, epoch):
    if int(state.step) == last:
        state = jax.tree.map(short, state)
        signal.raise_signal(signal.SIGTERM)
    usual(self, state, epoch)
train_loop._Loop._stop_or_save = stop
runpy.run_module("xmc_jax.train", run_name="__main__", alter_sys=True)
"""


def flags(name: str) -> list[str]:
    """Of ``xmc_jax.train``; the configuration's file by its path in a checkout."""
    config, fields, *_ = RUNS[name]
    return [f"--config={config}", *(f"--config.{field}" for field in fields.split())]


def train(name: str, checkout: Path, folder: Path, *how: str) -> int:
    """Train ``folder / name`` on the data in ``folder``; returns the exit code."""
    given = [flag.replace("=configs/", f"={checkout}/configs/") for flag in flags(name)]
    command = [sys.executable, *how, *given, f"--workdir={name}"]
    return subprocess.run(command, cwd=folder).returncode


def forget_place(run: Path) -> None:
    """Replace the absolute folder of a run, which would be another one for everybody."""
    meta = json.loads((run / "meta.json").read_text())
    meta["data"]["folder"] = DATA
    workdir.write_json(run / "meta.json", meta)
    for checkpoint in run.glob("checkpoints/*"):
        manifest = json.loads((checkpoint / checkpoints.MANIFEST).read_text())
        for path in checkpoint.glob("*/commit_success.txt"):
            path.write_text(path.read_text().replace(f"{run}/", ""))
            manifest["files"][str(path.relative_to(checkpoint))] = path.stat().st_size
        (checkpoint / checkpoints.MANIFEST).write_text(json.dumps(manifest))


def as_it_lies(run: Path, data: Path) -> dict[str, Any]:
    """Evaluations of all checkpoints, and predictions of the one that is opened."""
    evaluations = {}
    for step in checkpoints.steps(run):
        opened = open_runs.open_run(run, step=step)
        evaluations[step] = open_runs.evaluate_run(opened, data=str(data))["heads"]
    model, predictions = predictor.load(run), {}
    for head in model.heads:
        ids, scores = model.predict_ids(TEXTS, k=5, head=head)
        predictions[head] = {"ids": ids.tolist(), "scores": scores.tolist()}
    opened = checkpoints.best_step(run)
    return {"opened": opened, "heads": evaluations, "texts": TEXTS, "predictions": predictions}


def at_the_end(run: Path, first: int) -> dict[str, Any]:
    """Of a finished run: its evaluation, arrays of the last checkpoint, losses from a step on."""
    last = checkpoints.steps(run)[-1]
    with ocp.StandardCheckpointer() as reader:
        read = lambda part: reader.restore(run / "checkpoints" / str(last) / part)
        trees = {part: read(part) for part in ("model", "optimizer")}
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        values = np.asarray(leaf).astype(np.float64)
        name = "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        arrays[name] = [float(values.sum()), float((values**2).sum())]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {x["step"]: x["loss"] for x in lines if "loss" in x and x["step"] > first}
    (evaluated,) = run.glob("eval-test-*.json")
    evaluation = json.loads(evaluated.read_text())
    kept = {"step": evaluation["step"], "heads": evaluation["heads"]}
    return {"step": last, "evaluation": kept, "losses": losses, "arrays": arrays}


def make(name: str, checkout: Path, here: Path, scratch: Path) -> None:
    """One work directory, and the file of what is expected of it."""
    *_, step, kept = RUNS[name]
    run = scratch / name
    assert train(name, checkout, scratch, "-c", STOPPED, str(step)) == 143
    for old in checkpoints.steps(run)[:-kept]:
        shutil.rmtree(run / "checkpoints" / str(old))
    shutil.rmtree(run / "tensorboard", ignore_errors=True)
    forget_place(run)
    shutil.rmtree(here / name, ignore_errors=True)
    shutil.copytree(run, here / name)
    found = as_it_lies(run, scratch / DATA)
    shutil.rmtree(run)
    shutil.copytree(here / name, run)  # without those evaluations
    assert train(name, checkout, scratch, "-m", "xmc_jax.train") == 0
    expected = {"flags": flags(name), "fixture": found, "continued": at_the_end(run, step)}
    text = json.dumps(expected, indent=1, default=int)
    (here / f"expected-{name}.json").write_text(text + "\n")


def main() -> None:
    """Both of them, on the same data."""
    checkout, here = Path(sys.argv[1]).resolve(), Path(__file__).resolve().parent
    assert workdir.versions()["commit"].startswith(COMMIT), "PYTHONPATH holds another commit"
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder).resolve()
        os.environ["XMC_CACHE"] = str(scratch / "cache")
        shutil.copy(tiny.write_tsv(scratch / DATA, rows=ROWS), here / DATA)
        for name in RUNS:
            make(name, checkout, here, scratch)


if __name__ == "__main__":
    main()
