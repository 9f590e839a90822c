"""Mined hard negatives, and the two heads alone and together (preprint tables 5 and 7).

The pool holds what is sampled and nothing else, as in the papers. (Filled up with random labels it
has room for every label of wordnet-mini, and there is nothing left to mine.)

python -m experiments.table_hard_negatives [--dataset=wordnettitles --data=DIR]
"""

from __future__ import annotations

from experiments import tables
from experiments.ledger import Published, Row, Table

NONE_13M = Published(
    "LF-AmazonTitles-1.3M",
    "preprint, table 5",
    {
        "concat": (48.36, 43.81, 38.30, 34.03, 37.25, 38.81),
        "de": (44.71, 39.20, 34.92, 30.17, 32.89, 34.03),
        "clf": (41.35, 37.07, 33.87, 32.87, 35.31, 36.76),
    },
)
SIX_13M = Published(
    "LF-AmazonTitles-1.3M",
    "preprint, table 5",
    {
        "concat": (53.79, 48.23, 43.83, 32.19, 35.85, 37.96),
        "de": (47.49, 42.11, 37.94, 29.04, 32.20, 34.02),
        "clf": (46.26, 41.77, 38.34, 30.30, 32.82, 34.44),
    },
)
NONE_131K = Published(
    "LF-Amazon-131K",
    "preprint, table 5",
    {
        "concat": (47.69, 32.22, 23.29, 40.72, 47.33, 53.51),
        "de": (47.52, 32.04, 23.14, 40.75, 47.07, 53.11),
        "clf": (43.53, 29.29, 21.33, 37.00, 42.92, 48.90),
    },
)
THREE_131K = Published(
    "LF-Amazon-131K",
    "preprint, table 7",
    {"concat": (47.76, 32.20, 23.26, 40.32, 46.88, 53.01)},
)
SIX_131K = Published(
    "LF-Amazon-131K",
    "preprint, table 5",
    {
        "concat": (48.00, 32.34, 23.38, 40.43, 47.08, 53.27),
        "de": (44.50, 29.86, 21.60, 37.21, 43.21, 49.00),
        "clf": (47.59, 32.14, 23.22, 40.36, 46.85, 52.95),
    },
)

TABLE = Table(
    name="table_hard_negatives",
    title="Mined hard negatives; dual encoder, classifier and both",
    heads=("concat", "de", "clf"),
    rows=(
        Row("no hard negatives", {"fill": "none", "hard_negatives": False}, (NONE_131K, NONE_13M)),
        Row("eta 3", {"fill": "none", "hard_negatives": True, "eta": 3}, (THREE_131K,)),
        Row("eta 6", {"fill": "none", "hard_negatives": True, "eta": 6}, (SIX_131K, SIX_13M)),
        Row("own settings", {}),
    ),
)

if __name__ == "__main__":
    tables.main(TABLE, __doc__)
