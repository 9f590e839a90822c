"""Losses of the two heads (thesis table 2.4).

python -m experiments.table_losses [--dataset=wordnettitles --data=DIR]
"""

from __future__ import annotations

from experiments import tables
from experiments.ledger import Published, Row, Table


def published(*figures: tuple[float, float, float, float]) -> tuple[Published, ...]:
    """P@1, P@5, PSP@1, PSP@5 of concat, de and clf on one data set after the other."""
    names = ("LF-AmazonTitles-1.3M", "LF-WikiTitles-500K")
    spread = [(p1, None, p5, psp1, None, psp5) for p1, p5, psp1, psp5 in figures]
    return tuple(
        Published(name, "thesis, table 2.4", dict(zip(("concat", "de", "clf"), three)))
        for name, three in zip(names, (spread[:3], spread[3:]))
    )


TABLE = Table(
    name="table_losses",
    title="Losses of the dual encoder / of the classifier",
    heads=("concat", "de", "clf"),
    rows=(
        Row(
            "supcon / supcon",
            {"de.loss": "supcon", "clf.loss": "supcon"},
            published(
                *((53.41, 43.57, 32.54, 38.20), (49.35, 39.23, 27.78, 32.86)),
                *((46.90, 38.62, 31.23, 35.28), (48.38, 19.89, 26.26, 24.78)),
                *((48.63, 19.30, 27.21, 24.52), (29.48, 14.21, 18.97, 18.82)),
            ),
        ),
        Row(
            "supcon / supcon+bce",
            {"de.loss": "supcon", "clf.loss": "supcon+bce"},
            published(
                *((54.86, 44.61, 28.05, 35.05), (51.08, 40.78, 28.64, 34.00)),
                *((53.48, 42.76, 26.24, 32.81), (49.68, 20.15, 25.29, 24.67)),
                *((47.07, 18.88, 27.47, 24.53), (45.07, 17.96, 19.01, 19.68)),
            ),
        ),
        Row(
            "decoupled / bce",
            {"de.loss": "decoupled_softmax", "clf.loss": "bce"},
            published(
                *((55.12, 44.80, 31.72, 37.28), (50.83, 40.61, 27.14, 33.66)),
                *((54.69, 42.81, 30.74, 36.48), (48.65, 19.58, 26.15, 24.37)),
                *((47.70, 18.59, 26.84, 24.19), (43.27, 16.55, 19.41, 18.29)),
            ),
        ),
        Row(
            "decoupled / decoupled",
            {"de.loss": "decoupled_softmax", "clf.loss": "decoupled_softmax"},
            published(
                *((56.73, 45.19, 34.03, 39.54), (52.52, 42.02, 29.78, 35.06)),
                *((43.67, 36.85, 32.68, 37.07), (48.97, 19.82, 27.08, 24.89)),
                *((49.20, 19.30, 27.36, 24.49), (30.27, 13.74, 18.95, 17.75)),
            ),
        ),
        Row(
            "decoupled / decoupled+bce",
            {"de.loss": "decoupled_softmax", "clf.loss": "decoupled_softmax+bce"},
            published(
                *((57.41, 45.89, 30.10, 36.78), (52.51, 42.00, 29.82, 35.08)),
                *((55.56, 44.10, 29.15, 35.49), (50.22, 20.32, 25.90, 24.85)),
                *((49.16, 19.33, 27.35, 24.54), (44.66, 17.38, 20.56, 19.62)),
            ),
        ),
    ),
)

if __name__ == "__main__":
    tables.main(TABLE, __doc__)
