"""In-batch positives against beta and eta (preprint figure 2b, appendix C.3).

python -m experiments.pool_statistics --dataset=wordnet-mini [--workdir=RUN]
python -m experiments.pool_statistics --synthetic=0.1

Batches are random or clusters of the queries' dual-encoder embeddings, hard negatives are mined
with the same embeddings: those of a trained run, or of the bag encoder before its first step. The
pool has room for all that is sampled, so nothing is dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from configs import unidec
from experiments import ledger, synthetic
from xmc_jax.data.batching import batches, pools
from xmc_jax.data.search import clustering
from xmc_jax.data.search import index as indexes
from xmc_jax.host import console
from xmc_jax.runs import launch, open_runs
from xmc_jax.systems.unidec import ranking
from xmc_jax.systems.unidec.embedder import Embedder
from xmc_jax.training.training_data import TrainingData

NAME = "pool_statistics"
BETAS, ETAS = (1, 2, 3, 4), (0, 3, 6)
REFRESH_EPOCHS = 5  # a list of hard negatives is eta times this long [preprint 3.1]
GROUPS = {"tail": (1, 10), "torso": (10, 101), "head": (101, np.inf)}  # by labels of the query


def statistics(
    data: TrainingData,
    embedder: Embedder,
    params: Any,
    *,
    batch_size: int,
    num_batches: int,
    index: str = "auto",
    seed: int = 0,
) -> list[dict[str, float]]:
    """Pool statistics for each kind of batch, beta and eta.

    Args:
      data: its training rows and labels.
      embedder: of the model.
      params: its parameters.
      batch_size: wanted; clusters have the nearest size there is.
      num_batches: at most so many batches of an epoch are drawn.
      index: for the mining.
      seed: of clusters and samples.

    Returns:
      One object a setting: ``in_batch_positives`` (mean |P_i^B|), ``labels`` (mean pool size), and
      for all queries and each group, the share whose positives are all in the pool.
    """
    rows = data.rows
    queries = embedder.de(params, data.train_tokens, rows)
    levels = batches.cluster_levels(len(rows), batch_size)
    order, offsets = clustering.balanced_clusters(queries, levels, seed=seed)
    size = batches.batch_slots(len(rows), levels)
    drawn = {
        "random": batches.epoch_queries(seed, 0, rows, size),
        "clusters": batches.epoch_queries(
            seed, 0, rows, size, batching="clusters", order=order, offsets=offsets
        ),
    }
    mined = _mine(data, embedder, params, rows, queries, index, seed)
    found = []
    for batching, epoch in drawn.items():
        for beta in BETAS:
            for eta in ETAS:
                sums = _average(data, epoch[:num_batches], mined, beta, eta, seed)
                found.append({"batching": batching, "beta": beta, "eta": eta, **sums})
    return found


def _mine(
    data: TrainingData,
    embedder: Embedder,
    params: Any,
    rows: np.ndarray,
    queries: np.ndarray,
    index: str,
    seed: int,
) -> np.ndarray:
    labels = embedder.de(params, data.label_tokens, side="label")
    kind = ranking.choose_index(index, len(rows), *labels.shape)
    built = indexes.Index.build(
        labels, kind, seed=seed, sample_queries=queries[:: len(rows) // 500 or 1]
    )
    width = max(ETAS) * REFRESH_EPOCHS
    mined = np.full((data.labels.shape[0], width), -1, np.int32)
    filters = None if data.filters is None else data.filters[rows]
    mined[rows] = indexes.mine(
        queries, built, labels=data.labels[rows], filters=filters, width=width
    )
    return mined


def _average(
    data: TrainingData, epoch: np.ndarray, mined: np.ndarray, beta: int, eta: int, seed: int
) -> dict[str, float]:
    """Means over the batches; a query counts once."""
    size = epoch.shape[1]
    sums: dict[str, float] = defaultdict(float)
    for number, queries in enumerate(epoch):
        pool = pools.build_pool(
            np.random.default_rng([seed, number, beta, eta]),
            queries,
            data.labels,
            filters=data.filters,
            hard_negatives=mined[:, : eta * REFRESH_EPOCHS],
            pool_size=min(size * (beta + eta), max(data.num_labels, size)),
            beta=beta,
            eta=eta,
            fill="none",
        )
        there = queries >= 0
        positives = pool.targets[there].sum(axis=1)
        all_positives = np.diff(data.labels.indptr)[queries[there]]
        sums["queries"] += len(positives)
        sums["in_batch_positives"] += positives.sum()
        sums["labels"] += np.count_nonzero(pool.ids < data.num_labels)
        complete = positives >= all_positives
        sums["complete"] += complete.sum()
        for group, (least, limit) in GROUPS.items():
            of_group = (all_positives >= least) & (all_positives < limit)
            sums[f"{group}_queries"] += of_group.sum()
            sums[f"{group}_complete"] += complete[of_group].sum()
    means = {
        "in_batch_positives": sums["in_batch_positives"] / sums["queries"],
        "labels": sums["labels"] / len(epoch),
        "complete": sums["complete"] / sums["queries"],
    }
    for group in GROUPS:
        number = sums[f"{group}_queries"]
        means[group] = sums[f"{group}_complete"] / number if number else float("nan")
    return {name: round(float(value), 4) for name, value in means.items()}


def show(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        f"**{result['dataset']}**: {result['points']:,} points, {result['labels']:,} labels, "
        f"{result['labels_a_point']} labels a point, {result['batch']} queries a batch, embeddings "
        f"of {result['encoder']} (`{result['command']}`).",
        "",
        "| batches | beta | eta | positives in the batch | labels in the pool | all positives there"
        " | tail | torso | head |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["settings"]:
        shares = (row[name] for name in ("complete", *GROUPS))
        cells = ["" if np.isnan(share) else f"{100 * share:.1f} %" for share in shares]
        lines.append(
            f"| {row['batching']} | {row['beta']} | {row['eta']} | "
            f"{row['in_batch_positives']:.2f} | {row['labels']:.0f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def section(rows: list[dict[str, Any]]) -> str:
    """All data sets' newest results, for the README."""
    newest = {row["result"]["dataset"]: row["result"] for row in rows if row.get("kind") == NAME}
    head = [
        "### In-batch positives (preprint figure 2b)",
        "",
        "Mean |P_i^B|, and the share of queries whose positives are all in the pool, by the number "
        "of labels of the query: tail below 10, torso 10 to 100, head above. Published: 13.6 "
        "positives at beta 3, eta 0 (figure 2b); 14.2 at beta 1, eta 6 on LF-AmazonTitles-1.3M "
        "(table 6), 2.0 at beta 3, eta 6 on LF-Amazon-131K (table 7).",
    ]
    return "\n\n".join(["\n".join(head), *(show(result) for result in newest.values())])


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Opens what the options name and takes the statistics."""
    name, data_folder = options.dataset, options.data
    if options.synthetic:
        os.environ["XMC_CACHE"] = str(folder / "cache")
        name, data_folder = "amazontitles1.3m", str(folder / "synthetic")
        synthetic.write(Path(data_folder), options.synthetic)
    if options.workdir:
        opened = open_runs.open_run(options.workdir)
        data, system, params = opened.load_data(data_folder), opened.system, opened.weights.params
        config, encoder = opened.meta["resolved"], f"step {opened.step} of a trained run"
    else:
        config = unidec.get_config(name)
        config.data = data_folder
        config.encoder.name, config.batching, config.hard_negatives = "bag", "random", False
        start = launch.prepare(config, folder / "run", None)
        data, system, params = start.run.data, start.run.system, start.weights.params
        config, encoder = start.config, "the bag encoder before its first step"
    size = options.batch_size or config["batch_size"]
    settings = statistics(
        data, system.embedder, params, batch_size=size, num_batches=options.batches
    )
    return {
        "dataset": f"synthetic {options.synthetic:g}" if options.synthetic else config["dataset"],
        "encoder": encoder,
        "points": len(data.rows),
        "labels": data.num_labels,
        "labels_a_point": round(data.labels.nnz / len(data.rows), 2),
        "batch": batches.batch_slots(len(data.rows), batches.cluster_levels(len(data.rows), size)),
        "settings": settings,
    }


def main() -> None:
    """Measures, prints the table, keeps it."""
    parser = ledger.arguments(__doc__)
    add = parser.add_argument
    add("--dataset", default="wordnet-mini", help="name, folder or file")
    add("--data", default="", help="folder of the data set, or a root that holds it")
    add("--workdir", type=Path, help="a trained run, whose encoder and data are used")
    add("--synthetic", type=float, default=0.0, help="scale of generated data instead")
    add("--batch_size", type=int, default=0, help="queries; default: the configuration's")
    add("--batches", type=int, default=50, help="batches to average over, at most")
    add("--output", type=Path, help="also write the result there, as JSON")
    options = parser.parse_args()
    given = (
        ("workdir",) if options.workdir else ("synthetic",) if options.synthetic else ("dataset",)
    )
    given += ("batch_size",) if options.batch_size else ()
    flags = " ".join(f"--{name}={vars(options)[name]}" for name in given)
    command = f"python -m experiments.{NAME} {flags}"
    if options.list:
        print(command)
        return
    console.setup()
    folder, commit = Path(tempfile.mkdtemp(prefix="xmc_jax-")), ledger.commit()
    try:
        result = {**measure(folder, options), "command": command}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(show(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    row = {"kind": NAME, "command": command, "commit": commit, "result": result}
    ledger.append(row, options.ledger)


if __name__ == "__main__":
    main()
