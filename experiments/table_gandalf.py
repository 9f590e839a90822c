"""What Gandalf is made of and compared with (thesis tables 1.2, 1.6 and 1.7).

InceptionXML on the points (D), the label texts (Z), both, and a sample of both of the size of D;
with other targets; MixUp, Label-MixUp and synonyms in its place; InceptionXML-LF with other
thresholds delta; UniDEC with positives of a label text drawn in proportion to their targets or
evenly. The same number of steps for all, see `experiments.equal_steps`.

python -m experiments.table_gandalf --data=DIR [--dataset=wordnettitles]
"""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments import tables
from experiments.equal_steps import STEPS, fitted
from experiments.ledger import Published, Row, Table
from experiments.table_systems import COLUMNS, DATASETS, GANDALF, UNIDEC_STEPS, system_row

Figures = tuple[float, float, float, float]  # P@1, P@5, PSP@1, PSP@5


def published(amazon: Figures, wiki: Figures | None, table: str = "1.2") -> tuple[Published, ...]:
    """What the thesis prints of a row."""
    found = []
    for data, figures in (("LF-AmazonTitles-131K", amazon), ("LF-WikiSeeAlsoTitles-320K", wiki)):
        if figures is not None:
            p1, p5, psp1, psp5 = figures
            values = (p1, None, p5, psp1, None, psp5, None, None, None)
            found.append(Published(data, f"thesis, table {table}", {"clf": values}))
    return tuple(found)


def changed(
    system: str, name: str, more: dict[str, Any] | None, papers: tuple[Published, ...] = ()
) -> Row:
    """A system with Gandalf, ``more`` of its fields changed; None = without Gandalf."""
    row = system_row(system, gandalf=more is not None)
    overrides = {} if more is None else {**GANDALF, **more}
    row = dataclasses.replace(
        row, name=f"{system}: {name}", overrides=overrides, published=papers, by_data={}
    )
    return fitted(row, UNIDEC_STEPS if system == "unidec" else STEPS)


D = published((35.62, 17.35, 27.53, 37.50), (21.53, 10.66, 13.06, 16.33))
Z = published((29.68, 16.04, 28.76, 38.27), (22.88, 12.44, 22.03, 25.55))
BOTH = published((43.71, 21.14, 37.25, 47.89), (31.42, 16.37, 24.78, 28.98), "1.7")
SAMPLE = published((38.46, 18.52, 32.29, 41.59), (25.93, 13.34, 19.75, 23.57))
SELF = published((37.59, 18.18, 30.75, 40.06), (24.43, 12.15, 16.89, 20.02))
GLAS = published((42.80, 20.49, 37.01, 46.73), (30.28, 15.43, 23.97, 28.45))
# Table 1.2 prints these figures as those of D and Z.
WALK = published((43.52, 20.92, 36.96, 47.64), (31.31, 16.22, 24.31, 28.83), "1.7")
SYNONYMS = published((35.07, 17.08, 27.20, 36.77), (20.08, 9.92, 12.00, 14.90), "1.6")
MIXUP = published((35.63, 17.37, 27.55, 37.63), (21.62, 10.65, 13.13, 16.36), "1.6")
LABEL_MIXUP = published((37.25, 17.98, 29.25, 39.09), (23.90, 12.28, 15.20, 19.56), "1.6")
# For LF-WikiSeeAlsoTitles-320K this line has the figures of LF-AmazonTitles-1.3M: left out.
LF_D = published((40.74, 19.57, 34.52, 44.13), None, "1.7")
DELTA_0 = published((41.71, 20.14, 36.94, 46.64), (31.40, 16.53, 26.01, 29.99), "1.7")
DELTA_1 = published((42.09, 20.45, 37.09, 47.04), (32.20, 16.60, 26.06, 30.03), "1.7")
DELTA_2 = published((41.73, 20.18, 37.01, 46.67), (31.29, 16.28, 25.68, 29.65), "1.7")

TABLE = Table(
    name="table_gandalf",
    title="Gandalf: points, targets, threshold, draw",
    heads=("clf",),
    datasets=DATASETS[:1],
    columns=COLUMNS,
    facts=("steps", "seconds"),
    rows=(
        changed("inceptionxml", "D", None, D),
        changed("inceptionxml", "Z", {"gandalf.points": "labels"}, Z),
        changed("inceptionxml", "D and Z", {}, BOTH),
        changed("inceptionxml", "sample of the size of D", {"gandalf.points": "sample"}, SAMPLE),
        changed("inceptionxml", "self-annotation", {"gandalf.variant": "self"}, SELF),
        changed("inceptionxml", "GLaS", {"gandalf.variant": "glas"}, GLAS),
        changed("inceptionxml", "random walk", {"gandalf.variant": "walk"}, WALK),
        changed("inceptionxml", "synonyms", {"gandalf.variant": "synonyms"}, SYNONYMS),
        changed("inceptionxml", "MixUp", {"gandalf.variant": "mixup"}, MIXUP),
        changed("inceptionxml", "Label-MixUp", {"gandalf.variant": "label_mixup"}, LABEL_MIXUP),
        changed("inceptionxml-lf", "D", None, LF_D),
        changed("inceptionxml-lf", "delta 0", {"gandalf.delta": 0.0}, DELTA_0),
        changed("inceptionxml-lf", "delta 0.1", {}, DELTA_1),
        changed("inceptionxml-lf", "delta 0.2", {"gandalf.delta": 0.2}, DELTA_2),
        changed("unidec", "D", None),
        changed("unidec", "drawn by target", {}),
        changed("unidec", "drawn evenly", {"gandalf.draw": "uniform"}),
    ),
)

if __name__ == "__main__":
    tables.main(TABLE, __doc__)
