"""Which queries share a batch: random ones, a cluster (UniDEC), joined clusters (NGAME).

The pool holds three positives for each of 256 queries and nothing else: with all labels of a small
data set in the pool, or many random ones, it hardly matters who shares it. On WordNetTitles one
epoch of random batches and five of the batches compared.

python -m experiments.table_batching [--dataset=wordnettitles --data=DIR]
"""

from __future__ import annotations

from experiments import tables
from experiments.ledger import Row, Table

SHORT = {"wordnettitles": {"epochs": 6, "warmup_epochs": 1}}


def row(batching: str) -> Row:
    """A small pool without fill, and the batches in question."""
    overrides = {"fill": "none", "pool_size": 768, "batching": batching}
    return Row(batching, overrides, by_data=SHORT)


TABLE = Table(
    name="table_batching",
    title="Batches",
    rows=(
        row("random"),
        row("clusters"),
        row("joined"),
        Row("own settings", {}),
    ),
)

if __name__ == "__main__":
    tables.main(TABLE, __doc__)
