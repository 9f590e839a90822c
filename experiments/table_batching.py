"""Which queries share a batch: random ones, a cluster (UniDEC), joined clusters (NGAME).

python -m experiments.table_batching [--dataset=wordnettitles --data=DIR]
"""

from __future__ import annotations

from experiments import tables
from experiments.ledger import Row, Table

TABLE = Table(
    name="table_batching",
    title="Batches",
    rows=tuple(Row(name, {"batching": name}) for name in ("random", "clusters", "joined")),
)

if __name__ == "__main__":
    tables.main(TABLE, __doc__)
