"""Six systems without and with Gandalf (thesis tables 1.3 and 1.4), the same number of steps.

An epoch is longer with Gandalf, so epochs are set for each data set: see `experiments.equal_steps`.
Of WordNetTitles 98 % of the label texts are training points already: rows that leave those out show
what the contradicting targets cost.

python -m experiments.table_systems --data=DIR [--dataset=wordnettitles] [--only=astec]
"""

from __future__ import annotations

import dataclasses

from experiments import tables
from experiments.equal_steps import STEPS, fitted
from experiments.ledger import FRUGAL, UNIDEC, Published, Row, Table

COVERAGE = ("C@1", "C@3", "C@5")
COLUMNS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", *COVERAGE)
DATASETS = ("mobytitles", "wordnettitles", "wordnet-mini")
GANDALF = {"gandalf.enabled": True}
SKIP = {**GANDALF, "gandalf.skip_labels_that_are_points": True}
UNIDEC_STEPS = {**STEPS, "wordnet-mini": 360}  # batches are twice as large: 24 epochs of D and Z
SYSTEMS = ("astec", "decaf", "eclare", "inceptionxml", "inceptionxml-lf")

# P@1, P@3, P@5, PSP@1, PSP@3, PSP@5 on LF-AmazonTitles-131K and on LF-AmazonTitles-1.3M, without
# Gandalf and with it.
PAPER = {
    "astec": (
        ((37.12, 25.20, 18.24, 29.22, 34.64, 39.49), (48.82, 42.62, 38.44, 21.47, 25.41, 27.86)),
        ((43.95, 29.66, 21.39, 37.40, 43.03, 48.31), (53.02, 46.13, 41.37, 27.32, 31.20, 33.34)),
    ),
    "decaf": (
        ((38.40, 25.84, 18.65, 30.85, 36.44, 41.42), (50.67, 44.49, 40.35, 22.07, 26.54, 29.30)),
        ((42.43, 28.96, 20.90, 35.22, 42.12, 47.61), (53.02, 46.65, 42.25, 25.47, 30.14, 32.83)),
    ),
    "eclare": (
        ((40.46, 27.54, 19.63, 33.18, 39.55, 44.10), (50.14, 44.09, 40.00, 23.43, 27.90, 30.56)),
        ((42.51, 28.89, 20.81, 35.72, 42.19, 47.46), (53.87, 47.45, 43.00, 28.86, 32.90, 35.20)),
    ),
    "inceptionxml": (
        ((36.79, 24.94, 17.95, 28.50, 34.15, 38.79), (48.21, 42.47, 38.59, 20.72, 24.94, 27.52)),
        ((44.67, 30.00, 21.50, 37.98, 43.83, 48.93), (50.80, 44.54, 40.25, 25.49, 29.42, 31.59)),
    ),
    "inceptionxml-lf": (
        ((40.74, 27.24, 19.57, 34.52, 39.40, 44.13), (49.01, 42.97, 39.46, 24.56, 28.37, 31.67)),
        ((43.84, 29.59, 21.30, 38.22, 43.90, 49.03), (52.91, 47.23, 42.84, 30.02, 33.18, 35.56)),
    ),
}
PAPER_COVERAGE = {  # thesis, table 1.4, LF-AmazonTitles-131K: without Gandalf, with it
    "inceptionxml": ((22.33, 39.98, 46.29), (31.04, 51.63, 58.03)),
}


def published(system: str, *, gandalf: bool) -> tuple[Published, ...]:
    """What the thesis prints for a system."""
    if system not in PAPER:
        return ()
    coverage = PAPER_COVERAGE.get(system, ((None,) * 3,) * 2)[gandalf]
    small, large = PAPER[system][gandalf]
    source = "thesis, table 1.3" + (" and 1.4" if system in PAPER_COVERAGE else "")
    return (
        Published("LF-AmazonTitles-131K", source, {"clf": (*small, *coverage)}),
        Published("LF-AmazonTitles-1.3M", "thesis, table 1.3", {"clf": (*large, *(None,) * 3)}),
    )


def system_row(system: str, *, gandalf: bool) -> Row:
    """A system without or with Gandalf; ``unidec`` has the bag encoder and no prefix."""
    row = Row(
        f"{system} + Gandalf" if gandalf else system,
        GANDALF if gandalf else {},
        published(system, gandalf=gandalf),
        config=FRUGAL,
        prefix=f"{system},",
    )
    if system == "unidec":
        row = dataclasses.replace(row, config=UNIDEC, prefix="", heads=("concat",))
    return fitted(row, UNIDEC_STEPS if system == "unidec" else STEPS)


def without_points(system: str) -> Row:
    """With Gandalf, but without the label texts that are training points already."""
    row = system_row(system, gandalf=True)
    changed = {"overrides": SKIP, "published": (), "by_data": {}, "only": ("wordnettitles",)}
    row = dataclasses.replace(row, name=f"{row.name}, no texts of points", **changed)
    return fitted(row)


TABLE = Table(
    name="table_systems",
    title="Systems without and with Gandalf",
    heads=("clf",),
    datasets=DATASETS,
    columns=COLUMNS,
    facts=("steps", "seconds"),
    rows=(
        *(system_row(name, gandalf=g) for name in (*SYSTEMS, "unidec") for g in (False, True)),
        *(without_points(name) for name in ("astec", "inceptionxml", "unidec")),
    ),
)

if __name__ == "__main__":
    tables.main(TABLE, __doc__)
