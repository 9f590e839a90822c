"""README.md of the experiments, all of it from rows of the ledger.

python -m experiments.readme [--check]

writes it anew, or says whether it is what the ledger gives. A section a topic, with tables of
runs, what scripts of their own show, and tables of figures.
Findings in words are kept by hand in ``notes/<topic>.md``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import (
    figure_gandalf_bins,
    figure_gandalf_share,
    ledger,
    pool_statistics,
    scale_amazontitles13m,
    table_batching,
    table_filter_pairs,
    table_gandalf,
    table_hard_negatives,
    table_label_texts,
    table_losses,
    table_predictions,
    table_systems,
)
from experiments.ledger import Row, Table
from xmc_jax.files import replacing

Rows = Sequence[Mapping[str, Any]]
README = Path(__file__).with_name("README.md")
FACTS = {  # columns after the metrics, by their names in a row; digits shown
    "in_batch_positives": ("positives in a batch", 2),
    "steps": ("steps", 0),
    "seconds": ("seconds", 0),
}
MADE = ("seed", "commit", "date", "device", "command")  # how a figure was made, as it is shown
WIDTH = 100  # of prose
EARLIER = "†"  # marks what was measured with other settings than today's
INTRO = """\
Made from `ledger.jsonl` by `python -m experiments.readme`; a test checks that it is. Change the
ledger or a script, not this page. What was found, in words, is in `notes/`, a page a topic.

Run the scripts from the repository's root:

    python -m experiments.table_losses --dataset=wordnet-mini

Rows that are in the ledger already are skipped, the others are run and added; then make this page
anew. `--list` says what would be run. `--seeds`, `--only` and `--data` choose; `--again` runs
rows once more. Benchmarks of speed and memory are `python -m experiments.benchmarks`; their figures
were added to the ledger by hand. "goal" is what was asked for before it was measured.

