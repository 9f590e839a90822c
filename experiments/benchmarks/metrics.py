"""All ranking metrics of 135 K test rows and 131 K labels, against a plain implementation.

The plain one goes through the rows with Python's sets, as napkinXC's metrics do, and computes P,
nDCG and PSP only; ours computes R, PSnDCG and coverage too. The values must agree.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from experiments.benchmarks import harness
from experiments.benchmarks.harness import Contender, Subject
from xmc_jax import metrics
from xmc_jax.metrics.propensity import inverse_propensity

KS = (1, 3, 5)
DEPTH = 10  # predictions a row
LABELS_A_ROW = 2.3  # of LF-AmazonTitles-131K


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One result."""
    rows, labels = (500, 400) if options.quick else (134_835, 131_073)
    contenders = [
        Contender("ours", our_metrics, (rows, labels)),
        Contender("plain", plain_metrics, (rows, labels)),
    ]
    results = harness.contest(options, contenders, repeats=3, check=same_values)
    yield {
        **{"case": "metrics", "rows": rows, "labels": labels, "depth": DEPTH},
        "ours_is_faster": harness.ratios(results, "ours"),
        "contenders": results,
    }


def made(rows: int, labels: int) -> tuple[np.ndarray, csr_matrix, np.ndarray]:
    """Predictions, of which about every third is right, the truth, and inverse propensities."""
    rng = np.random.default_rng(0)
    counts = 1 + rng.poisson(LABELS_A_ROW - 1, rows)
    row = np.repeat(np.arange(rows), counts)
    label = (labels * rng.random(len(row)) ** 2).astype(np.int64)
    row, label = np.divmod(np.unique(row * labels + label), labels)
    truth = csr_matrix((np.ones(len(row), np.float32), (row, label)), shape=(rows, labels))
    first = rng.integers(0, labels // DEPTH, (rows, 1))
    predictions = (first + np.arange(DEPTH) * (labels // DEPTH)).astype(np.int32)  # all different
    right = np.flatnonzero(rng.random(rows) < 0.8)
    own = truth.indices[truth.indptr[right]]
    place = rng.integers(0, DEPTH, len(right))
    there = (predictions[right] == own[:, None]).any(axis=1)
    predictions[right[~there], place[~there]] = own[~there]
    return predictions, truth, inverse_propensity(truth, a=0.6, b=2.6)


def our_metrics(rows: int, labels: int) -> Subject:
    """`metrics.evaluate`."""
    predictions, truth, weights = made(rows, labels)

    def evaluate(_: int = 0) -> dict[str, float]:
        return metrics.evaluate(predictions, truth, inverse_propensity=weights, ks=KS)

    return Subject(evaluate, {"values": evaluate()})


def plain_metrics(rows: int, labels: int) -> Subject:
    """A loop over rows."""
    predictions, truth, weights = made(rows, labels)
    lists, wanted = predictions.tolist(), np.split(truth.indices, truth.indptr[1:-1])

    def evaluate(_: int = 0) -> dict[str, float]:
        return plain(lists, wanted, weights)

    return Subject(evaluate, {"values": evaluate()})


def plain(
    predictions: list[list[int]], truth: list[np.ndarray], weights: np.ndarray
) -> dict[str, float]:
    """P, nDCG and PSP at each k, in percent, row by row."""
    sums = {f"{name}@{k}": 0.0 for name in ("P", "nDCG", "PSP", "best") for k in KS}
    for row, labels in zip(predictions, truth):
        right = set(labels.tolist())
        best = sorted((weights[label] for label in right), reverse=True)
        for k in KS:
            hits = [label in right for label in row[:k]]
            ideal = sum(1 / math.log2(j + 2) for j in range(min(k, len(right))))
            dcg = sum(1 / math.log2(j + 2) for j, hit in enumerate(hits) if hit)
            sums[f"P@{k}"] += sum(hits) / k
            sums[f"nDCG@{k}"] += dcg / ideal if ideal else 0.0
            sums[f"PSP@{k}"] += sum(weights[label] for label, hit in zip(row, hits) if hit) / k
            sums[f"best@{k}"] += sum(best[:k]) / k
    found = {f"{name}@{k}": sums[f"{name}@{k}"] for name in ("P", "nDCG") for k in KS}
    found = {name: 100 * value / len(truth) for name, value in found.items()}
    return found | {f"PSP@{k}": 100 * sums[f"PSP@{k}"] / sums[f"best@{k}"] for k in KS}


def same_values(facts: dict[str, Any]) -> None:
    """The plain metrics equal ours.

    Raises:
      ContenderError: one does not.
    """
    for name, value in facts["plain"]["values"].items():
        if not math.isclose(value, facts["ours"]["values"][name], rel_tol=1e-9):
            raise harness.ContenderError(
                f"{name}: ours {facts['ours']['values'][name]}, plain {value}"
            )
