"""A run of the size of LF-AmazonTitles-1.3M on generated data: time and memory of every part.

python -m experiments.scale_amazontitles13m [--scale=0.01] [--folder=DIR]

2,248,619 points and 1,305,265 labels, the papers' configuration with a bag encoder: half of the
steps on random batches, one refresh (clusters and mined hard negatives, IVF), the other half on
clusters. Then the mined lists of 2,000 points are compared with exact search.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from configs import unidec
from experiments import ledger, synthetic
from xmc_jax.contracts import TrainState, Weights
from xmc_jax.data.search import index as indexes
from xmc_jax.data.texts import JoinedTexts
from xmc_jax.host import console
from xmc_jax.runs import settings
from xmc_jax.training import refresh, training_data
from xmc_jax.training.loop import Run

NAME = "scale_amazontitles13m"
COMPARED = 2000  # points whose mined lists are compared with exact search


class Laps:
    """Seconds of the parts of a script."""

    def __init__(self) -> None:
        """Start the clock."""
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """What was done since the last lap is called so."""
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 2)
        self._last = now


def configuration(folder: Path, index: str) -> ConfigDict:
    """The papers' configuration of LF-AmazonTitles-1.3M with a bag encoder."""
    config = unidec.get_config("amazontitles1.3m")
    config.data = str(folder)
    config.encoder.name = "bag"
    config.lr.encoder = config.lr.heads = 2e-3  # the bag encoder's rates, not DistilBERT's
    config.lr.table = 1e-2
    config.index = index
    return config


def prepare(config: ConfigDict, folder: Path, laps: Laps) -> tuple[Run, Weights]:
    """A run before its first step, as `xmc_jax.runs.launch.prepare` makes it, in timed parts."""
    dataset, entry, _ = training_data.read_dataset(
        config.dataset, config.data, max_length=config.max_length
    )
    resolved, _ = settings.resolve(config, dataset)
    family, options = settings.family_of(resolved), settings.options_of(resolved)
    laps.lap("read")
    texts = JoinedTexts(dataset.train.texts, dataset.label_texts)
    tokenizer = family.tokenizer(options, texts, folder / "tokenizer")
    laps.lap("tokenizer")
    for collection, side in ((dataset.train.texts, "query"), (dataset.label_texts, "label")):
        training_data.token_store(options.text_form, tokenizer, collection, side)
    laps.lap("tokenise")
    data = training_data.load(options, dataset, entry, tokenizer)
    laps.lap("hold_out")
    built = family.build(options, folder, data, tokenizer)
    source = built.system.source(built.data)
    stages = family.stages(options, resolved.epochs)
    laps.lap("parameters")
    return Run(options, folder, built.data, built.system, source, stages), built.weights


