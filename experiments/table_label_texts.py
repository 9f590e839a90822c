"""Gandalf where a test text is a label's text, which it has trained on, and where it is none.

python -m experiments.table_label_texts --without=RUN --gandalf=RUN

The runs are work directories of `xmc_jax.train` on one data set. Beside them stands what needs no
training: the label of the same text and its strongest neighbours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from experiments.table_predictions import open_both, pair_arguments, part, run_pair
from xmc_jax import metrics
from xmc_jax.data import splits
from xmc_jax.data.summaries import baselines
from xmc_jax.metrics.propensity import inverse_propensity
from xmc_jax.training import evaluation

NAME = "table_label_texts"
COLUMNS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5")
KINDS = ("a label's text", "no label's text")
LOOKUP = "label of the same text, no training"


def is_label_text(texts: Any, label_texts: Any) -> np.ndarray:
    """Which texts are a label's, case ignored; ``[n]`` bool."""
    codes, label_codes = splits.text_codes(texts, label_texts)
    return np.isin(codes, label_codes)


def compare(without: Path, gandalf: Path, options: Any) -> dict[str, Any]:
    """Opens both runs and evaluates them on both kinds of test rows; what the ledger keeps.

    Raises:
      ValueError: the runs are not of one data set, or not without and with Gandalf.
    """
    opened = open_both(without, gandalf)
    loaded = opened[0].load_data(options.data)
    if loaded.test is None:
        raise ValueError(f"{without}: its data set has no test rows.")
    dataset, test = loaded.dataset, loaded.test
    deep = evaluation.depth(test, (5,))
    found = {
        LOOKUP: baselines.label_of_the_same_text(
            dataset.test.texts, dataset.label_texts, dataset.train.labels, deep
        )
    }
    for name, run in zip(("without Gandalf", "with Gandalf"), opened):
        run.load_data(options.data)
        ranker = run.ranker(kind="exact")
        found[name] = evaluation.predict_split(ranker, test, ranker.heads[0], k=deep)[0]
    seen = is_label_text(dataset.test.texts, dataset.label_texts)
    entry = loaded.entry
    weights = inverse_propensity(dataset.train.labels, a=entry.a, b=entry.b)
    rows = {}
    for kind, chosen in zip(KINDS, (np.flatnonzero(seen), np.flatnonzero(~seen))):
        if chosen.size == 0:
            continue
        some = part(test, chosen)
        of_kind = {
            name: metrics.evaluate(
                ids[chosen], some.truth, inverse_propensity=weights, filter_pairs=some.filter_pairs
            )
            for name, ids in found.items()
        }
        rows[kind] = {"rows": len(chosen), "of": len(seen), "metrics": of_kind}
    return {"dataset": opened[0].meta["resolved"]["dataset"], "kinds": rows}


def show(result: dict[str, Any]) -> str:
    """The table as Markdown."""
    lines = [
        f"**{result['dataset']}** (`{result['command']}`)",
        "",
        f"| test rows whose text is | | {' | '.join(COLUMNS)} |",
        f"| --- | --- |{' ---: |' * len(COLUMNS)}",
    ]
    for kind, values in result["kinds"].items():
        first = f"{kind} ({100 * values['rows'] / values['of']:.1f} %)"
        for name, scores in values["metrics"].items():
            cells = " | ".join(f"{scores[column]:.2f}" for column in COLUMNS)
            lines.append(f"| {first} | {name} | {cells} |")
            first = ""
    return "\n".join(lines)


def section(rows: list[dict[str, Any]]) -> str:
    """The newest result of each command, for the README."""
    newest = {r["command"]: r["result"] for r in rows if r.get("kind") == NAME}
    head = "### Test texts that are label texts\n\nTest rows, filtered, percent."
    return "\n\n".join([head, *(show(result) for result in newest.values())])


def main() -> None:
    """Evaluates, prints the table, keeps it."""
    run_pair(NAME, "", pair_arguments(__doc__).parse_args(), compare, show)


if __name__ == "__main__":
    main()
