"""Which queries share a batch: random ones, a cluster (UniDEC), joined clusters (NGAME).

The pool holds three positives for each of 256 queries and nothing else: with all labels of a small
data set in the pool, or many random ones, it hardly matters who shares it.

python -m experiments.table_batching [--dataset=wordnettitles --data=DIR]
"""

from __future__ import annotations

from experiments import tables
from experiments.ledger import Row, Table

TABLE = Table(
    name="table_batching",
    title="Batches",
    rows=(
        Row("random", {"fill": "none", "pool_size": 768, "batching": "random"}),
        Row("clusters", {"fill": "none", "pool_size": 768, "batching": "clusters"}),
        Row("joined", {"fill": "none", "pool_size": 768, "batching": "joined"}),
        Row("own settings", {}),
    ),
)

if __name__ == "__main__":
    tables.main(TABLE, __doc__)
