"""Top five predictions of test points without and with Gandalf, wrong ones marked (thesis 1.5).

python -m experiments.table_predictions --without=RUN --gandalf=RUN [--points="TEXT|TEXT"]

The runs are work directories of `xmc_jax.train` on one data set. Test points are given by their
texts or row numbers; else some are drawn, so that nobody has chosen them.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import ledger
from xmc_jax import metrics
from xmc_jax.contracts import Ranker
from xmc_jax.host import console
from xmc_jax.runs import open_runs
from xmc_jax.training import evaluation
from xmc_jax.training.training_data import EvaluationSplit

NAME = "table_predictions"
SHOWN = 5  # predictions of a point
RIGHT, WRONG = "", "✗ "


def choose(texts: Sequence[str], names: Sequence[str], *, number: int, seed: int) -> np.ndarray:
    """Rows of test points.

    Args:
      texts: of all test points.
      names: texts (case is ignored), or row numbers; none = draw some.
      number: of points that are drawn.
      seed: of the draw.

    Raises:
      ValueError: no such test point.
    """
    if not names:
        rng = np.random.default_rng(seed)
        return np.sort(rng.choice(len(texts), min(number, len(texts)), replace=False))
    fold = lambda text: text.strip().casefold()
    wanted, place = {fold(name) for name in names}, {}
    for row, text in enumerate(texts):
        if (folded := fold(text)) in wanted:
            place.setdefault(folded, row)
    rows = []
    for name in names:
        if fold(name) in place:
            rows.append(place[fold(name)])
        elif name.strip().isdigit() and int(name) < len(texts):
            rows.append(int(name))
        else:
            raise ValueError(
                f"--points: no test point {name.strip()!r} among {len(texts):,}; expected texts of "
                "test points, or row numbers from 0, with | between them."
            )
    return np.array(rows, np.int64)


def part(split: EvaluationSplit, rows: np.ndarray) -> EvaluationSplit:
    """Some rows of a split."""
    pairs = [
        (place, label)
        for place, row in enumerate(rows)
        for label in split.filter_pairs[split.filter_pairs[:, 0] == row, 1]
    ]
    return dataclasses.replace(
        split,
        rows=split.rows[rows],
        truth=split.truth[rows],
        filter_pairs=np.array(pairs, np.int64).reshape(-1, 2),
    )


def top(ranker: Ranker, split: EvaluationSplit, rows: np.ndarray, k: int = SHOWN) -> np.ndarray:
    """Best labels ``[n, k]`` of some rows of a split, filter pairs left out; -1 = none."""
    some = part(split, rows)
    deep = evaluation.depth(some, (k,))
    ids, _ = evaluation.predict_split(ranker, some, ranker.heads[0], k=deep)
    return metrics.remove_filtered(ids, some.filter_pairs, split.truth.shape[1])[:, :k]


def open_both(without: Path, gandalf: Path) -> list[open_runs.OpenRun]:
    """Opens both runs.

    Raises:
      ValueError: the runs are not of one data set, or not without and with Gandalf.
    """
    opened = [open_runs.open_run(folder) for folder in (without, gandalf)]
    for flag, run, wanted in zip(("without", "gandalf"), opened, (False, True)):
        if run.options.gandalf.enabled != wanted:
            raise ValueError(
                f"--{flag}={run.folder}: expected a run with config.gandalf.enabled = {wanted}."
            )
    if len({run.meta["data"]["digest"] for run in opened}) > 1:
        raise ValueError(f"{without} and {gandalf} are runs on different data.")
    return opened


def compare(without: Path, gandalf: Path, options: Any) -> dict[str, Any]:
    """Opens both runs and predicts; what the ledger keeps.

    Raises:
      ValueError: the runs are not of one data set, or not without and with Gandalf.
    """
    opened = open_both(without, gandalf)
    points: list[dict[str, Any]] = []
    for side, run in zip(("without", "with"), opened):
        data = run.load_data(options.data)
        if data.test is None:
            raise ValueError(f"{run.folder}: its data set has no test rows.")
        if not points:
            texts, names = data.dataset.test.texts, options.points.split("|")
            given = [name for name in names if name.strip()]
            rows = choose(texts, given, number=options.number, seed=options.seed)
            points = [{"text": texts[row], "row": int(row)} for row in rows]
        truth = data.test.truth[rows]
        for place, ids in enumerate(top(run.ranker(kind="exact"), data.test, rows).tolist()):
            own = set(truth[place].indices.tolist())
            points[place]["labels"] = len(own)
            points[place][side] = [[data.dataset.label_texts[i], i in own] for i in ids if i >= 0]
    return {"dataset": opened[0].meta["resolved"]["dataset"], "points": points}


def show(result: dict[str, Any]) -> str:
    """The table as Markdown."""
    lines = [
        f"**{result['dataset']}** (`{result['command']}`)",
        "",
        "| test point, number of its labels | without Gandalf | with Gandalf |",
        "| --- | --- | --- |",
    ]
    for point in result["points"]:
        cells = [f"{_plain(point['text'])} ({point['labels']})"]
        for side in ("without", "with"):
            named = [(RIGHT if right else WRONG) + _plain(text) for text, right in point[side]]
            cells.append("<br>".join(named))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def section(rows: list[dict[str, Any]]) -> str:
    """The newest result of each command, for the README."""
    newest = {r["command"]: r["result"] for r in rows if r.get("kind") == NAME}
    head = [
        "### Top five predictions (thesis table 1.5)",
        "",
        "Filter pairs are left out; ✗ marks what is not a label of the test point.",
    ]
    return "\n\n".join(["\n".join(head), *(show(result) for result in newest.values())])


def pair_arguments(description: str | None) -> argparse.ArgumentParser:
    """Flags of a script that compares a run without Gandalf and one with it."""
    parser = ledger.arguments(description)
    add = parser.add_argument
    add("--without", type=Path, default=Path("runs/without"), help="work directory of a run")
    add("--gandalf", type=Path, default=Path("runs/gandalf"), help="of a run with Gandalf")
    add("--data", default="", help="where the data set is now, if it was moved")
    return parser


def run_pair(name: str, flags: str, options: Any, compare: Any, show: Callable) -> None:
    """Compares both runs, prints the table, keeps it.

    Args:
      name: of the script.
      flags: of its own, for the command that is kept.
      options: parsed flags.
      compare: function of the two work directories and the options to what is kept.
      show: that as Markdown.
    """
    # Where an absolute path leads is of no interest on another machine.
    names = [p.name if p.is_absolute() else p for p in (options.without, options.gandalf)]
    command = f"python -m experiments.{name} --without={names[0]} --gandalf={names[1]}{flags}"
    if options.list:
        print(command)
        return
    console.setup()
    try:
        found = compare(options.without, options.gandalf, options)
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")
    result = {**found, "command": command}
    print(show(result))
    row = {"kind": name, "command": command, "commit": ledger.commit(), "result": result}
    ledger.append(row, options.ledger)


def main() -> None:
    """Predicts, prints the table, keeps it."""
    parser = pair_arguments(__doc__)
    add = parser.add_argument
    add("--points", default="", help="texts or row numbers of test points, | between them")
    add("--number", type=int, default=5, help="points that are drawn where none is named")
    add("--seed", type=int, default=0, help="of the draw")
    options = parser.parse_args()
    chosen = f" --number={options.number} --seed={options.seed}"
    if options.points:
        chosen = f" --points='{options.points}'"
    run_pair(NAME, chosen, options, compare, show)


if __name__ == "__main__":
    main()
