"""Gandalf against steps, and against the share of labels whose texts join (thesis figure 1.4).

InceptionXML with 0, 25, 50, 75 and 100 % of the label texts, at random or the rarest first; the
same number of steps for all. The rows that are missing are run, then the picture is drawn: P@1 and
PSP@5 of held-out rows against steps, of test rows against the share.

python -m experiments.figure_gandalf_share --data=DIR [--dataset=wordnettitles]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import ledger, pictures, tables
from experiments.equal_steps import fitted
from experiments.ledger import Row, Table
from experiments.table_systems import COLUMNS, DATASETS, GANDALF, system_row

NAME = "figure_gandalf_share"
SYSTEM = "inceptionxml"
ORDERS = {"random": "at random", "tail": "tail first"}
METRICS = ("P@1", "PSP@5")
WITHOUT = dataclasses.replace(system_row(SYSTEM, gandalf=False), name="0 %", published=())
ALL = dataclasses.replace(system_row(SYSTEM, gandalf=True), name="100 %", published=())


def part(share: float, order: str) -> Row:
    """Some of the label texts."""
    overrides = {**GANDALF, "gandalf.share": share, "gandalf.order": order}
    name = f"{100 * share:.0f} %, {ORDERS[order]}"
    return fitted(dataclasses.replace(ALL, name=name, overrides=overrides, by_data={}))


PARTS = {order: {share: part(share, order) for share in (0.25, 0.5, 0.75)} for order in ORDERS}
TABLE = Table(
    name=NAME,
    title="InceptionXML with Gandalf on a share of the labels",
    heads=("clf",),
    datasets=DATASETS[:1],
    columns=COLUMNS,
    facts=("steps", "seconds"),
    rows=(WITHOUT, *(row for rows in PARTS.values() for row in rows.values()), ALL),
)


def runs(rows: Sequence[Mapping[str, Any]], dataset: str, row: Row) -> list[Mapping[str, Any]]:
    """The ledger's rows of all seeds.

    Raises:
      ValueError: there is none.
    """
    seeds = sorted({r["seed"] for r in rows if r.get("kind") == "train"})
    found = [ledger.measured(rows, dataset, row, seed) for seed in seeds]
    found = [r for r in found if r is not None]
    if not found:
        raise ValueError(f"not drawn: row {row.name!r} on {dataset} is not in the ledger.")
    return found


def curve(found: Sequence[Mapping[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    """Steps, and the mean over seeds of a metric of the held-out rows; empty without such rows."""
    at: dict[int, list[float]] = {}
    for run in found:
        for point in run.get("held_out", ()):
            at.setdefault(point["steps"], []).append(point[metric])
    return sorted(at), [statistics.mean(at[steps]) for steps in sorted(at)]


def shares(
    rows: Sequence[Mapping[str, Any]], dataset: str, order: str, metric: str
) -> tuple[list[float], list[float]]:
    """Per cent of the labels, and the mean over seeds of a metric of the test rows."""
    of_share = {0.0: WITHOUT, **PARTS[order], 1.0: ALL}
    values = [
        statistics.mean(r["metrics"]["clf"][metric] for r in runs(rows, dataset, row))
        for row in of_share.values()
    ]
    return [100 * share for share in of_share], values


def draw(rows: Sequence[Mapping[str, Any]], dataset: str) -> Any:
    """Four panels: each metric against steps, then against the share of labels."""
    figure = pictures.figure(9.0, 6.4)
    axes = figure.subplots(2, 2)
    for column, metric in enumerate(METRICS):
        for gandalf, row in ((False, WITHOUT), (True, ALL)):
            steps, values = curve(runs(rows, dataset, row), metric)
            name = f"{SYSTEM} + Gandalf" if gandalf else SYSTEM
            color = pictures.COLORS[gandalf]
            axes[0, column].plot(steps, values, marker="o", color=color, label=name)
        axes[0, column].set_xlabel("steps")
        axes[0, column].set_ylabel(f"{metric}, held-out rows")
        for order, name in ORDERS.items():
            axes[1, column].plot(*shares(rows, dataset, order, metric), marker="o", label=name)
        axes[1, column].set_xlabel("% of labels whose texts join")
        axes[1, column].set_ylabel(f"{metric}, test rows")
    for axis in axes[:, 0]:
        axis.legend(fontsize=8)
    figure.suptitle(dataset, fontsize=10)
    return figure


def section(rows: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """The pictures; empty without any."""
    found = pictures.links(NAME, folder)
    return "\n\n".join(["### Against steps and the share of labels", *found]) if found else ""


def finish(options: argparse.Namespace) -> None:
    """Draws what the ledger holds."""
    try:
        drawn = draw(ledger.read(options.ledger), options.dataset)
    except ValueError as error:
        sys.exit(f"{NAME}: {error}")
    path = pictures.save(drawn, NAME, options.dataset, options.figures)
    print(f"picture: {path.name}")


if __name__ == "__main__":
    tables.main(TABLE, __doc__, finish)