Figures marked "published" are of the papers' own data sets and encoders: compare directions, not
numbers. P@k, PSP@k (propensity-scored precision) and C@k (coverage) are in percent. Of a row with
several seeds, mean ± standard deviation. Most runs shared their machine with other jobs, so that
seconds are upper bounds."""


@dataclasses.dataclass(frozen=True)
class Topic:
    """A section of the README, and a page of notes.

    Attributes:
      title: heading.
      sections: functions of the rows and of the folder of pictures; empty text = nothing to show.
    """

    title: str
    sections: tuple[Callable[[Rows, Path], str], ...] = ()


def readme(rows: Rows, pictures: Path) -> str:
    """The whole page.

    Args:
      rows: of the ledger.
      pictures: folder of the pictures, beside the page.

    Raises:
      ValueError: a figure's topic is none of ``TOPICS``.
    """
    unknown = {row["topic"] for row in rows if row.get("kind") == "figure"} - TOPICS.keys()
    if unknown:
        raise ValueError(f"topics of figures: {sorted(unknown)}; expected some of {[*TOPICS]}")
    index = ["| topic | tables | findings |", "| --- | --- | --- |"]
    parts = []
    for name, topic in TOPICS.items():
        notes = f"[notes/{name}.md](notes/{name}.md)"
        found = [section(rows, pictures) for section in topic.sections]
        found = [text for text in (*found, figures(rows, name)) if text]
        titles = [line[4:] for text in found for line in text.split("\n") if line[:4] == "### "]
        links = "<br>".join(map(link, titles))
        index.append(f"| {link(topic.title)} | {links} | {notes} |")
        parts += [f"## {topic.title}", f"Findings: {notes}.", *found]
    page = ["# Experiments", INTRO, "\n".join(index), *parts]
    return wrapped("\n\n".join(page)) + "\n"


def link(title: str) -> str:
    """A link to a heading of the page, by the name that GitHub gives it."""
    kept = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    return f"[{title}](#{kept})"


def wrapped(text: str) -> str:
    """The text with its long lines broken, but for tables, headings, code and pictures."""
    whole = [
        line
        if len(line) <= WIDTH or line.startswith(("|", "#", "!", "    "))
        else textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    ]
    return "\n".join(whole)


def runs(rows: Rows, pictures: Path, *, table: Table) -> str:
    """A table of runs, on its data sets and on others that its script was run on."""
    # A row may be another table's too: that alone does not make a data set one of this table's.
    own = [row["dataset"] for row in rows if row.get("table") == table.name and "dataset" in row]
    shown = [
        name
        for name in dict.fromkeys([*table.datasets, *own])
        if name == table.datasets[0] or any(_found(table, name, row, rows)[0] for row in table.rows)
    ]
    return table_of_runs(table, shown, rows)


def table_of_runs(table: Table, datasets: Sequence[str], rows: Rows) -> str:
    """The table as Markdown: mean and standard deviation over the seeds that were run.

    Args:
      table: what to show.
      datasets: in this order.
      rows: of the ledger.
    """
    columns = [*table.columns, *(FACTS[name][0] for name in table.facts)]
    lines = [
        f"### {table.title}",
        "",
        f"`python -m experiments.{table.name} --dataset=...`; test rows, filtered, percent.",
        "",
        "| data | row | head | " + " | ".join(columns) + " | seeds | device: commits |",
        "| --- | --- | --- |" + " ---: |" * len(columns) + " --- | --- |",
    ]
    changed: dict[str, None] = {}
    for dataset in datasets:
        for row in table.rows:
            if row.fits(dataset):
                lines += _lines(table, dataset, row, rows, changed)
    for row in table.rows:
        for published in row.published:
            for head, values in published.heads.items():
                cells = ["" if v is None else f"{v:.2f}" for v in values]
                lines.append(
                    f"| {published.data} | {row.name} | {head} | {' | '.join(cells)} |"
                    f"{' |' * (1 + len(table.facts))} published: {published.source} |"
                )
    if changed:
        lines += ["", f"{EARLIER} Measured with other settings than today's: {'; '.join(changed)}."]
    return "\n".join([*lines, "", *_settings(table, datasets)])


def _found(
    table: Table, dataset: str, row: Row, rows: Rows
) -> tuple[list[Mapping[str, Any]], bool]:
    """Rows of all seeds with today's settings, else with earlier ones; whether they are today's."""
    if not row.fits(dataset):
        return [], True
    seeds = sorted({r["seed"] for r in rows if r.get("kind") == "train"})
    now = [ledger.measured(rows, dataset, row, seed) for seed in seeds]
    then = [ledger.earlier(rows, table, dataset, row, seed) for seed in seeds]
    found = [r for r in now if r is not None]
    return (found, True) if found else ([r for r in then if r is not None], False)


def _lines(table: Table, dataset: str, row: Row, rows: Rows, changed: dict[str, None]) -> list[str]:
    """Lines of a row on a data set, one a head; "not run" where no seed of it is there."""
    found, today = _found(table, dataset, row, rows)
    if not found:
        empty = " |" * (len(table.columns) + len(table.facts) + 1)
        return [f"| {dataset} | {row.name} | | not run |{empty}"]
    if not today:
        changed |= dict.fromkeys(_changes(dataset, row, found))
    facts = " | ".join(_fact(name, found) for name in table.facts)
    commits: dict[str, set[str]] = {}
    for r in found:
        commits.setdefault(r["device"], set()).add(r["commit"])
    where = "; ".join(f"{device}: {', '.join(sorted(c))}" for device, c in sorted(commits.items()))
    tail = f"{facts} | {', '.join(str(r['seed']) for r in found)} | {where} |"
    shown = row.name if today else f"{row.name} {EARLIER}"
    lines = []
    for head in row.heads or table.heads:
        values = [r["metrics"][head] for r in found if head in r["metrics"]]
        if values:
            cells = " | ".join(spread([v[name] for v in values]) for name in table.columns)
            lines.append(f"| {dataset} | {shown} | {head} | {cells} | {tail}")
    return lines


def _changes(dataset: str, row: Row, found: Rows) -> list[str]:
    """Settings that were others when the rows were made."""
    try:
        now = ledger.compared(ledger.configuration(dataset, row, 0))
    except ValueError:  # an option after the data set that the file has no more
        return [f"`{dataset}` is no configuration any more"]
    return [
        f"on {dataset} `{name}` was `{then}`, now `{now[name]}`"
        for r in found
        for name, then in r["config"].items()
        if name in now and then != now[name]
    ]


def _fact(name: str, found: Rows) -> str:
    """Mean over the seeds; empty where a row is older than the fact."""
    values = [r[name] for r in found if r.get(name) is not None]
    return f"{statistics.mean(values):.{FACTS[name][1]}f}" if values else ""


def spread(values: Sequence[float]) -> str:
    """Mean, and the standard deviation where there are several values."""
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) < 2 else f"{mean} ±{statistics.stdev(values):.2f}"


def _settings(table: Table, datasets: Sequence[str]) -> list[str]:
    """A table of the rows' settings, and of those that a data set adds."""
    own = [name for name in datasets if any(row.on(name) != row.overrides for row in table.rows)]
    lines = [
        "| row | settings |" + "".join(f" on {name} also |" for name in own),
        "| --- | --- |" + " --- |" * len(own),
    ]
    for row in table.rows:
        named = f"`--config={row.config}:{row.prefix}...` " if row.prefix else ""
        cells = [named + (_flags(row.overrides) or "the data set's own")]
        cells += [_flags(row.by_data.get(name, {})) if row.fits(name) else "" for name in own]
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return lines


