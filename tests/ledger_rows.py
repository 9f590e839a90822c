"""Rows of the ledger without training."""

from __future__ import annotations

from experiments import ledger


def made(row, seed, value, dataset="wordnet-mini", **config):
    """A row as training leaves it, whose figures are value, value + 1, ..."""
    figures = {name: value + i for i, name in enumerate(ledger.COLUMNS)}
    flat = ledger.compared(ledger.configuration(dataset, row, seed))
    return {
        **{"kind": "train", "dataset": dataset, "seed": seed, "seconds": 60.0},
        **{"in_batch_positives": 2.5},
        **{"metrics": {"concat": figures}, "config": {**flat, **config}, "device": "D"},
        "commit": "c",
    }
