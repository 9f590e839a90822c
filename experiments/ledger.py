"""The ledger of experiments: rows as JSON lines, from which `experiments.readme` makes README.md.

A row of kind ``train`` keeps its whole configuration. A run is there already if a row has the
same data set and seed and the same value of every field that both configurations have: a row
outlives fields that are added later, but not a changed default.

A row of kind ``figure`` is anything else that was measured. ``columns`` holds its figures;
``topic`` and ``table`` (a title) say where README.md shows it; ``name`` is its first cell;
``command``, ``seed``, ``commit``, ``date``, ``device`` and, where needed, ``note`` say how it was
made.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from configs import frugal, unidec
from xmc_jax.training.workdir import flatten

ROOT = Path(__file__).parents[1]
LEDGER = Path(__file__).with_name("ledger.jsonl")
FIGURES = Path(__file__).with_name("figures")
COLUMNS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5")
UNIDEC, FRUGAL = "configs/unidec.py", "configs/frugal.py"
CONFIGS = {UNIDEC: unidec.get_config, FRUGAL: frugal.get_config}
SHOWN = ("wordnet-mini", "wordnettitles")  # data sets that a table is for
NOT_COMPARED = ("data", "seed")  # where the data lies; the seed has a field of its own


@dataclasses.dataclass(frozen=True)
class Published:
    """What a paper prints for the same comparison on its own data.

    Attributes:
      data: the paper's data set.
      source: paper and table.
      heads: figures of each head, in the order of the table's columns; None = none is printed.
    """

    data: str
    source: str
    heads: Mapping[str, Sequence[float | None]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table: the data set's configuration and what differs from it.

    Attributes:
      name: what the table calls it.
      overrides: dotted names of configuration fields and their values.
      published: figures to compare with.
      config: file of the configuration.
      prefix: what stands before the data set in ``--config=FILE:...``, such as ``astec,``.
      by_data: more overrides, by data set; not with the option ``debug``.
      only: the data sets it is meant for; none = all.
      heads: which heads are shown; none = the table's.
    """

    name: str
    overrides: Mapping[str, Any]
    published: tuple[Published, ...] = ()
    config: str = UNIDEC
    prefix: str = ""
    by_data: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    only: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    def on(self, dataset: str) -> dict[str, Any]:
        """All overrides on a data set, given as it stands in ``--config=FILE:...``."""
        name, *options = dataset.split(",")
        own = {} if "debug" in options else self.by_data.get(name, {})
        return {**self.overrides, **own}

    def fits(self, dataset: str) -> bool:
        """Whether it is meant for a data set."""
        return not self.only or dataset.split(",")[0] in self.only


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of runs.

    Attributes:
      name: of the script.
      title: heading in the README.
      rows: its lines.
      heads: which heads are shown.
      datasets: in the order of the README; the first is the script's default and is shown, run or
        not, the others where a row of theirs was run.
      columns: metrics.
      facts: names in ``readme.FACTS``, the columns after the metrics.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    heads: tuple[str, ...] = ("concat",)
    datasets: tuple[str, ...] = SHOWN
    columns: tuple[str, ...] = COLUMNS
    facts: tuple[str, ...] = ("in_batch_positives", "seconds")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The flags that all scripts share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--list", action="store_true", help="say what would be run")
    add("--ledger", type=Path, default=LEDGER, help="JSON lines to read and to add to")
    add("--figures", type=Path, default=FIGURES, help="folder of the pictures")
    return parser


def configuration(dataset: str, row: Row, seed: int) -> ConfigDict:
    """The configuration that a row trains with.

    Args:
      dataset: what follows the row's prefix in ``--config=FILE:...``.
      row: what differs.
      seed: ``config.seed``.

    Raises:
      KeyError: an override names a field that the configuration lacks.
    """
    config = CONFIGS[row.config](row.prefix + dataset)
    values = {**row.on(dataset), "seed": seed}
    unknown = values.keys() - flatten(config.to_dict()).keys()
    if unknown:
        raise KeyError(f"{row.config} has no field {', '.join(sorted(unknown))}")
    with config.unlocked():
        config.update_from_flattened_dict(values)
    return config


def compared(config: ConfigDict) -> dict[str, Any]:
    """The fields that make two runs the same one, as JSON gives them back."""
    flat = flatten(json.loads(json.dumps(config.to_dict())))
    return {name: value for name, value in flat.items() if name not in NOT_COMPARED}


def read(path: Path = LEDGER) -> list[dict[str, Any]]:
    """All rows, oldest first; none where there is no file.

    Raises:
      ValueError: a line is not JSON; with file and line.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: not JSON ({error}); expected one object a line. Remove "
                "the line: the run is then made again."
            ) from error
    return rows


def append(row: Mapping[str, Any], path: Path = LEDGER) -> None:
    """Adds a row, with the date and, unless it has them, the commit and the device."""
    stamp = {"date": datetime.date.today().isoformat(), "commit": commit(), "device": device()}
    stamped = {**stamp, **row}
    with path.open("a") as file:
        file.write(json.dumps(stamped) + "\n")


def measured(
    rows: Iterable[Mapping[str, Any]], dataset: str, row: Row, seed: int
) -> Mapping[str, Any] | None:
    """The newest training row of a table's row on a data set with a seed, or None."""
    try:
        config = configuration(dataset, row, seed)
    except ValueError:  # an option after the data set that another file has
        return None
    return find(rows, dataset, config, needed=row.on(dataset))


def find(
    rows: Iterable[Mapping[str, Any]],
    dataset: str,
    config: ConfigDict,
    *,
    needed: Collection[str] = (),
) -> Mapping[str, Any] | None:
    """The newest training row of this data set, seed and configuration, or None.

    Args:
      rows: of the ledger.
      dataset: as the row names it.
      config: the configuration.
      needed: fields that a row must have; without them it is older than what they switch on.
    """
    wanted, found = compared(config), None
    for row in rows:
        if row.get("kind") != "train":
            continue
        if (row["dataset"], row["seed"]) != (dataset, config.seed):
            continue
        have = row["config"]
        family = have.get("family", "unidec")  # the only one that was not named, at first
        if family != wanted.get("family", "unidec") or set(needed) - have.keys():
            continue
        if all(have[name] == wanted[name] for name in have.keys() & wanted.keys()):
            found = row
    return found


def earlier(
    rows: Iterable[Mapping[str, Any]], table: Table, dataset: str, row: Row, seed: int
) -> Mapping[str, Any] | None:
    """The newest row that the table's script made under this name, with other settings, or None.

    Settings change; what was measured with the old ones is shown until it is measured again.
    """
    wanted = {"kind": "train", "table": table.name, "name": row.name}
    wanted |= {"dataset": dataset, "seed": seed}
    same = [r for r in rows if all(r.get(name) == value for name, value in wanted.items())]
    return same[-1] if same else None


def commit() -> str:
    """Short commit of the checkout, with a plus where package or configs differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "xmc_jax", "configs")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except OSError:
        return ""


def device() -> str:
    """The processor and its cores, or the accelerator that JAX is told to use."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode == 0 and found.stdout and os.environ.get("JAX_PLATFORMS") != "cpu":
            return found.stdout.splitlines()[0].strip()
    except OSError:
        pass
    model = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores"


def flags(overrides: Mapping[str, Any]) -> list[str]:
    """Command-line flags of overrides."""
    return [f"--config.{name}={value}" for name, value in overrides.items()]
