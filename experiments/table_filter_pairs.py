"""Filter pairs of the training file: masked in their query's row, or left as negatives.

python -m experiments.table_filter_pairs [--dataset=wordnettitles --data=DIR]
"""

from __future__ import annotations

from experiments import tables
from experiments.ledger import Row, Table

TABLE = Table(
    name="table_filter_pairs",
    title="Filter pairs in training",
    rows=(
        Row("masked", {"mask_filter_pairs": True}),
        Row("not masked", {"mask_filter_pairs": False}),
    ),
)

if __name__ == "__main__":
    tables.main(TABLE, __doc__)