def measure(folder: Path, scale: float, steps: int, index: str) -> dict[str, Any]:
    """Makes the data below ``folder``, trains, refreshes, compares; what the ledger keeps."""
    os.environ["XMC_CACHE"] = str(folder / "cache")
    laps = Laps()
    synthetic.write(folder / f"synthetic-{scale:g}", scale)
    laps.lap("write_data")
    config = configuration(folder / f"synthetic-{scale:g}", index)
    work = folder / f"run-{scale:g}"
    run, weights = prepare(config, work, laps)
    state = jax.block_until_ready(run.system.first_state(run.data, weights))
    laps.lap("table")
    del weights  # a step donates them
    state, random_step = _steps(run, state, 0, steps // 2)
    laps.lap("random_steps")
    shutil.rmtree(work / "refresh", ignore_errors=True)
    write = lambda folder: run.system.write_refresh(folder, 0, run.data, state)
    found = refresh.write(work, 0, write)
    laps.lap("refresh")
    parts = json.loads((work / "refresh" / "0" / "info.json").read_text())
    compared = _compare(run, state.params, found)
    laps.lap("compare")
    run.source.use(found)
    state, cluster_step = _steps(run, state, steps // 2, steps - steps // 2)
    laps.lap("cluster_steps")
    host = _host_seconds(run)
    laps.lap("host_batches")
    return {
        "scale": scale,
        "points": len(run.data.rows),
        "labels": run.data.num_labels,
        "labels_a_point": round(run.data.labels.nnz / len(run.data.rows), 1),
        "batch": run.source.shapes.queries,
        "pool": run.source.shapes.labels,
        "seconds": laps.seconds,
        "refresh": {name: value for name, value in parts.items() if name != "epoch"},
        "seconds_a_step": {"random": random_step, "clusters": cluster_step},
        "host_ms_a_batch": round(1000 * host, 1),
        "shapes_compiled": run.num_compiled,
        **compared,
        "peak_gigabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def _steps(run: Run, state: TrainState, done: int, number: int) -> tuple[TrainState, float]:
    """Some steps of epoch 0; the median of their seconds, compilation left out."""
    times, stage = [], run.stages[0]
    step = run.step(stage)
    first = min(done, max(0, run.source.shapes.steps - number))
    for batch, _, _ in itertools.islice(run.source.ahead(stage, 0, first), number):
        step.compile(state, batch)
        started = time.perf_counter()
        state, parts = step(state, batch, run.factor(int(state.step)))
        if not np.isfinite(float(parts["loss"])):
            raise ValueError(f"step {int(state.step)}: loss {float(parts['loss'])}")
        times.append(time.perf_counter() - started)
    return state, round(statistics.median(times), 3)


def _host_seconds(run: Run, number: int = 30) -> float:
    """Seconds to make a batch (pool, gather, packing), in the one thread that makes them."""
    started, count = time.perf_counter(), 0
    for _ in itertools.islice(run.source.ahead(run.stages[0], 0, 0), number):
        count += 1
    return (time.perf_counter() - started) / count


def _compare(run: Run, params: Any, found: refresh.Refresh) -> dict[str, Any]:
    """Exact search for some points: its time, and the share of its results that were mined."""
    data, embedder, hard_negatives = run.data, run.system.embedder, found["hard_negatives"]
    width = hard_negatives.shape[1]
    rows = data.rows[np.linspace(0, len(data.rows) - 1, COMPARED).astype(int)]
    labels = embedder.de(params, data.label_tokens, side="label")
    queries = embedder.de(params, data.train_tokens, rows)
    started = time.perf_counter()
    exact = indexes.Index.build(labels, "exact", seed=0)
    built = time.perf_counter()
    filters = None if data.filters is None else data.filters[rows]
    own = data.labels[rows]
    truth = indexes.mine(queries, exact, labels=own, filters=filters, width=width)
    searched = time.perf_counter()
    mined = hard_negatives[rows]
    hits = [np.isin(t[t >= 0], m).mean() for t, m in zip(truth, mined)]
    top = [np.isin(t[:5], m).mean() for t, m in zip(truth, mined)]
    return {
        "exact": {
            "queries": len(rows),
            "build_seconds": round(built - started, 1),
            "search_seconds": round(searched - built, 1),
        },
        "mined_recall": {f"@{width}": round(float(np.mean(hits)), 4), "@5": float(np.mean(top))},
    }


def show(row: dict[str, Any]) -> str:
    """A row's result as Markdown."""
    found = row["result"]
    refresh, exact = found["refresh"], found["exact"]
    lines = [
        f"`{row['command']}`, {row['device']}, commit {row['commit']}, {row['date']}.",
        "",
        f"{found['points']:,} training points with labels, {found['labels']:,} labels, "
        f"{found['labels_a_point']} labels a point; batch {found['batch']}, pool {found['pool']}. "
        f"Peak memory {found['peak_gigabytes']} GB.",
        "",
        "| part | seconds |",
        "| --- | ---: |",
        *(
            f"| {name.replace('_', ' ')} | {value:.1f} |"
            for name, value in found["seconds"].items()
        ),
        *(
            f"| refresh: {name.replace('_', ' ')} | {value:.1f} |"
            for name, value in refresh.items()
            if name in ("embed_queries", "cluster", "embed_labels", "build", "search")
        ),
        *(
            f"| a step, {name}: median | {value:.3f} |"
            for name, value in found["seconds_a_step"].items()
        ),
        f"| a batch on the host (made ahead in a thread) | {found['host_ms_a_batch'] / 1000:.4f} |",
        f"| exact search, {exact['queries']:,} points over all labels | "
        f"{exact['search_seconds']:.1f} |",
        "",
        f"Index of the mining: {refresh['index']}. Share of exact search's hard negatives that "
        "were mined: "
        + ", ".join(f"{name} {value:.3f}" for name, value in found["mined_recall"].items())
        + ".",
    ]
    return "\n".join(lines)


def section(rows: list[dict[str, Any]]) -> str:
    """The newest result of each command, for the README."""
    newest = {row["command"]: row for row in rows if row.get("kind") == NAME}
    head = "### The size of LF-AmazonTitles-1.3M, on generated data"
    return "\n\n".join([head, *(show(row) for row in newest.values())])


def main() -> None:
    """Measures, prints one JSON line, keeps it."""
    parser = ledger.arguments(__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the points and labels")
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--index", default="ivf", help="index of the mining")
    parser.add_argument("--folder", type=Path, help="where data are kept; default: nowhere")
    options = parser.parse_args()
    flags = f"--scale={options.scale:g} --steps={options.steps} --index={options.index}"
    command = f"python -m experiments.{NAME} {flags}"
    print(command, flush=True)
    if options.list:
        return
    console.setup()
    commit = ledger.commit()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="xmc_jax-"))
    try:
        found = measure(folder, options.scale, options.steps, options.index)
    finally:
        if not options.folder:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found))
    row = {"kind": NAME, "command": command, "commit": commit, "result": found}
    ledger.append(row, options.ledger)


if __name__ == "__main__":
    main()