def _flags(overrides: Mapping[str, Any]) -> str:
    return f"`{' '.join(ledger.flags(overrides))}`" if overrides else ""


def figures(rows: Rows, topic: str) -> str:
    """All tables of a topic's rows of kind ``figure``, in the order of the ledger."""
    tables: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("kind") == "figure" and row["topic"] == topic:
            tables.setdefault(row["table"], []).append(row)
    return "\n\n".join(table_of_figures(title, some) for title, some in tables.items())


def table_of_figures(title: str, rows: Rows) -> str:
    """Figures as Markdown; what is the same for all of them stands above."""
    names = [*dict.fromkeys(name for row in rows for name in row["columns"])]
    values = {name: [row["columns"].get(name) for row in rows] for name in names}
    values = {name: _numbers(column) for name, column in values.items()}
    made = {name: [str(row.get(name, "")) for row in rows] for name in MADE}
    commands = [None, *(row.get("command", "") for row in rows)]
    made["command"] = ["as above" if b == a else f"`{b}`" for a, b in itertools.pairwise(commands)]
    shared = [f"{name} {made[name][0]}" for name in MADE if _same(row.get(name) for row in rows)]
    values |= {n: column for n, column in made.items() if not _same(row.get(n) for row in rows)}
    if any("note" in row for row in rows):
        values["note"] = [row.get("note", "") for row in rows]
    lines = [f"### {title}", ""]
    if shared:
        lines += ["; ".join(shared)[:1].upper() + "; ".join(shared)[1:] + ".", ""]
    lines += [f"| row | {' | '.join(values)} |", "| --- |" + " --- |" * len(values)]
    for place, row in enumerate(rows):
        cells = [row["name"], *(column[place] for column in values.values())]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _same(values: Iterable[Any]) -> bool:
    return len({str(value) for value in values}) == 1


def _numbers(column: Sequence[Any]) -> list[str]:
    """A column's values as text, with the same number of digits where they are no whole numbers."""
    digits = max((len(repr(v).split(".")[1]) for v in column if isinstance(v, float)), default=0)
    texts = [f"{v:.{digits}f}" if isinstance(v, float) else "" if v is None else v for v in column]
    return [str(text) for text in texts]


def _section(module: Any, rows: Rows, pictures: Path) -> str:
    """What a script with rows of its own kind shows."""
    return module.section(rows) if any(r.get("kind") == module.NAME for r in rows) else ""


def _of(table: Table) -> Callable[[Rows, Path], str]:
    return functools.partial(runs, table=table)


def _from(module: Any) -> Callable[[Rows, Path], str]:
    return functools.partial(_section, module)


TOPICS = {
    "our_data_sets": Topic("Our data sets"),
    "own_data": Topic("People's own data"),
    "losses": Topic("Losses", (_of(table_losses.TABLE),)),
    "hard_negatives": Topic("Hard negatives", (_of(table_hard_negatives.TABLE),)),
    "batching": Topic("Batches and positives", (_of(table_batching.TABLE), _from(pool_statistics))),
    "filter_pairs": Topic("Filter pairs", (_of(table_filter_pairs.TABLE),)),
    "pretrained": Topic("Pretrained encoders"),
    "frugal": Topic("Frugal classifiers", (_of(table_systems.TABLE),)),
    "gandalf": Topic(
        "Gandalf",
        (
            _of(table_gandalf.TABLE),
            figure_gandalf_bins.section,
            _of(figure_gandalf_share.TABLE),
            figure_gandalf_share.section,
            _from(table_predictions),
            _from(table_label_texts),
        ),
    ),
    "evaluation": Topic("Ranking and evaluation"),
    "speed": Topic("Speed"),
    "memory_and_scale": Topic("Memory and scale", (_from(scale_amazontitles13m),)),
    "faults": Topic("Real files and faults"),
}


def main() -> None:
    """Writes the page, or compares it with what the ledger gives."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it is not so")
    parser.add_argument("--ledger", type=Path, default=ledger.LEDGER, help="JSON lines to read")
    parser.add_argument("--readme", type=Path, default=README, help="what is written")
    options = parser.parse_args()
    page = options.readme
    text = readme(ledger.read(options.ledger), page.absolute().parent / "figures")
    if not options.check:
        with replacing(page) as file:
            file.write(text)
    elif not page.exists() or page.read_text() != text:
        sys.exit(f"{page} is not what the ledger gives: run python -m experiments.readme")


if __name__ == "__main__":
    main()
