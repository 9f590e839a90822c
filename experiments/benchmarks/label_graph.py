"""Label graphs at LF-AmazonTitles-1.3M's shape: exact, random walks, and ECLARE's neighbours.

The peer of the exact graph multiplies with SciPy, ``Y.T @ Y``, divides rows and drops what is at or
below delta: all of G is in memory. Targets must agree.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from experiments import synthetic
from experiments.benchmarks import harness
from experiments.benchmarks.harness import Contender, Subject
from xmc_jax.data.graph import gandalf, label_features

DELTA = 0.1


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Three results."""
    scale = 0.002 if options.quick else options.scale
    for part, makers in (
        ("exact", {"ours": ours, "scipy": scipy}),
        ("walk", {"ours": walk}),
        ("neighbours", {"ours": label_features.neighbour_graph}),
    ):
        if not options.wanted(f"label_graph {part}"):
            continue
        contenders = [Contender(name, timed, (make, scale)) for name, make in makers.items()]
        results = harness.contest(options, contenders, repeats=1, warmup=0, check=same_targets)
        yield {
            **{"case": "label_graph", "part": part, "scale": scale, "delta": DELTA},
            "ours_is_faster": harness.ratios(results, "ours"),
            "contenders": results,
        }


def timed(make: Callable[[csr_matrix], csr_matrix], scale: float) -> Subject:
    """A turn makes the targets; what they are is looked at on little data."""
    small = make(synthetic.label_matrix(0.002, seed=1))
    facts = {"targets": small.nnz, "sum": round(float(small.data.sum(dtype=np.float64)), 2)}
    labels = synthetic.label_matrix(scale)
    numbers = []

    def turn(_: int) -> None:
        numbers.append(make(labels).nnz)

    shape = {"points": labels.shape[0], "labels": labels.shape[1], "pairs": labels.nnz}
    return Subject(turn, {**facts, **shape}, lambda: {"targets": numbers[-1]})


def ours(labels: csr_matrix) -> csr_matrix:
    """By blocks of rows, in threads."""
    return gandalf.gandalf_targets(labels, delta=DELTA)


def walk(labels: csr_matrix) -> csr_matrix:
    """Random walks, by blocks of rows, in threads."""
    return gandalf.walk_targets(labels, delta=DELTA)


def scipy(labels: csr_matrix) -> csr_matrix:
    """All at once. The synthetic labels all have points."""
    graph = csr_matrix(labels.T @ labels)
    points = np.maximum(graph.diagonal(), 1)
    graph.data /= np.repeat(points, np.diff(graph.indptr))
    graph.data[graph.data <= np.float32(DELTA)] = 0
    graph.eliminate_zeros()
    graph.setdiag(1)
    return graph


def same_targets(facts: dict[str, Any]) -> None:
    """Contenders made the same targets of the little data.

    Raises:
      ContenderError: they did not.
    """
    found = {(fact["targets"], fact["sum"]) for fact in facts.values()}
    if len(found) > 1:
        raise harness.ContenderError(f"targets (number, sum) differ: {sorted(found)}")
