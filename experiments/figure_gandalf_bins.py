"""What labels of each frequency add to P@5, without and with Gandalf (thesis figure 1.3).

Five bins of labels with about equal sums of training positives; bin 5 holds the rarest labels, bin
1 the most frequent ones. Drawn from rows of `experiments.table_systems`; nothing is trained here.

python -m experiments.figure_gandalf_bins [--dataset=wordnettitles] [--systems=astec,decaf]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import ledger, pictures
from experiments.table_systems import DATASETS, SYSTEMS, system_row

NAME = "figure_gandalf_bins"
TITLE = "Without and with Gandalf: what each bin of labels adds to P@5 (thesis figure 1.3)"
Bins = list[dict[str, float]]


def bins(rows: Sequence[Mapping[str, Any]], dataset: str, system: str, *, gandalf: bool) -> Bins:
    """The bins of a system, means over the seeds that were run.

    Raises:
      ValueError: no such row; with the command that makes it.
    """
    row = system_row(system, gandalf=gandalf)
    head = (row.heads or ("clf",))[0]
    seeds = sorted({r["seed"] for r in rows if r.get("kind") == "train"})
    made = [ledger.measured(rows, dataset, row, seed) for seed in seeds]
    found = [r["bins"][head] for r in made if r and "bins" in r]
    if not found:
        raise ValueError(
            f"no row {row.name!r} with bins on {dataset}. Make it with "
            f"{_command(dataset, row.name)} --data=DIR"
        )
    return [
        {**first, "value": sum(b["value"] for b in same) / len(same)}
        for first, same in zip(found[0], zip(*found))
    ]


def _command(dataset: str, name: str) -> str:
    return f"python -m experiments.table_systems --dataset={dataset} --only='{name}'"


def draw(found: Mapping[str, tuple[Bins, Bins]], dataset: str) -> Any:
    """A panel a system, three in a row: two bars a bin, the rarest labels on the left."""
    across = min(len(found), 3)
    down = -(-len(found) // across)
    figure = pictures.figure(4.6 * across, 3.4 * down)
    panels = figure.subplots(down, across, sharey=True, squeeze=False).ravel()
    for axis in panels[len(found) :]:
        axis.set_visible(False)
    for axis, (system, both) in zip(panels, found.items()):
        for gandalf, values in enumerate(both):
            places = [len(values) - b["bin"] + 0.4 * gandalf for b in values]
            name = "with Gandalf" if gandalf else "without"
            heights = [b["value"] for b in values]
            axis.bar(places, heights, 0.4, color=pictures.COLORS[bool(gandalf)], label=name)
        ticks = [len(both[0]) - b["bin"] + 0.2 for b in both[0]]
        texts = [f"{b['bin']}\n{b['labels']:,}\n{b['mean_frequency']:.1f}" for b in both[0]]
        axis.set_xticks(ticks, texts, fontsize=8)
        axis.set_xlabel("bin, its labels, points a label", fontsize=8)
        axis.set_title(f"{system}, {dataset}", fontsize=9)
    for axis in panels[::across]:
        axis.set_ylabel("adds to P@5")
    panels[0].legend(fontsize=8)
    return figure


def show(found: Mapping[str, tuple[Bins, Bins]], dataset: str) -> str:
    """The numbers as Markdown."""
    lines = [
        "| data | row | " + " | ".join(f"bin {b}" for b in range(5, 0, -1)) + " | P@5 |",
        "| --- | --- |" + " ---: |" * 6,
    ]
    for system, both in found.items():
        for name, values in zip((system, f"{system} + Gandalf"), both):
            parts = [b["value"] for b in values]
            cells = " | ".join(f"{value:.2f}" for value in (*reversed(parts), sum(parts)))
            lines.append(f"| {dataset} | {name} | {cells} |")
    return "\n".join(lines)


def section(rows: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """All data sets and systems that the ledger has, and the pictures; empty without any."""
    texts = []
    for dataset in DATASETS:
        found = {}
        for system in (*SYSTEMS, "unidec"):
            try:
                found[system] = tuple(bins(rows, dataset, system, gandalf=g) for g in (False, True))
            except ValueError:  # not run, or from before bins were kept
                continue
        if found:
            texts.append(show(found, dataset))
    if not texts:
        return ""
    head = f"### {TITLE}\n\n`python -m experiments.{NAME}`; bin 5: the rarest labels."
    return "\n\n".join([head, *texts, *pictures.links(NAME, folder)])


def main() -> None:
    """Reads the ledger, draws, shows the picture in the README."""
    parser = ledger.arguments(__doc__)
    add = parser.add_argument
    add("--dataset", default=DATASETS[0], help="name of the data set")
    add("--systems", default="inceptionxml,inceptionxml-lf", help="with commas between them")
    options = parser.parse_args()
    dataset, systems = options.dataset, options.systems.split(",")
    if options.list:
        for system in systems:
            print(_command(dataset, system))
        print(f"python -m experiments.{NAME} --dataset={dataset} --systems={options.systems}")
        return
    rows = ledger.read(options.ledger)
    try:
        found = {
            s: tuple(bins(rows, dataset, s, gandalf=g) for g in (False, True)) for s in systems
        }
        path = pictures.save(draw(found, dataset), NAME, dataset, options.figures)
    except ValueError as error:
        sys.exit(f"{NAME}: {error}")
    print(f"{show(found, dataset)}\npicture: {path.name}")


if __name__ == "__main__":
    main()
